"""`model.transformers`. Shape legend: B texts or images, L tokens, K classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import Context, StageError
from ptpipe.events import Event, Notice
from ptpipe_onnx import ExportConfig, export_onnx
from ptpipe_torch import (
    Data,
    DatasetInfo,
    FunctionRef,
    LanguageModeling,
    Model,
    RaggedColumn,
    Regression,
    Split,
    TokensInfo,
)
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.int8.layers import has_int8_weights
from ptpipe_zoo import TransformersConfig, extras, transformers_models
from ptpipe_zoo import transformers as transformers_stage

from ...texts import CLASSES, TAGS, quantized, text_data, texts, trained
from .conftest import MakeData

pytestmark = pytest.mark.skipif(extras.missing_extra("transformers") is not None, reason="needs ptpipe[transformers]")
LAYERS: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": LAYERS,
    "roberta": LAYERS,
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    "deberta-v2": LAYERS,
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": LAYERS,
    "bloom": {"n_layer": 1, "n_head": 2, "hidden_size": 16},
    "mixtral": {**LAYERS, "num_key_value_heads": 2, "num_local_experts": 2},
}
each_type = pytest.mark.parametrize("model_type", CONFIGS)


def config_of(model_type: str, **options: Any) -> TransformersConfig:
    return TransformersConfig(config={"model_type": model_type, **CONFIGS[model_type], **options})


def tokens_of(*lengths: int, padded: int) -> torch.Tensor:
    ids_BL = torch.randint(1, 40, (len(lengths), padded), generator=torch.Generator().manual_seed(0))
    return ids_BL * (torch.arange(padded) < torch.tensor(lengths)[:, None])


def saved(folder: Path, model_type: str = "bert", num_labels: int = 7) -> Path:
    """Save a network as its own library does."""
    library = transformers_models.transformers()
    options = {**CONFIGS[model_type], "pad_token_id": 0}
    config = library.AutoConfig.for_model(model_type, vocab_size=40, num_labels=num_labels, **options)
    library.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@each_type
@pytest.mark.parametrize("task", [CLASSES, TAGS], ids=["texts", "tokens"])
def test_it_survives_the_store_and_padding_changes_nothing(model_type: str, task: Any, ctx: Context) -> None:
    model = transformers_stage(config_of(model_type), ctx, text_data(task))
    folder = ctx.scratch / "model"
    folder.mkdir()
    model.save(folder)
    network, tokens_BL = Model.load(folder).build(), tokens_of(1, 5, 12, padded=12)
    together = network(tokens_BL)
    assert together.shape == ((3, 12, 5) if task is TAGS else (3, 2))
    assert torch.equal(together, transformers_stage(config_of(model_type), ctx, text_data(task)).build()(tokens_BL))
    for row, length in enumerate((1, 5, 12)):
        alone = network(tokens_BL[row : row + 1, :length])[0]
        expected = together[row, :length] if task is TAGS else together[row]
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


@each_type
def test_it_computes_what_the_library_does(model_type: str, ctx: Context) -> None:
    model = transformers_stage(config_of(model_type), ctx, text_data())
    ours = model.build()
    tokens_BL = tokens_of(3, 12, padded=12)
    theirs = ours.network(input_ids=tokens_BL, attention_mask=(tokens_BL != 0).long()).logits
    torch.testing.assert_close(ours(tokens_BL), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "path"),
    [
        ("bert", "dynamic"),
        *(
            pytest.param(model_type, path, marks=pytest.mark.thorough)
            for model_type in CONFIGS
            for path in ("float", "dynamic")
            if (model_type, path) != ("bert", "dynamic")
        ),
    ],
)
def test_a_file_computes_what_torch_does_at_every_length(model_type: str, path: str, ctx: Context) -> None:
    data = text_data()
    model = trained(transformers_stage(config_of(model_type), ctx, data), data, epochs=1)
    if path != "float":
        model = quantized(model, data, ctx, "fbgemm", path)
    file = export_onnx(ExportConfig(num_samples=16), ctx, model, data)
    tokens_BL = texts(5, 9, max_length=12)
    with file.with_exact_sums().predictor(1) as onnx_predict, model.predictor(1) as torch_predict:
        for length in (1, 7, 12):
            for size in (1, 5):
                inputs = {"tokens": np.ascontiguousarray(tokens_BL[:size, :length])}
                found, expected = onnx_predict(inputs)["logits"], torch_predict(inputs)["logits"]
                assert np.abs(found - expected).max() <= (1e-4 if path == "float" else 0.05) * np.ptp(expected) + 1e-5


@pytest.mark.parametrize(
    ("model_type", "path", "backend", "padded"),
    [
        ("gpt2", "static", "fbgemm", False),
        ("distilbert", "qat", "fbgemm", False),
        ("bloom", "static", "fbgemm", True),  # its mask has two axes
        *(
            pytest.param(model_type, path, backend, padded, marks=pytest.mark.thorough)
            for model_type in CONFIGS
            for path, backend, padded in (
                *(("static", "fbgemm", False), ("qat", "fbgemm", False)),
                *(("static", "qnnpack", False), ("qat", "qnnpack", True)),
            )
            if (model_type, path, backend, padded)
            not in (("gpt2", "static", "fbgemm", False), ("distilbert", "qat", "fbgemm", False))
        ),
    ],
)
def test_int8_computes_what_torch_does_at_every_length(
    model_type: str, path: str, backend: str, padded: bool, ctx: Context
) -> None:
    if backend not in supported_engines():
        pytest.skip(f"no {backend} here")
    data = text_data(padded=padded)
    model = trained(transformers_stage(config_of(model_type), ctx, data), data, epochs=1)
    int8 = quantized(model, data, ctx, backend, path)
    assert sum(has_int8_weights(layer) for layer in int8.build().modules()) >= 5
    file = export_onnx(ExportConfig(num_samples=16), ctx, int8, data)
    tokens_BL = texts(5, 9, max_length=12)
    with file.with_exact_sums().predictor(1) as onnx_predict, int8.predictor(1) as torch_predict:
        for length in (12,) if padded else (1, 7, 12):
            inputs = {"tokens": np.ascontiguousarray(tokens_BL[:, :length])}
            found, expected = onnx_predict(inputs)["logits"], torch_predict(inputs)["logits"]
            assert np.abs(found - expected).max() <= 0.1 * np.ptp(expected) + 1e-5


def test_a_language_model_has_an_output_for_each_token(ctx: Context) -> None:
    tokens = {"tokens": TokensInfo(vocabulary_size=40, max_length=12)}
    column = RaggedColumn(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64), 0)
    split = Split(np.array([], dtype=np.str_), {"tokens": column}, {"next_tokens": column})
    data = Data(DatasetInfo("words", tokens, LanguageModeling(vocabulary_size=40)), {"train": split})
    network = transformers_stage(config_of("gpt2"), ctx, data).build()
    tokens_BL = tokens_of(12, padded=12)
    changed_BL = tokens_BL.clone()
    changed_BL[0, 6] += 1
    logits_BLK = network(tokens_BL)
    assert logits_BLK.shape == (1, 12, 40)
    assert torch.equal(logits_BLK[:, :6], network(changed_BL)[:, :6]), "it is blind to the future"
    with pytest.raises(StageError, match="vocab_size is 48, but the data's tokenizer has 40 tokens"):
        transformers_stage(config_of("gpt2", vocab_size=48), ctx, data)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "vit", **LAYERS, "patch_size": 8},
        {"model_type": "deit", **LAYERS, "patch_size": 8},  # one of two classes
        {
            "model_type": "hiera",
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "num_query_pool": 1,
            "masked_unit_size": [2, 2],
        },
    ],
    ids=lambda options: options["model_type"],
)
def test_a_network_of_images(options: dict[str, Any], ctx: Context, make_data: MakeData) -> None:
    config = TransformersConfig(config=options)
    model = transformers_stage(config, ctx, make_data((1, 16, 16)))
    assert model.build()(torch.rand(2, 1, 16, 16)).shape == (2, 5)


def test_a_folder_is_loaded_and_its_head_is_replaced(ctx: Context, tmp_path: Path, events: list[Event]) -> None:
    folder = saved(tmp_path / "bert")
    model = transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data())
    theirs = transformers_models.transformers().AutoModel.from_pretrained(folder)
    assert torch.equal(
        model.tensors["network.bert.embeddings.word_embeddings.weight"], theirs.embeddings.word_embeddings.weight
    )
    assert model.tensors["network.classifier.weight"].shape == (2, 16)
    (notice,) = [event.text for event in events if isinstance(event, Notice)]
    assert notice == f"{folder} has no weights for classifier.bias, classifier.weight: they are initialized"
    digests = transformers_stage.fingerprint(TransformersConfig(folder=str(folder)))
    assert {"config.json", "model.safetensors"} == digests.keys()


@pytest.mark.parametrize("num_labels", [2, 7])
def test_a_regression_that_was_trained_elsewhere_returns_its_units(
    num_labels: int, ctx: Context, tmp_path: Path
) -> None:
    """A head that is initialized here returns standard deviations, which are rescaled."""
    task = Regression(target_names=("stars", "price"), mean=(3, 400), std=(1, 200))
    folder = saved(tmp_path / "bert", num_labels=num_labels)
    ours = transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data(task)).build().eval()
    tokens_BL = tokens_of(3, 12, padded=12)
    with torch.no_grad():
        returned_BK = ours.network(input_ids=tokens_BL, attention_mask=(tokens_BL != 0).long()).logits
        expected_BK = returned_BK if num_labels == 2 else returned_BK * torch.tensor([1, 200]) + torch.tensor([3, 400])
        torch.testing.assert_close(ours(tokens_BL), expected_BK, rtol=1e-4, atol=1e-4)


def test_transposed_weights_of_a_folder_are_loaded(ctx: Context, tmp_path: Path) -> None:
    folder = saved(tmp_path / "gpt2", "gpt2", num_labels=2)
    model = transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data())
    theirs = transformers_models.transformers().AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens_BL = tokens_of(12, padded=12)
    with torch.no_grad():
        torch.testing.assert_close(model.build()(tokens_BL), theirs(tokens_BL).logits, rtol=1e-4, atol=1e-6)
    int8 = quantized(model, text_data(), ctx, "fbgemm", "dynamic")
    assert sum(has_int8_weights(layer) for layer in int8.build().modules()) == 5


def test_code_in_a_folder_is_not_run(ctx: Context, tmp_path: Path) -> None:
    folder = saved(tmp_path / "bert")
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Net"}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data())
    assert not (tmp_path / "was_run").exists()


def test_only_safetensors_are_loaded(ctx: Context, tmp_path: Path) -> None:
    folder = saved(tmp_path / "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    config = TransformersConfig(folder=str(folder))
    (line,) = transformers_stage.preflight(config)
    assert line.endswith("has no .safetensors file; others are not loaded, they may contain code")
    with pytest.raises(StageError, match="the weights in"):
        transformers_stage(config, ctx, text_data())


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None])
def test_damaged_weights_are_one_line(damage: bytes | None, ctx: Context, tmp_path: Path) -> None:
    folder = saved(tmp_path / "bert")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(StageError) as caught:
        transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data())
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_size_is_refused(ctx: Context, tmp_path: Path) -> None:
    folder = saved(tmp_path / "bert")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "hidden_size": 32}))
    with pytest.raises(StageError, match=r"has no weights that fit bert\.embeddings"):
        transformers_stage(TransformersConfig(folder=str(folder)), ctx, text_data())


def test_a_folder_of_another_vocabulary_is_refused(ctx: Context, tmp_path: Path) -> None:
    config = TransformersConfig(folder=str(saved(tmp_path / "bert")))
    with pytest.raises(StageError, match=r"has a vocabulary of 40, the data's tokenizer one of 50: give"):
        transformers_stage(config, ctx, text_data(vocabulary_size=50))
    vocabulary = {"[PAD]": 0, "a": 1, "b": 2}
    (tmp_path / "bert" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    for own, is_same in ((vocabulary, True), ({**vocabulary, "a": 2, "b": 1}, False)):
        data = text_data()
        data.assets = {"tokenizer.json": json.dumps({"model": {"vocab": own}}).encode()}
        if is_same:
            transformers_stage(config, ctx, data)
            continue
        with pytest.raises(StageError, match="2 of 3 tokens have other numbers, 'a' for one"):
            transformers_stage(config, ctx, data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "brt"}, r"has no model_type 'brt' \(did you mean 'bart'|'bert'"),
        ({"model_type": "bert", **LAYERS, "hidden_size": 17}, "this configuration: "),
        ({"model_type": "bert", **LAYERS, "vocab_size": 10}, "vocab_size is 10, but the data's tokenizer has 40"),
        ({"model_type": "bert", **LAYERS, "max_position_embeddings": 4}, "texts of 12 tokens: "),
        ({"model_type": "vit", **LAYERS}, "this configuration: "),
    ],
)
def test_configurations_that_do_not_fit_are_one_line(content: dict[str, Any], message: str, ctx: Context) -> None:
    with pytest.raises(StageError, match=message) as caught:
        transformers_stage(TransformersConfig(config=content), ctx, text_data())
    assert "\n" not in str(caught.value)


def test_a_recipe_names_heads_alone() -> None:
    with pytest.raises(StageError, match="is no head"):
        transformers_models.transformers_network(head="pipeline", config={"model_type": "bert"})
    reference = FunctionRef.to(transformers_models.transformers_network, head="text", config={"model_type": "bert"})
    with pytest.raises(TypeError, match="unexpected keyword"):
        reference.resolve("builder")(**reference.arguments, trust_remote_code=True)
