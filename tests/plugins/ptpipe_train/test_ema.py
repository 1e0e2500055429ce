"""The moving average of the weights: its formula, and that it is what is evaluated and delivered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import Data, Model, epoch_order

from .conftest import Lab, assert_same_bits, max_difference


def averaged_by_hand(model: Model, data: Data, decay: float, window: int) -> Model:
    """Two epochs of SGD; the average of every step's weights, with the statistics of the last step."""
    module = model.build_prepared().train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    averages = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    step = 0
    for epoch in range(2):
        order_N = epoch_order(len(data.splits["train"]), 7, epoch)
        for batch in data.batches("train", order_N=order_N, batch_size=window):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(*batch.args), batch.targets["labels"]).backward()
            optimizer.step()
            step += 1
            factor = min(decay, (1 + step) / (10 + step))
            for name, parameter in module.named_parameters():
                averages[name] = factor * averages[name] + (1 - factor) * parameter.detach().double()
    module.load_state_dict({name: average.float() for name, average in averages.items()}, strict=False)
    return model.with_state_dict_of(module)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_delivered_weights_are_the_averages(lab: Lab, decay: float) -> None:
    model, data = lab.make_model(norm=True), lab.make_data()
    options = {"epochs": 2, "memory_format": "contiguous", "ema": {"decay": decay}}
    trained = lab.train(model, data, **options).model
    expected = averaged_by_hand(model, data, decay, 16)
    assert max_difference(trained, expected) < 1e-5
    assert torch.equal(trained.tensors["1.num_batches_tracked"], expected.tensors["1.num_batches_tracked"])
    last = lab.train_afresh(model, data, **options | {"ema": None}).model
    assert max_difference(trained, last) > 0.01
    for name in ("1.running_mean", "1.running_var"):  # buffers are those of the last step
        assert torch.equal(trained.tensors[name], last.tensors[name])


def test_accumulated_batches_are_one_step_of_the_average(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data(128)
    whole = lab.train_afresh(model, data, epochs=2, batch_size=32, ema={"decay": 0.9})
    parts = lab.train_afresh(model, data, epochs=2, batch_size=8, accumulate=4, ema={"decay": 0.9})
    assert max_difference(whole.model, parts.model) < 1e-5


def test_val_is_evaluated_with_the_averages_and_training_is_not_changed(lab: Lab) -> None:
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data(100, 33)
    plain = lab.train_afresh(model, data, epochs=3)
    trained = lab.train(model, data, epochs=3, ema={"decay": 0.9})
    for ours, theirs in zip(trained.metrics["history"], plain.metrics["history"], strict=True):
        assert ours["train_loss"] == theirs["train_loss"]
        assert ours["val_loss"] != theirs["val_loss"]
    (batch,) = data.batches("val", batch_size=33)
    logits = trained.model.build()(batch.inputs["images"])
    loss = nn.functional.cross_entropy(logits, batch.targets["labels"]).item()
    assert trained.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_the_best_epoch_is_that_of_the_averages(lab: Lab) -> None:
    model, data = lab.make_model(norm=True), lab.make_data(100, 40)
    options: dict[str, Any] = {"ema": {"decay": 0.8}, "lr": 0.3}
    trained = lab.train(model, data, epochs=6, early_stopping={"patience": 2, "min_delta": 5}, **options)
    assert (trained.metrics["best_epoch"], trained.metrics["epochs_done"]) == (1, 3)
    until_then = lab.train_afresh(model, data, epochs=trained.metrics["best_epoch"], **options)
    assert_same_bits(trained.model, until_then.model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("batch_norm", ["train", "fold"])
def test_fake_quantization_keeps_the_ranges_of_the_last_step(lab: Lab, backend: str, batch_norm: str) -> None:
    config = PrepareQatConfig(backend=backend, batch_norm=batch_norm, freeze_at=0.5)
    model = prepare_qat(config, lab.context(), lab.make_model(norm=True))
    data = lab.make_data(200, 100)
    trained = lab.train_afresh(model, data, epochs=4, ema={"decay": 0.9})
    plain = lab.train_afresh(model, data, epochs=4)
    names = [name for name in trained.model.tensors if "activation_post_process_" in name and name.endswith("scale")]
    assert len(names) >= 3
    for name in names:
        assert torch.equal(trained.model.tensors[name], plain.model.tensors[name]), name
    int8 = convert(ConvertConfig(), lab.context(), trained.model)
    (batch,) = data.batches("val", batch_size=100)
    with torch.no_grad():
        logits = int8.build()(batch.inputs["images"])
    accuracy = (logits.argmax(1) == batch.targets["labels"]).double().mean().item()
    assert accuracy == pytest.approx(trained.metrics["val_accuracy"], abs=0.03)
    assert accuracy > 0.8
