"""`model.python`: networks of files that know nothing of ptpipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ptpipe import IntegrityError, StageError
from ptpipe.launching import FilesRead
from ptpipe.testing import Bench
from ptpipe_torch import Classification, Data, FunctionRef, Model, Recipe, Split, Unlabeled
from ptpipe_zoo import PythonModelConfig, python_model
from ptpipe_zoo.weights import refuse_not_finite

from ...texts import TAGS, text_data

pytest_plugins = ["ptpipe.testing"]

MINE = """
import torch
from torch import nn
from blocks_of_mine import Block

class Net(nn.Module):
    def __init__(self, width, num_classes=5):
        super().__init__()
        self.block = Block(width)
        self.head = nn.Linear(width * 36, num_classes)

    def forward(self, x):
        return self.head(self.block(x).flatten(1))

def make_net(width=4, num_classes=5):
    return Net(width, num_classes)

def returns_a_dict(): return {"logits": 1}
def returns_lazy(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
def returns_meta(): return nn.Sequential(nn.Flatten(), nn.Linear(144, 5, device="meta"))
def returns_double(): return nn.Sequential(nn.Flatten(), nn.Linear(144, 5), Double())
def fails(): return nn.Linear("five", 5)
def softmax(): return nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Softmax(1))
def sigmoid():
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Sigmoid(), nn.Unflatten(1, (1, 5)), nn.Flatten())
class Detached(nn.Sequential):
    def forward(self, x): return super().forward(x).detach()
def detached(): return Detached(nn.Flatten(), nn.Linear(144, 5))
def with_nan():
    net = make_net()
    net.block[1].running_var[1] = torch.nan
    return net
def log_softmax(): return nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.LogSoftmax(1))

def dropping(**training):
    class Dropping(nn.Sequential):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, **training))
    return Dropping(nn.Flatten(), nn.Linear(144, 5))

def talking():
    import logging, warnings
    logging.getLogger("mine").warning("made with 5 classes")
    warnings.warn("made with 5 classes")
    return make_net()

def not_dropping(): return dropping(training=False)

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.embedding = nn.Conv2d(1, 4, 4, 4), nn.Linear(144, 5)

    def forward(self, x):
        return {"boxes": self.boxes(x).flatten(2), "embedding": self.embedding(x.flatten(1))}

def several(): return Several()

class Squeezed(nn.Sequential):
    def forward(self, x): return self[0](x.mean((2, 3)).expand(-1, 144).squeeze()[..., None].squeeze())

class ByBatch(nn.Sequential):
    def forward(self, x): return super().forward(x.flatten(1) / (len(x) > 1 or 1 // 0))

def squeezed(): return Squeezed(nn.Linear(144, 5))
def by_batch(): return ByBatch(nn.Linear(144, 5))

class FirstSample(nn.Module):
    def forward(self, x): return x[0].flatten()

def first_sample(): return FirstSample()

class Double(nn.Module):
    def forward(self, x): return x.double()

class InTraining(nn.Sequential):
    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(144, 5), nn.BatchNorm1d(5), nn.Dropout())

    def forward(self, x):
        with torch.set_grad_enabled(self.training): return super().forward(x)

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factors = nn.Linear(144, 5), torch.randn(5)

    def forward(self, x): return self.layer(x.flatten(1)) * self.factors
"""
TEXTS = """
from torch import nn

class Texts(nn.Module):
    def __init__(self, vocabulary_size, num_outputs, pooling):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary_size, 16), nn.Linear(16, num_outputs)
        self.pooling = pooling

    def forward(self, tokens):
        is_token = (tokens != 0).unsqueeze(2)
        if self.pooling == "masked":
            return self.head((self.embedding(tokens) * is_token).sum(1) / is_token.sum(1).clamp(min=1))
        embedded = self.embedding(tokens)
        return self.head(embedded.mean(1) if self.pooling else embedded)

def averaged(vocabulary_size=40): return Texts(vocabulary_size, 2, "mean")
def masked(): return Texts(40, 2, "masked")
def token_states(): return Texts(40, 5, None)
"""
BLOCKS = """
from torch import nn
class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules_forgotten: None) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "blocks_of_mine.py").write_text(BLOCKS)
    return tmp_path / "mine.py"


def config(function: str = "make_net", **options: Any) -> PythonModelConfig:
    return PythonModelConfig(file="mine.py", function=function, **options)


@pytest.mark.parametrize("function", ["make_net", "Net"])
def test_a_function_or_a_class_makes_the_network(bench: Bench, make_data: Any, mine: Path, function: str) -> None:
    options = {"file": "mine.py", "function": function, "arguments": {"width": 3}}
    model = bench.run(python_model, options, data=make_data())
    assert str(model.signature) == "images (batch, 1, 12, 12) float32 -> logits (batch, 5) float32"
    assert model.tensors["head.weight"].shape == (5, 108)
    assert bench.metrics == {"num_parameters": 3 * 9 + 3 + 6 + 108 * 5 + 5}
    torch.manual_seed(bench.seed)
    assert torch.equal(model.tensors["block.0.weight"], nn.Conv2d(1, 3, 3).weight), "by the seed alone"
    assert model.build()(torch.zeros(2, 1, 12, 12)).shape == (2, 5)


def test_a_network_of_any_outputs_where_data_is_unlabeled(bench: Bench, unlabeled: Data, mine: Path) -> None:
    model = bench.run(python_model, {"file": "mine.py", "function": "several"}, data=unlabeled)
    assert [str(spec) for spec in model.signature.outputs] == [
        "boxes (batch, 4, 9) float32", "embedding (batch, 5) float32",
    ]  # fmt: skip
    with model.predictor(1) as predict:
        outputs = predict({"images": np.zeros((3, 1, 12, 12), np.float32)})
    assert {name: output.shape for name, output in outputs.items()} == {"boxes": (3, 4, 9), "embedding": (3, 5)}
    with pytest.raises(StageError, match=r"^mine.py: first_sample\(\): the network returns output of shape \(144,\)"):
        bench.run(python_model, {"file": "mine.py", "function": "first_sample"}, data=unlabeled)


def test_unlabeled_texts_have_no_outputs_of_each_token(bench: Bench, mine: Path) -> None:
    texts = text_data()
    splits = {name: Split(split.ids, split.inputs, {}) for name, split in texts.splits.items()}
    unlabeled = Data(replace(texts.info, task=Unlabeled()), splits)
    mine.write_text(TEXTS)
    model = bench.run(python_model, {"file": "mine.py", "function": "masked"}, data=unlabeled)
    assert [spec.shape for spec in model.signature.outputs] == [("batch", 2)]
    message = r"^mine.py: token_states\(\): of shorter tokens, .* fixed sizes. Return a row for each sample.*`tokens`"
    with pytest.raises(StageError, match=message):
        bench.run(python_model, {"file": "mine.py", "function": "token_states"}, data=unlabeled)


def test_what_its_code_says_when_it_builds_is_shown_once(ctx: Any, make_data: Any, mine: Path, caplog: Any) -> None:
    with pytest.warns(UserWarning, match="made with 5 classes") as warned:
        model = python_model(config("talking"), ctx, make_data())
        model.build()
    assert (len(warned), caplog.messages) == (1, ["made with 5 classes"])


def test_the_recipe_has_no_path(ctx: Any, make_data: Any, mine: Path) -> None:
    model = python_model(config(arguments={"width": 3}), ctx, make_data())
    stored = json.loads(model.recipe.to_json())["builder"]
    assert stored.keys() == {"address", "arguments", "source"}
    assert (stored["address"], stored["arguments"], len(stored["source"])) == ("mine.py:make_net", {"width": 3}, 64)
    assert Recipe.from_json(model.recipe.to_json()) == model.recipe


def test_it_survives_whatever_stages_do_with_a_model(ctx: Any, make_data: Any, mine: Path, tmp_path: Path) -> None:
    model = python_model(config(), ctx, make_data())
    network = model.build()
    changed = [
        model.with_state_dict_of(network),
        model.with_recipe(backend="fbgemm"),
        Model.from_module(replace(model.recipe, prepare=()), network),
        Model(model.recipe, model.tensors),
    ]
    for each in changed:
        assert isinstance(each.build(), nn.Module)
    (tmp_path / "stored").mkdir()
    model.save(tmp_path / "stored")
    stored = Model.load(tmp_path / "stored")
    with pytest.raises(StageError, match=r"mine.py:make_net, and no option above names this function"):
        stored.build()
    with pytest.raises(StageError, match="no option above names this function"):
        stored.with_source_functions([f"{mine}:Net"]).build()
    assert stored.with_source_functions([f"{mine}:Net", f"{mine}:make_net"]).build()


def test_code_that_changed_builds_nothing(ctx: Any, make_data: Any, mine: Path) -> None:
    model = python_model(config(), ctx, make_data())
    mine.write_text(MINE + "# a comment\n")
    assert model.build()
    mine.write_text(MINE.replace("num_classes=5", "num_classes=6"))
    with pytest.raises(StageError, match=r"mine.py:make_net, and the code of .*/mine.py is another one: .* rerun"):
        model.build()
    mine.unlink()
    with pytest.raises(StageError, match="is another one"):
        model.build()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returns_a_dict", r"mine.py: returns_a_dict\(\) returned a dict of logits, not a torch.nn.Module"),
        ("returns_lazy", r"returns_lazy\(\): 1.weight has no shape until the network is called"),
        ("returns_meta", r"returns_meta\(\): 1.weight is on meta; return the network on the CPU"),
        ("returns_double", "the network returns logits as torch.float64, not float32"),
        ("fails", r"mine.py: fails\(\) raised TypeError: .*\(mine.py:22: def fails"),
        (
            "squeezed",
            r"returns logits of shape \(5,\); it must .*, also for a single sample; squeeze\(\) drops the axis",
        ),
        ("Hidden", r"Hidden\(\): the network, rebuilt with the same weights, returns another logits"),
    ],
)
def test_what_is_no_network(ctx: Any, make_data: Any, mine: Path, function: str, message: str) -> None:
    with pytest.raises(StageError, match=message):
        python_model(config(function), ctx, make_data())


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_a_network_of_probabilities_is_reported(bench: Bench, make_data: Any, mine: Path, function: str) -> None:
    bench.run(python_model, {"file": "mine.py", "function": function}, data=make_data())
    (notice,) = bench.notices
    assert notice.startswith(f"mine.py: {function}(): the network ends in {function}, but its task takes logits, ")


def test_a_network_that_loses_the_gradient_is_reported(
    bench: Bench, make_data: Any, unlabeled: Data, mine: Path
) -> None:
    bench.run(python_model, {"file": "mine.py", "function": "detached"}, data=make_data())
    (notice,) = bench.notices
    assert notice.startswith("mine.py: detached(): the network can be evaluated, not trained: its outputs have no grad")
    bench.run(python_model, {"file": "mine.py", "function": "detached"}, data=unlabeled)
    assert bench.notices == []  # embeddings, say, are not trained


def test_a_network_may_have_a_gradient_in_training_mode_alone(bench: Bench, make_data: Any, mine: Path) -> None:
    before = torch.get_rng_state()
    model = bench.run(python_model, {"file": "mine.py", "function": "InTraining"}, data=make_data())
    assert bench.notices == []
    assert model.tensors["2.num_batches_tracked"] == 0, "its statistics are those of the function"
    assert torch.equal(torch.get_rng_state(), before)


def test_log_softmax_does_no_harm(bench: Bench, make_data: Any, mine: Path) -> None:
    bench.run(python_model, {"file": "mine.py", "function": "log_softmax"}, data=make_data())
    assert bench.notices == []


def test_a_network_that_fails_for_a_single_sample_is_reported(bench: Bench, make_data: Any, mine: Path) -> None:
    bench.run(python_model, {"file": "mine.py", "function": "by_batch"}, data=make_data())
    (notice,) = bench.notices
    assert notice.startswith("mine.py: by_batch(): the network fails for a single sample, as for latencies of one: ")


def test_a_network_that_drops_in_eval_mode_is_reported(bench: Bench, make_data: Any, mine: Path) -> None:
    for function in ("not_dropping", "dropping"):
        assert bench.notices == []
        bench.run(python_model, {"file": "mine.py", "function": function}, data=make_data())
    (notice,) = bench.notices
    assert notice.startswith("mine.py: dropping(): this network draws random numbers in eval mode too (")
    assert "mine.py:" in notice and "`return super().forward(nn.functional.dropout(x, 0.5, **training))`" in notice


def test_shapes_are_those_of_the_data(ctx: Any, make_data: Any, mine: Path) -> None:
    with pytest.raises(StageError) as raised:
        python_model(config(arguments={"num_classes": 6}), ctx, make_data())
    assert str(raised.value) == (
        "mine.py: make_net(): the network returns logits of shape (2, 6); it must return logits (batch, 5) float32, "
        "for images (batch, 1, 12, 12) float32"
    )
    with pytest.raises(
        StageError, match=r"the network, called with images \(2, 1, 8, 8\) float32, raised RuntimeError"
    ):
        python_model(config(), ctx, make_data((1, 8, 8)))


def test_a_wrong_number_of_outputs_lists_the_classes(ctx: Any, make_data: Any, mine: Path) -> None:
    data = make_data(num_classes=12)
    task = Classification(class_names=tuple(f"k{number}" for number in range(12)))
    named = Data(replace(data.info, task=task), data.splits)
    with pytest.raises(StageError) as raised:
        python_model(config(), ctx, named)
    assert str(raised.value).endswith("float32; noise has 12 classes: k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, ...")
    with pytest.raises(StageError, match=r"a dict of boxes, embedding; .* float32$"):
        python_model(config("several"), ctx, named)


@pytest.mark.parametrize(
    ("function", "data", "num"),
    [
        ("averaged", text_data(), 1),
        ("averaged", text_data(padded=True), 0),
        ("masked", text_data(), 0),
        ("token_states", text_data(TAGS), 0),
    ],
)
def test_a_network_that_reads_padding_is_reported(
    bench: Bench, mine: Path, function: str, data: Data, num: int
) -> None:
    mine.write_text(TEXTS)
    bench.run(python_model, {"file": "mine.py", "function": function}, data=data)
    assert len(bench.notices) == num
    assert not num or bench.notices[0].endswith("mask the padding (tokens != 0)")


def test_too_small_an_embedding_is_found_before_training(ctx: Any, mine: Path) -> None:
    mine.write_text(TEXTS)
    for vocabulary_size in (30, 39):  # too small for the first texts, and for others alone
        with pytest.raises(
            StageError, match=r"called with the largest id of tokens, raised IndexError: .*\(mine.py:14: embedded"
        ):
            python_model(config("averaged", arguments={"vocabulary_size": vocabulary_size}), ctx, text_data())


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_from_a_file(bench: Bench, make_data: Any, mine: Path, suffix: str, prefix: str) -> None:
    model = python_model(config(), bench._context(python_model, {}, {}), make_data())
    weights = {f"{prefix}{name}": tensor.float() + 1 for name, tensor in model.tensors.items()}
    path = mine.parent / f"best{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(weights, path)
    options = {"file": "mine.py", "function": "make_net", "weights_file": str(path)}
    loaded = bench.run(python_model, options, data=make_data())
    assert torch.equal(loaded.tensors["head.bias"], weights[f"{prefix}head.bias"])
    before = python_model.fingerprint(config(weights_file=str(path)))
    del weights[f"{prefix}head.bias"]
    (save_file if suffix == ".safetensors" else torch.save)(weights, path)
    assert python_model.fingerprint(config(weights_file=str(path))) != before
    with pytest.raises(StageError, match=r"best\S* doesn't match the network: 1 missing: head.bias"):
        bench.run(python_model, options, data=make_data())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(ctx: Any, make_data: Any, mine: Path, dtype: torch.dtype, value: float) -> None:
    weights = {name: of.to(dtype) for name, of in python_model(config(), ctx, make_data()).tensors.items()}
    weights["head.weight"][1, 3] = value
    torch.save(weights, path := mine.parent / "diverged.pt")
    found = "NaN" if value != value else "infinite values"
    with pytest.raises(StageError, match=rf"diverged.pt: head.weight has {found}, with which no network computes"):
        python_model(config(weights_file=str(path)), ctx, make_data())


def test_what_the_function_itself_loads_is_finite(ctx: Any, make_data: Any, mine: Path) -> None:
    with pytest.raises(StageError, match=r"^mine.py: with_nan\(\): block.1.running_var has NaN, with which"):
        python_model(config("with_nan"), ctx, make_data())


def test_masks_may_be_infinite() -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("mask", torch.tensor([0, -torch.inf]))
    network.frozen = nn.Parameter(torch.tensor([-torch.inf, 0]), requires_grad=False)
    refuse_not_finite(network, "x.pt")
    network.frozen.data[1] = torch.nan
    with pytest.raises(StageError, match="frozen has NaN"):
        refuse_not_finite(network, "x.pt")


LOADS = """
import torch, safetensors
from torch import nn

def net(state=None):
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    net.load_state_dict(state or torch.load("net.pt"))
    return net

def mapped(): return net(torch.load("net.pt", mmap=True))
def opened():
    with safetensors.safe_open("net.safetensors", "pt") as file:
        return net({name: file.get_tensor(name) for name in file.keys()})

class AtImport:
    STATE = torch.load("net.pt")

def at_import(): return net(AtImport.STATE)
"""


def files_read(bench: Bench) -> list[str]:
    (event,) = (event for event in bench.events if isinstance(event, FilesRead))
    return list(event.files)


@pytest.mark.parametrize(
    ("function", "name"),
    [("net", "net.pt"), ("mapped", "net.pt"), ("opened", "net.safetensors"), ("at_import", "net.pt")],
)
def test_files_that_the_function_opens_belong_to_the_result(
    bench: Bench, make_data: Any, mine: Path, function: str, name: str
) -> None:
    state = nn.Sequential(nn.Flatten(), nn.Linear(144, 5)).state_dict()
    torch.save(state, "net.pt")
    save_file(state, "net.safetensors")
    mine.write_text(LOADS if function == "at_import" else LOADS.partition("class AtImport")[0])
    for _ in range(2):  # the second time, this process has imported the file
        model = bench.run(python_model, {"file": "mine.py", "function": function}, data=make_data())
        assert files_read(bench) == [str(mine.parent / name)]
    assert torch.equal(model.tensors["1.bias"], state["1.bias"])
    assert "from_file" not in vars(torch.UntypedStorage)


def test_a_file_that_changed_is_read_again_at_import(bench: Bench, make_data: Any, mine: Path) -> None:
    mine.write_text(LOADS)
    state = nn.Sequential(nn.Flatten(), nn.Linear(144, 5)).state_dict()
    for shift in (0, 1):
        state["1.bias"] += shift
        torch.save(state, "net.pt")
        model = bench.run(python_model, {"file": "mine.py", "function": "at_import"}, data=make_data())
        assert torch.equal(model.tensors["1.bias"], state["1.bias"])


def test_files_that_only_options_know(bench: Bench, make_data: Any, mine: Path) -> None:
    (mine.parent / "scripted.pt").write_bytes(b"1")
    assert python_model.fingerprint(config()) is None
    before = python_model.fingerprint(config(reads=["scripted.pt"]))
    (mine.parent / "scripted.pt").write_bytes(b"2")
    assert python_model.fingerprint(config(reads=["scripted.pt"])) != before
    with pytest.raises(StageError, match="gone does not exist"):
        python_model.fingerprint(config(reads=["gone"]))


def test_weights_that_are_missing_or_more_than_tensors(ctx: Any, make_data: Any, mine: Path) -> None:
    missing = config(weights_file="gone.pt")
    assert list(python_model.preflight(missing)) == ["weights file gone.pt does not exist"]
    assert python_model.fingerprint(missing) is None
    torch.save({"model": nn.Linear(1, 1)}, "whole.pt")
    with pytest.raises(StageError, match=r"whole.pt is not a file of plain tensors"):
        python_model(config(weights_file="whole.pt"), ctx, make_data())


@pytest.mark.parametrize(
    "address", ["../mine.py:make_net", "/tmp/mine.py:make_net", ".mine.py:f", "mine.py", "mine.py:a.b", "a/b:f", ":f"]
)
def test_an_address_has_no_folder(mine: Path, address: str) -> None:
    digest = FunctionRef.in_file(mine, "make_net", {}).source
    reference = FunctionRef(address, {}, digest, (f"{mine}:make_net",))
    with pytest.raises(IntegrityError, match="is not the address of a builder in a file"):
        reference.resolve("builder")


def test_only_builders_are_in_files(mine: Path) -> None:
    with pytest.raises(IntegrityError, match="is not the address of a transform in a file"):
        FunctionRef.in_file(mine, "make_net", {}).resolve("transform")


@pytest.mark.parametrize("more", [{"path": "/tmp/mine.py"}, {"source": 3}, {"source": None}, {"source_functions": []}])
def test_a_recipe_with_unknown_content_is_none(ctx: Any, make_data: Any, mine: Path, more: Any) -> None:
    content = json.loads(python_model(config(), ctx, make_data()).recipe.to_json())
    content["builder"] |= more
    with pytest.raises(IntegrityError, match="not a model recipe"):
        Recipe.from_json(json.dumps(content))
