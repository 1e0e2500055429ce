"""A network learns from a teacher: a loop by hand ends alike, and what can't work is refused.

Shape legend: N samples of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

import ptpipe
from ptpipe import StageError
from ptpipe.api import RunResult
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import Data, DatasetInfo, FunctionRef, Model, builder, epoch_order
from ptpipe_train import TrainConfig

from .conftest import Lab, assert_same_bits, max_difference
from .test_parallel import model_of
from .test_resume import EVERY_STEP, Stopped
from .test_resume import make_data as make_stopping_data

EXACT = {"memory_format": "contiguous"}
SOFT = {"temperature": 3.0, "weight": 0.7}
FEATURES = {"features": {"2": "2", "7": "7"}, "feature_weight": 0.5}


def teacher_for(lab: Lab, data: Data, **arguments: Any) -> Model:
    return lab.train_afresh(lab.make_model(**arguments), data, epochs=3, lr=0.1).model


def outputs_of(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits, and the outputs of layers 2 and 7 of `small_net`."""
    values = [x]
    for layer in network:
        values.append(layer(values[-1]))
    return values[-1], [values[3], values[8]]


def trained_by_hand(model: Model, data: Data, teacher: Model, *, features: bool) -> Model:
    """SGD on the losses as the papers have them, each sample's feature distance relative to the teacher's."""
    module, wise = model.build_prepared().train(), teacher.build()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    for epoch in range(2):
        order_N = epoch_order(len(data.splits["train"]), 7, epoch)
        for batch in data.batches("train", order_N=order_N):
            logits, own = outputs_of(module, batch.args[0])
            with torch.no_grad():
                teacher_logits, wanted = outputs_of(wise, batch.args[0])
            soft = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(logits / 3, 1), F.softmax(teacher_logits / 3, 1))
            loss = 0.3 * F.cross_entropy(logits, batch.targets["labels"]) + 0.7 * 9 * soft
            if features:
                for feature, target in zip(own, wanted, strict=True):
                    distances_N = (feature - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
                    loss = loss + 0.5 * distances_N.square().mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.with_state_dict_of(module)


@pytest.mark.parametrize("features", [False, True])
def test_a_loop_by_hand_ends_alike(lab: Lab, features: bool) -> None:
    data = lab.make_data()
    model, teacher = lab.make_model(norm=True), teacher_for(lab, data)
    options = SOFT | (FEATURES if features else {})
    trained = lab.train_afresh(model, data, teacher, epochs=2, distillation=options, **EXACT).model
    assert max_difference(trained, trained_by_hand(model, data, teacher, features=features)) < 1e-5
    assert max_difference(trained, lab.train_afresh(model, data, epochs=2, **EXACT).model) > 0.01


def test_without_the_option_a_teacher_is_learned_from_with_the_defaults(lab: Lab) -> None:
    data = lab.make_data()
    model, teacher = lab.make_model(), teacher_for(lab, data)
    by_default = lab.train_afresh(model, data, teacher, epochs=1).model
    chosen = lab.train_afresh(model, data, teacher, epochs=1, distillation={"temperature": 2, "weight": 0.5}).model
    assert_same_bits(by_default, chosen)


def test_with_weight_0_and_a_feature_of_no_weight_it_is_the_plain_training(lab: Lab) -> None:
    data = lab.make_data()
    model, teacher = lab.make_model(dropout=0.5), teacher_for(lab, data)
    options = {"weight": 0, "features": {"2": "2"}, "feature_weight": 1e-30}
    distilled = lab.train_afresh(model, data, teacher, epochs=2, distillation=options).model
    assert_same_bits(distilled, lab.train_afresh(model, data, epochs=2).model)


def test_a_feature_that_is_zero_in_the_teacher_is_not_divided_by(lab: Lab) -> None:
    data, model = lab.make_data(), lab.make_model()
    dead = Model(model.recipe, {**model.tensors, "6.bias": torch.full_like(model.tensors["6.bias"], -100.0)})
    options = {"weight": 0.1, "features": {"7": "7"}}
    trained = lab.train_afresh(model, data, dead, epochs=2, lr=0.01, distillation=options).model
    assert max_difference(model, trained) < 10


@pytest.mark.parametrize("channels_last", [False, True])
def test_accumulated_batches_are_one_step(lab: Lab, channels_last: bool) -> None:
    data = lab.make_data()
    model, teacher = lab.make_model(), teacher_for(lab, data)
    options = {"epochs": 2, "distillation": SOFT | FEATURES}
    options |= {"memory_format": "channels_last" if channels_last else "contiguous"}
    whole = lab.train_afresh(model, data, teacher, batch_size=48, **options).model
    divided = lab.train_afresh(model, data, teacher, batch_size=16, accumulate=3, **options).model
    assert max_difference(whole, divided) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stopped_and_resumed_it_ends_with_the_same_bits(lab: Lab, precision: str) -> None:
    model, teacher = lab.make_model(norm=True, dropout=0.5), teacher_for(lab, lab.make_data())
    options = {"epochs": 2, "precision": precision, "distillation": SOFT | FEATURES, "mixup_alpha": 0.3}
    want = lab.train_afresh(model, make_stopping_data(lab), teacher, **options)
    with pytest.raises(Stopped):
        lab.train(model, make_stopping_data(lab, stop_train=9), teacher, checkpoint_every_s=EVERY_STEP, **options)
    got = lab.train(model, make_stopping_data(lab), teacher, checkpoint_every_s=EVERY_STEP, **options)
    assert got.log and got.log[0].startswith("training resumes")
    assert_same_bits(got.model, want.model)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_prepared_network_learns_from_the_float_one(lab: Lab, backend: str) -> None:
    data = lab.make_data()
    teacher = teacher_for(lab, data, norm=True)
    prepared = prepare_qat(PrepareQatConfig(backend=backend), lab.context(), teacher)
    options = SOFT | {"features": {"0": "1", "6": "7", "8": "8"}}
    tuned = lab.train_afresh(prepared, data, teacher, epochs=2, lr=0.01, distillation=options)
    int8 = convert(ConvertConfig(), lab.context(), tuned.model)
    assert int8.int8_tensors is not None
    assert tuned.metrics["train_loss"] < 0.3


def test_a_layer_that_is_another_place_in_a_prepared_network_is_refused(lab: Lab) -> None:
    data = lab.make_data()
    teacher = teacher_for(lab, data, norm=True)
    prepared = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), teacher)
    with pytest.raises(StageError, match=r"0 of the network and 2 of the teacher are different .*it is what 1 of"):
        # The ReLU behind this convolution has moved behind the pooling.
        lab.train(prepared, data, teacher, distillation={"features": {"0": "2"}})


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.idle, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.act(self.conv(x)).mean((2, 3))))


@builder
def twice() -> nn.Module:
    return Twice()


@pytest.mark.parametrize(
    ("own", "wanted", "message"),
    [
        ("conv", "0", "have outputs of shape"),
        ("cnov", "0", "the network has no layer 'cnov' .did you mean 'conv'"),
        ("conv", "1.5", "the teacher has no layer '1.5'"),
        ("act", "2", "act of the network is called 2 times in a forward pass"),
        ("idle", "2", "idle of the network is never called"),
    ],
)
def test_features_that_cannot_be_compared_are_refused(lab: Lab, own: str, wanted: str, message: str) -> None:
    model = lab.make_model(FunctionRef.to(twice))
    with pytest.raises(StageError, match=message):
        lab.train(model, lab.make_data(20), lab.make_model(), distillation={"features": {own: wanted}})


def test_a_teacher_that_is_not_float_or_of_other_classes_is_refused(lab: Lab) -> None:
    data, model = lab.make_data(20), lab.make_model()
    prepared = prepare_qat(PrepareQatConfig(backend="fbgemm"), lab.context(), model)
    with pytest.raises(StageError, match="teacher must be a float model; it is torch prepared fbgemm"):
        lab.train(model, data, prepared)
    with pytest.raises(StageError, match="needs a teacher"):
        lab.train(model, data, distillation={})
    other = model.with_recipe(signature=DatasetInfo("x", data.info.inputs, _named("abce")).signature)
    with pytest.raises(StageError, match="the teacher returns logits"):
        lab.train(lab.make_model(), data, other)


def _named(names: str) -> Any:
    from ptpipe_torch import Classification

    return Classification(class_names=tuple(names))


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": {"mode": "pp"}},
        {"parallel": {"mode": "dp"}},
        {"parallel": {"mode": "ddp+pp", "workers": 4}},
        {"compile": True},
        {"gradient_checkpointing": ["Conv2d"]},
    ],
)
def test_features_are_refused_where_layers_cannot_be_read(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="features can't be combined with"):
        TrainConfig.model_validate({"distillation": {"features": {"a": "a"}}} | options)
    TrainConfig.model_validate({"distillation": {}} | options)


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is learned"):
        TrainConfig.model_validate({"distillation": {"weight": 0}})


MANIFEST = """
version: 1
name: distilled
seed: 7
plugins: [{plugins}]
stages:
  data: {{uses: data.synthetic, with: {{num_train: 290, val_size: 50, num_test: 16, image_size: 12}}}}
  net: {{uses: model.plain}}
  teacher: {{uses: train.supervised, needs: {{model: net}}, with: {{epochs: 2, batch_size: 46, num_threads: 1}}}}
  train:
    uses: train.supervised
    needs: {{model: net, teacher: teacher}}
    with: {{epochs: 2, batch_size: 92, lr: 0.05, memory_format: contiguous, num_threads: 1}}
"""
LAYERS = {"features": {"relu2": "relu2", "fc1": "fc1"}, "temperature": 3.0}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({"mode": "ddp", "workers": 2}, LAYERS),
    "ddp, three workers": ({"mode": "ddp", "workers": 3}, {"temperature": 3.0}),
    "fsdp": ({"mode": "fsdp", "workers": 2, "wrap": ["Linear"]}, LAYERS),
    "pp": ({"mode": "pp", "microbatches": 4}, {"temperature": 3.0}),
    "pp, 4 stages": ({"mode": "pp", "pipeline_stages": 4, "microbatches": 4}, {"temperature": 3.0}),
    "ddp+pp": ({"mode": "ddp+pp", "workers": 4, "microbatches": 2}, {"temperature": 3.0}),
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distilled") / "distilled.yaml"
    path.write_text(MANIFEST.format(plugins=Path(__file__).with_name("parallel_nets.py")), encoding="utf-8")
    return path


def run(manifest: Path, **options: Any) -> RunResult:
    overrides = {f"train.{name}": value for name, value in options.items()}
    return ptpipe.run(manifest, overrides, artifacts=manifest.parent / "artifacts")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODES)
def test_every_parallel_mode_ends_where_one_process_does(manifest: Path, name: str) -> None:
    parallel, distillation = MODES[name]
    single = model_of(run(manifest, distillation=distillation))
    assert max_difference(single, model_of(run(manifest, distillation=distillation, parallel=parallel))) < 1e-5


def test_a_missing_and_a_quantized_teacher_are_found_before_the_run(manifest: Path) -> None:
    text = manifest.read_text(encoding="utf-8")
    without = manifest.with_name("without.yaml")
    without.write_text(text.replace(", teacher: teacher}", "}").replace("lr: 0.05", "distillation: {}"))
    with pytest.raises(ptpipe.ManifestError, match="distillation needs a teacher: add"):
        ptpipe.load_plan(without)
    prepared = "  qat: {uses: quant.prepare_qat, needs: {model: net}}\n  train:"
    without.write_text(text.replace("  train:\n", prepared + "\n").replace("teacher: teacher", "teacher: qat"))
    with pytest.raises(ptpipe.ManifestError, match="the teacher must be a float model, and qat"):
        ptpipe.load_plan(without)
