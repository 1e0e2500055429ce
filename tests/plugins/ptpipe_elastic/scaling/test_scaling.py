"""Fits find what they were made from; predictions are the formulas; the verb says what is wrong in one line."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import UsageError
from ptpipe_elastic.scaling.fit import PREDICTED, AllReduceTime, Amdahl, Link, Throughput, fit_amdahl, fit_link, predict
from ptpipe_elastic.scaling.report import Measurements, Network, Subject, make_report

SUBJECT = Subject("m.yaml", "fit", "train.supervised", 128)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def throughput(mode, workers, samples_per_s):
    return Throughput(mode, workers, samples_per_s, (samples_per_s,), 128.0 * workers)


def ring_times(alpha, beta, worlds, sizes=SIZES):
    """Written out message by message: p - 1 of n / p bytes to sum, as many to spread."""
    return [AllReduceTime(p, n, sum(alpha + n / p * beta for _ in range(2 * (p - 1)))) for p in worlds for n in sizes]


@given(
    share=st.floats(0, 1),
    alone=st.floats(1e-3, 1e6),
    workers=st.sets(st.integers(2, 300), min_size=1, max_size=6),
)
def test_the_serial_fraction_is_found(share, alone, workers):
    rates = {p: alone / (share + (1 - share) / p) for p in (1, *workers)}
    law = fit_amdahl(rates)
    if law is None:  # rounding, at the very edge
        assert share == pytest.approx(1)
    else:
        assert law.serial_fraction == pytest.approx(share, abs=1e-9)


@given(share=st.floats(0.05, 0.9), noise=st.floats(-0.02, 0.02))
def test_of_several_numbers_of_workers_the_share_is_the_least_squares_one(share, noise):
    rates = {1: 100.0, **{p: (1 + noise * (-1) ** p) * 100 / (share + (1 - share) / p) for p in (2, 3, 4)}}
    found = fit_amdahl(rates).serial_fraction

    def squares(s):
        return sum((100 / rate - s - (1 - s) / p) ** 2 for p, rate in rates.items())

    assert squares(found) <= min(squares(found + step) for step in (-1e-4, 1e-4))


def test_what_amdahls_law_has_no_words_for():
    assert fit_amdahl({1: 100.0}) is None
    assert fit_amdahl({1: 100.0, 2: 80.0}) is None
    assert fit_amdahl({1: 100.0, 2: 210.0}) == Amdahl(0.0)
    assert Amdahl(0.0).max_speedup == math.inf
    assert Amdahl(0.1).max_speedup == pytest.approx(10)
    assert Amdahl(0.1).efficiency(10) == pytest.approx(1 / 1.9)


@given(
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e-12, 1e-7),
    worlds=st.sets(st.integers(2, 64), min_size=1, max_size=4),
)
def test_latency_and_bandwidth_are_found(alpha, beta, worlds):
    fit = fit_link(ring_times(alpha, beta, worlds))
    if fit is None:  # one of the two is lost beside the other
        assert alpha < 1e-3 * SIZES[0] / max(worlds) * beta or beta * SIZES[-1] < 1e-3 * max(worlds) * alpha
        return
    again = ring_times(fit.link.alpha_s, fit.link.beta_s_per_byte, worlds)
    assert [time.seconds for time in again] == pytest.approx(
        [time.seconds for time in ring_times(alpha, beta, worlds)], rel=1e-4
    )
    assert fit.error < 1e-4


def test_the_fit_in_the_units_of_a_network():
    fit = fit_link(ring_times(50e-6, 8e-10, (2, 4)))
    assert fit.link.latency_us == pytest.approx(50)
    assert fit.link.bandwidth_gbit_s == pytest.approx(10)
    assert fit.num_times == 8


def test_times_that_say_nothing_of_one_of_the_two():
    assert fit_link([]) is None
    assert fit_link(ring_times(1e-5, 1e-9, (2,), (1024,))) is None
    flat = fit_link([AllReduceTime(2, size, 1e-3 / (1 + size / 1e9)) for size in SIZES])
    assert flat.link.beta_s_per_byte == 0.0
    assert flat.link.bandwidth_gbit_s == math.inf
    steep = fit_link([AllReduceTime(2, size, 1e-12 * size**1.5) for size in SIZES])
    assert steep.link.alpha_s == 0.0


@given(
    compute=st.floats(1e-4, 10),
    size=st.floats(1, 1e10),
    alpha=st.floats(0, 1e-3),
    beta=st.floats(0, 1e-8),
)
def test_predictions(compute, size, alpha, beta):
    rows = predict(compute, size, Link(alpha, beta))
    assert [row.workers for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256] == list(PREDICTED)
    assert rows[0].efficiency_low == rows[0].efficiency_high == 1.0
    for row, after in pairwise(rows):
        assert row.efficiency_low <= row.efficiency_high
        assert after.efficiency_low <= row.efficiency_low
        assert after.efficiency_high <= row.efficiency_high
    p, comm = 8, 14 * alpha + 14 / 8 * size * beta
    assert rows[3].efficiency_low == pytest.approx(compute / (compute + comm))
    assert rows[3].efficiency_high == pytest.approx(compute / max(compute, compute / 3 + comm))
    assert rows[3].workers == p


def figures(*throughputs, times=(), sizes=None, num_cpus=64):
    return Measurements(tuple(throughputs), tuple(times), sizes or {}, num_cpus)


def test_one_number_of_workers_says_that_nothing_can_be_fitted():
    report = make_report(SUBJECT, figures(throughput("single", 1, 100.0)))
    assert report.amdahl == report.predictions == {}
    assert report.fit is None
    assert report.assumptions == ()
    assert "nothing can be fitted" in report.notices[0]
    json.dumps(report.facts(), allow_nan=False)


def test_workers_that_share_processors_are_left_out_of_the_fits():
    rates = throughput("single", 1, 100.0), throughput("ddp", 2, 180.0), throughput("ddp", 4, 150.0)
    times = ring_times(1e-4, 1e-9, (2,)) + ring_times(1e-1, 1e-7, (4,))
    report = make_report(SUBJECT, figures(*rates, times=times, sizes={"ddp": 1e6}, num_cpus=2))
    assert report.amdahl["ddp"].serial_fraction == pytest.approx(1 / 9)
    assert report.fit.link.alpha_s == pytest.approx(1e-4)
    assert "4 workers shared 2 processors: excluded from the fits" in report.notices
    all_shared = make_report(SUBJECT, figures(*rates, times=times, sizes={"ddp": 1e6}, num_cpus=1))
    assert all_shared.fit.num_times == 8
    assert any("the limits of the machine" in line for line in all_shared.notices)


def test_a_network_of_ones_own():
    rates = throughput("single", 1, 100.0), throughput("ddp", 2, 180.0)
    times = ring_times(1e-4, 1e-9, (2,))
    given_ = make_report(SUBJECT, figures(*rates, times=times, sizes={"ddp": 1e6}), Network(20, 25))
    assert given_.predictions["ddp"][1].comm_s == pytest.approx(2 * 20e-6 + 1e6 * 8 / 25e9)
    assert given_.fit.link.alpha_s == pytest.approx(1e-4)
    assert any(line.startswith("latency (20 us) and bandwidth (25 Gbit/s) as given") for line in given_.assumptions)
    half = make_report(SUBJECT, figures(*rates, times=times, sizes={"ddp": 1e6}), Network(bandwidth_gbit_s=25))
    assert half.predictions["ddp"][1].comm_s == pytest.approx(2 * 1e-4 + 1e6 * 8 / 25e9)
    assert make_report(SUBJECT, figures(*rates, sizes={"ddp": 1e6}), Network(20)).predictions == {}


def test_sharded_training_goes_three_times_round():
    rates = throughput("single", 1, 100.0), throughput("ddp", 2, 180.0), throughput("fsdp", 2, 170.0)
    report = make_report(
        SUBJECT, figures(*rates, times=ring_times(1e-4, 1e-9, (2,)), sizes={"ddp": 1e6, "fsdp": 1e6, "single": 1e6})
    )
    ddp, fsdp = report.predictions["ddp"], report.predictions["fsdp"]
    assert [row.comm_s for row in fsdp] == pytest.approx([1.5 * row.comm_s for row in ddp])
    assert set(report.predictions) == {"ddp", "fsdp"}


def test_what_messages_do_not_explain_is_said():
    rates = throughput("single", 1, 100.0), throughput("ddp", 2, 110.0), throughput("pp", 2, 90.0)
    report = make_report(SUBJECT, figures(*rates, times=ring_times(1e-6, 1e-12, (2,)), sizes={"ddp": 1e6}))
    assert any(
        line.startswith("ddp, 2 workers: an efficiency of 55% is lower than communication explains")
        for line in report.notices
    )
    assert any(line.startswith("pp: more workers were slower than one") for line in report.notices)
    assert any("measure a third" in line for line in report.notices)


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from ptpipe_elastic.scaling.plot import draw, open_folder

    rates = throughput("single", 1, 100.0), throughput("ddp", 2, 180.0)
    report = make_report(SUBJECT, figures(*rates, times=ring_times(1e-4, 1e-9, (2,)), sizes={"ddp": 1e6}))
    path = draw(report, tmp_path)
    first = path.read_bytes()
    words = [text.strip() for text in ET.fromstring(first).itertext()]
    assert path == tmp_path / "scaling.svg"
    assert {"workers", "256", "ddp", "measured", "ideal", "Amdahl's law, fitted"} <= set(words)
    assert draw(report, tmp_path).read_bytes() == first
    alone = make_report(SUBJECT, figures(throughput("single", 1, 100.0)))
    assert draw(alone, tmp_path).read_bytes() != first
    with pytest.raises(UsageError, match=r"--output .*below can't be written to: Not a directory"):
        open_folder(path / "below")


def test_without_matplotlib_there_is_no_plot(tmp_path, monkeypatch):
    from ptpipe_elastic.scaling.plot import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw(make_report(SUBJECT, figures(throughput("single", 1, 100.0))), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_by_the_plot_alone():
    code = "import sys; from ptpipe_elastic.scaling import command, measure, plot; print('matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


MANIFEST = """
version: 1
name: tiny
seed: 3
stages:
  data: {uses: data.synthetic, with: {num_train: 256, num_test: 16, image_size: 8, batch_size: 16}}
  net: {uses: model.mlp, with: {hidden: [16]}}
  fit: {uses: train.supervised}
"""
MORE = "  more: {uses: train.supervised, needs: {model: fit}}\n"


@pytest.mark.parametrize(
    ("more", "arguments", "line"),
    [
        ("", ["--workers", "2,4"], "ptpipe: --workers 2,4: begin with 1: .*"),
        ("", ["--workers", "1,two"], "ptpipe: --workers 1,two: expected numbers separated by commas.*"),
        ("", ["--workers", "1,0"], "ptpipe: --workers 1,0: expected numbers separated by commas.*"),
        (MORE, [], "ptpipe: m.yaml: several training stages: choose one with --stage: fit, more"),
        ("", ["--stage", "fitt"], r"ptpipe: --stage fitt: no such training stage \(did you mean 'fit'\?\)"),
        ("", ["--stage", "net"], "ptpipe: --stage net: model.mlp is no training stage; the manifest has fit"),
        (
            "",
            ["--workers", "1,3", "--mode", "ddp+pp"],
            "ptpipe: ddp\\+pp, 3 workers: parallel: workers must be a multiple of 2.*",
        ),
        ("", ["--mode", "ddq"], "ptpipe: ddq, 2 workers: parallel.mode: should be .*"),
        ("", ["-s", "fit.batch_size=3", "--mode", "pp"], "ptpipe: pp, 2 workers: a batch of 6 can't be divided .*"),
        ("", ["-s", "fit.epoch=3"], "-s fit.epoch: unknown option 'epoch' .*"),
        ("", ["--output", "m.yaml/x"], "ptpipe: --output m.yaml/x can't be written to: Not a directory"),
    ],
)
def test_mistakes_are_named_before_any_work(run_cli, more, arguments, line):
    (run_cli.folder / "m.yaml").write_text(MANIFEST + more, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert re.fullmatch(line, ended.err.strip()), ended.err
    assert [path.name for path in run_cli.folder.iterdir()] == ["m.yaml"]


def test_no_training_stage(run_cli, project):
    project.write("one: {uses: toy.make}")
    ended = run_cli("scaling", "m.yaml", alone=True)
    assert (ended.code, ended.err.strip()) == (2, "ptpipe: m.yaml: no training stage to measure")


@pytest.mark.thorough
@pytest.mark.plugins
@pytest.mark.slow
def test_a_run_that_fails_is_one_line(run_cli):
    (run_cli.folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", "--workers", "1", "-s", "fit.lr=1e30", TMPDIR=str(run_cli.folder))
    assert ended.code == 1
    last = ended.err.strip().splitlines()[-1]
    assert re.fullmatch(r"ptpipe: single, 1 worker: fit failed: .* try a lower lr.*", last), ended.err
    assert "Traceback" not in ended.err
    assert not list(run_cli.folder.glob("ptpipe-*"))


@pytest.mark.plugins
@pytest.mark.slow
def test_workers_that_cannot_work_together_are_found_before_minutes_are_spent(run_cli):
    (run_cli.folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", GLOO_DEVICE_TRANSPORT="nosuch")
    assert ended.code == 1
    first, last = ended.err.strip().splitlines()
    assert first == "timing an all-reduce between 2 workers"
    assert re.fullmatch("ptpipe: timing an all-reduce failed .*`ptpipe doctor --workers 2` suggests fixes", last)


@pytest.mark.thorough
@pytest.mark.plugins
@pytest.mark.slow
def test_a_split_too_small_for_a_step(run_cli):
    (run_cli.folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", "-s", "fit.batch_size=200")
    assert ended.code == 2
    assert "ptpipe: ddp, 2 workers: the train split has fewer samples than one step of 2 x 200" in ended.err


@pytest.mark.plugins
@pytest.mark.slow
@pytest.mark.thorough
def test_from_the_manifest_to_the_plot(run_cli):
    manifest = MANIFEST + "  int8: {uses: quant.dynamic, needs: {model: fit}, with: {backend: fbgemm}}\n"
    (run_cli.folder / "m.yaml").write_text(manifest, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", "--workers", "1,2", "--output", "plots", "--json", TMPDIR=str(run_cli.folder))
    assert ended.code == 0, ended.err
    facts = ended.json
    assert (facts["stage"], facts["samples_per_worker"]) == ("fit", 16)
    measured = {(item["mode"], item["workers"]): item for item in facts["measured"]}
    assert set(measured) == {("single", 1), ("ddp", 2)}
    assert {len(item["rounds"]) for item in facts["measured"]} == {3}
    assert [item["samples_per_step"] for item in facts["measured"]] == [16, 32]
    one, two = measured["single", 1], measured["ddp", 2]
    assert two["speedup"] == pytest.approx(two["samples_per_s"] / one["samples_per_s"])
    times = facts["all_reduce"]["times"]
    assert [time["size_bytes"] for time in times] == [2**power for power in (10, 14, 18, 20, 22, 24)]
    num_parameters = 64 * 16 + 16 + 16 * 10 + 10
    assert 4 * num_parameters <= facts["gradient_bytes"]["ddp"] < 4 * num_parameters + 1000
    assert [row["workers"] for row in facts["predicted"]["ddp"]] == list(PREDICTED)
    link = facts["all_reduce"]["assumed"]
    comm_s = 2 * link["alpha_s"] + facts["gradient_bytes"]["ddp"] * link["beta_s_per_byte"]
    assert facts["predicted"]["ddp"][1]["comm_s"] == pytest.approx(comm_s)
    assert "round 3 of 3: ddp, 2 workers" in ended.err
    assert "int8" not in ended.err
    assert (run_cli.folder / "plots" / "scaling.svg").exists()
    left = {path.name for path in run_cli.folder.iterdir() if not path.name.startswith("torchinductor_")}
    assert left - {"matplotlib"} == {"m.yaml", "plots"}


@pytest.mark.thorough
@pytest.mark.plugins
@pytest.mark.slow
def test_one_worker_alone_in_words(run_cli):
    (run_cli.folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    ended = run_cli("scaling", "m.yaml", "--workers", "1", "--artifacts", "kept")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("fit (train.supervised) of m.yaml: 16 samples per worker and batch, one thread ")
    assert "only one number of workers: nothing can be fitted" in ended.out
    assert "fitted\n" not in ended.out
    assert (run_cli.folder / "kept" / "objects").is_dir()
