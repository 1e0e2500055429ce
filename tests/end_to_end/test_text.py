"""Texts through the command line, from messages to the files that a phone would load: a tokenizer and int8 ONNX."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score
from tokenizers import Tokenizer

from ptpipe_torch import Predictions

from ..conftest import CommandLine
from ..forks import run_forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("fork_server")]

ROOT = Path(__file__).parents[2]
SMS = Path(os.environ.get("PTPIPE_DATA", "none")) / "sms_spam" / "sms.tsv"
MANIFEST = """\
version: 1
name: messages
seed: 1
stages:
  data:
    uses: data.text
    with:
      {path: sms_spam/sms.tsv, column_names: [label, text], quoting: false, task: classification, targets: [label],
       classes: {positive: spam}, vocabulary_size: 600, max_length: 64, batch_by_length: true, batch_size: 32,
       train_size: 2400, test_size: 400, calibration_size: 256}
  net:        {uses: model.text_transformer, with: {dim: 64, num_layers: 1}}
  trained:
    uses: train.supervised
    with: {epochs: 5, optimizer: adamw, lr: 0.002, early_stopping: {metric: val_average_precision, patience: 5}}
  observed:   {uses: quant.prepare, needs: {model: trained}, with: {backend: fbgemm}}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  int8:       {uses: quant.convert, needs: {model: calibrated}}
  onnx:       {uses: export.onnx, needs: {model: int8}}
  predicted:  {uses: eval.predict, needs: {model: onnx}}
  compare:
    uses: eval.compare
    needs: {models: [trained, int8, onnx]}
    with: {batch_sizes: [1], threads: [one], budget_s: 1}
  quality:    {uses: gate.quality, needs: {comparison: compare}, with: {candidate: onnx, metric: f1, max_drop: 0.02}}
  ranking:
    uses: gate.quality
    needs: {comparison: compare}
    with: {candidate: onnx, metric: roc_auc, max_drop: 0.1, min_value: 0.9, on_inconclusive: fail}
"""
HAM = (
    "see you at home",
    "are we meeting later",
    "i am on the bus",
    "ok thanks",
    "call me when you are there",
    "lunch?",
)
SPAM = ("you have won a prize", "claim your free award", "text WIN to 80082", "urgent! your account", "cash reward now")


def made_up_messages() -> str:
    """A stand-in for the SMS Spam Collection, in its format."""
    rng = random.Random(0)
    lines = []
    for number in range(2500):
        label, phrases = ("spam", SPAM) if rng.random() < 0.2 else ("ham", HAM)
        words = [*" ".join(rng.sample(phrases, 2)).split(), str(number)]
        rng.shuffle(words)
        lines.append(f'{label}\t{" ".join(words)} "')
    return "\n".join(lines) + "\n"


def ptpipe(folder: Path, *arguments: str | Path, data: Path) -> dict[str, Any]:
    """Run a command; return what it prints, with its stages by id."""
    done = run_forked(folder, *arguments, "--json", environment={"PTPIPE_DATA": str(data)})
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed | {"stages": {stage.get("stage_id", stage.get("id")): stage for stage in printed["stages"]}}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a manifest and messages: the real ones where they are there."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "messages.yaml").write_text(MANIFEST)
    (folder / "sms_spam").mkdir()
    messages = SMS.read_text(encoding="utf-8") if SMS.is_file() else made_up_messages()
    (folder / "sms_spam" / "sms.tsv").write_text(messages, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def finished(place) -> dict[str, Any]:
    return ptpipe(place, "run", "messages.yaml", "--artifacts", "artifacts", data=place)


def folder_of(place: Path, finished: dict[str, Any], stage_id: str) -> Path:
    digest = finished["stages"][stage_id]["outputs"]["output"]["digest"]
    return place / "artifacts" / "objects" / digest[:2] / digest / "files"


def test_messages_are_learned_and_int8_loses_nothing(place, finished) -> None:
    comparison = json.loads((folder_of(place, finished, "compare") / "comparison.json").read_text())
    f1 = {row["name"]: row["metrics"]["f1"] for row in comparison["rows"]}
    assert f1["trained"] >= 0.85
    assert max(abs(f1["int8"] - f1["trained"]), abs(f1["onnx"] - f1["trained"])) <= 0.03
    (macs,) = {row["macs"] for row in comparison["rows"]}  # in torch and in the file
    assert macs > 10_000
    sizes = {row["name"]: row["size_bytes"] for row in comparison["rows"]}
    assert sizes["int8"] < 0.35 * sizes["trained"]


def test_rankings_are_those_of_scikit_learn_and_a_gate_judges_them(place, finished) -> None:
    predictions = Predictions.load(folder_of(place, finished, "predicted"))
    labels_N, logits_NK = predictions.arrays["labels"], predictions.arrays["logits"].astype(float)
    odds_N = (logits_NK[:, 1] - logits_NK[:, 0]).astype(np.float32)
    expected = roc_auc_score(labels_N, odds_N), average_precision_score(labels_N, odds_N)
    assert predictions.metrics["class_names"] == ["ham", "spam"] and expected[1] > 0.9
    comparison = json.loads((folder_of(place, finished, "compare") / "comparison.json").read_text())
    row = next(row for row in comparison["rows"] if row["name"] == "onnx")
    for metrics in (finished["stages"]["predicted"]["metrics"], row["metrics"]):
        assert (metrics["roc_auc"], metrics["average_precision"]) == pytest.approx(expected, abs=1e-12)
    verdict = json.loads((folder_of(place, finished, "ranking") / "verdict.json").read_text())
    assert verdict["decision"] == "passed" and verdict["facts"]["value"] == row["metrics"]["roc_auc"]
    assert verdict["facts"]["drop_low"] <= verdict["facts"]["drop"] <= verdict["facts"]["drop_high"] < 0.1
    history = finished["stages"]["trained"]["metrics"]["history"]
    best = max(history, key=lambda epoch: epoch["val_average_precision"])
    assert finished["stages"]["trained"]["metrics"]["best_epoch"] == best["epoch"]
    report = (place / "artifacts" / "runs" / finished["run_id"] / "report.html").read_text(encoding="utf-8")
    assert "Other metrics, with 95 % intervals" in report and "roc auc" in report


def test_the_delivered_files_classify_messages(place, finished) -> None:
    """With the tokenizer and the ONNX file alone, as where they are used."""
    delivered = place / "artifacts" / "runs" / finished["run_id"]
    tokenizer = Tokenizer.from_file(str(delivered / "data" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    session = onnxruntime.InferenceSession(str(delivered / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    predictions = Predictions.load(folder_of(place, finished, "predicted"))
    lines = (place / "sms_spam" / "sms.tsv").read_text(encoding="utf-8").splitlines()
    rows = [int(name.rpartition("/")[2]) - 1 for name in predictions.ids[:100]]
    encoded = tokenizer.encode_batch([lines[row].partition("\t")[2] for row in rows])
    (logits,) = session.run(None, {"tokens": np.array([text.ids for text in encoded], dtype=np.int64)})
    agreeing = logits.argmax(1) == predictions.arrays["prediction"][:100]
    assert agreeing.mean() >= 0.99  # one batch here, others there: rounding may decide a tie


def test_a_second_run_is_cached_and_a_changed_message_is_read(place, finished) -> None:
    options = ("--artifacts", "artifacts", "--json")
    again = CommandLine(place)(
        "run", "messages.yaml", *options, PTPIPE_DATA=str(place)
    )  # its strings' hashes are others
    assert {stage["outcome"] for stage in again.json["stages"]} == {"cached"}
    messages = place / "sms_spam" / "sms.tsv"
    before = messages.read_bytes()
    messages.write_bytes(before + b"ham\tone more message\n")
    planned = ptpipe(place, "plan", "messages.yaml", "--artifacts", "artifacts", data=place)
    messages.write_bytes(before)
    assert not planned["stages"]["data"]["cached"]


@pytest.mark.skipif(not os.environ.get("PTPIPE_THOROUGH"), reason="two minutes: set PTPIPE_THOROUGH")
@pytest.mark.skipif(not SMS.is_file(), reason="PTPIPE_DATA has no sms_spam")
def test_the_manifest_reaches_its_figures(tmp_path) -> None:
    data = SMS.parents[1]
    ran = ptpipe(ROOT, "run", "manifests/sms_text.yaml", "--artifacts", tmp_path, data=data)
    digest = ran["stages"]["compare"]["outputs"]["output"]["digest"]
    comparison = json.loads(
        (tmp_path / "objects" / digest[:2] / digest / "files" / "comparison.json").read_text(encoding="utf-8")
    )
    rows = {row["name"]: row for row in comparison["rows"]}
    assert rows["pretrain"]["metrics"]["f1"] >= 0.94
    for name in ("dynamic", "static", "qat", "onnx_dynamic", "onnx_static"):
        assert rows[name]["metrics"]["f1"] >= rows["pretrain"]["metrics"]["f1"] - 0.01
        assert rows[name]["size_bytes"] <= 0.3 * rows["pretrain"]["size_bytes"]
