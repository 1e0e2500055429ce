"""The arithmetic of a step, against plain loops written out here.

Shape legend: N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ptpipe_torch import Data, Model, epoch_order

from ...datasets import class_names_of, image_info, labels_of
from .conftest import SIDE, Lab, assert_same_bits, max_difference

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain_training(
    model: Model,
    data: Data,
    *,
    seed: int = 7,
    window: int = 16,
    lr: float = 0.05,
    loss: Loss = nn.functional.cross_entropy,
    before_step: Callable[[list[nn.Parameter]], None] = lambda parameters: None,
) -> Model:
    """Two epochs of SGD with momentum, each step on a whole window at once."""
    module = model.build_prepared().train()
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
    train, facts = data.splits["train"], data.info.inputs["images"]
    for epoch in range(2):
        order_N = epoch_order(len(train), seed, epoch)
        for begin in range(0, len(order_N), window):
            taken = order_N[begin : begin + window]
            images = torch.from_numpy(train.inputs["images"].take(taken)).permute(0, 3, 1, 2).float()
            images = (images / 255 - facts.mean[0]) / facts.std[0]
            optimizer.zero_grad()
            loss(module(images), torch.from_numpy(labels_of(train)[taken])).backward()
            before_step(parameters)
            optimizer.step()
    return model.with_state_dict_of(module)


def test_is_a_plain_loop(lab: Lab) -> None:
    model, data = lab.make_model(norm=True), lab.make_data()
    trained = lab.train(model, data, epochs=2, memory_format="contiguous").model
    assert max_difference(trained, plain_training(model, data)) < 1e-5
    assert max_difference(trained, model) > 0.1


def test_four_batches_of_16_are_one_of_64(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data(num_train=256)
    whole = lab.train_afresh(model, data, epochs=3, batch_size=64)
    parts = lab.train_afresh(model, data, epochs=3, batch_size=16, accumulate=4)
    assert max_difference(whole.model, parts.model) < 1e-6
    assert parts.metrics["num_steps"] == whole.metrics["num_steps"] == 12
    assert parts.metrics["train_loss"] == pytest.approx(whole.metrics["train_loss"], rel=1e-6)


@pytest.mark.parametrize("num_train", [100, 97, 33, 31, 5])
def test_the_last_window_is_averaged_over_what_it_has(lab: Lab, num_train: int) -> None:
    # 100 = 3 x 32 + 4: the last window has one batch of 4; 97: of 1; 31: one window of 16 and 15.
    model, data = lab.make_model(), lab.make_data(num_train=num_train)
    trained = lab.train(model, data, epochs=2, accumulate=2)
    assert max_difference(trained.model, plain_training(model, data, window=32)) < 1e-5
    assert trained.metrics["num_steps"] == 2 * -(-num_train // 32)


def test_linear_scaling_trains_with_the_higher_rate(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data()
    trained = lab.train(model, data, epochs=2, accumulate=2, lr=0.02, scale_lr="linear")
    assert max_difference(trained.model, plain_training(model, data, window=32, lr=0.04)) < 1e-5
    assert trained.metrics["peak_lr"] == pytest.approx(0.04)


def test_clipping_bounds_the_norm_of_all_gradients_together(lab: Lab) -> None:
    norms = []

    def clip(parameters: list[nn.Parameter]) -> None:
        norm = torch.cat([parameter.grad.flatten() for parameter in parameters]).norm()
        norms.append(norm.item())
        for parameter in parameters:
            parameter.grad *= min(1.0, 0.9 / norm)

    model, data = lab.make_model(), lab.make_data()
    trained = lab.train(model, data, epochs=2, clip_grad_norm=0.9, accumulate=2)
    want = plain_training(model, data, window=32, before_step=clip)
    assert min(norms) < 0.9 < max(norms)
    assert max_difference(trained.model, want) < 1e-4  # torch adds 1e-6 to the norm


def test_label_smoothing_spreads_a_fraction_over_all_classes(lab: Lab) -> None:
    def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        target = nn.functional.one_hot(labels, logits.shape[1]) * 0.8 + 0.2 / logits.shape[1]
        return -(target * logits.log_softmax(1)).sum(1).mean()

    model, data = lab.make_model(), lab.make_data()
    trained = lab.train(model, data, epochs=2, label_smoothing=0.2)
    assert max_difference(trained.model, plain_training(model, data, loss=smoothed)) < 1e-5


def test_the_reported_loss_is_the_mean_over_the_epoch(lab: Lab) -> None:
    losses: list[tuple[int, float]] = []

    def noted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits, labels)
        losses.append((len(labels), loss.item()))
        return loss

    model, data = lab.make_model(), lab.make_data(num_train=100)
    trained = lab.train(model, data, epochs=2)
    plain_training(model, data, loss=noted)
    second_epoch = losses[len(losses) // 2 :]
    want = sum(num * loss for num, loss in second_epoch) / 100
    assert trained.metrics["train_loss"] == pytest.approx(want, rel=1e-5)


def test_the_layout_changes_no_more_than_rounding(lab: Lab) -> None:
    model, data = lab.make_model(norm=True), lab.make_data()
    rows = lab.train_afresh(model, data, epochs=2, memory_format="contiguous")
    last = lab.train_afresh(model, data, epochs=2, memory_format="channels_last")
    assert max_difference(rows.model, last.model) < 1e-4
    assert_same_bits(last.model, lab.train_afresh(model, data, epochs=2, memory_format="auto").model)
    assert (rows.metrics["memory_format"], last.metrics["memory_format"]) == ("contiguous", "channels_last")


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.1), ("fp16", 0.02)])
def test_narrower_precision_comes_near(lab: Lab, precision: str, bound: float) -> None:
    model, data = lab.make_model(), lab.make_data()
    wide = lab.train_afresh(model, data, epochs=2)
    narrow = lab.train_afresh(model, data, epochs=2, precision=precision)
    assert 0 < max_difference(wide.model, narrow.model) < bound
    assert all(tensor.dtype == torch.float32 for tensor in narrow.model.tensors.values())
    if precision == "fp16":
        assert narrow.metrics["loss_scale"] == 65536.0


def test_fp16_leaves_out_a_step_whose_gradients_overflow(lab: Lab) -> None:
    # Its gradients are those of a pixel of 3e3 in the first layer: times 65536 beyond 65504, fp16's maximum.
    data = lab.make_data(num_train=16)
    data.info = image_info("loud", class_names_of(data.info), (1, SIDE, SIDE), (0.0,), (1 / 3e3,))
    model = lab.make_model()
    trained = lab.train(model, data, epochs=1, precision="fp16", clip_grad_norm=1.0)
    assert trained.metrics["loss_scale"] == 32768.0
    assert_same_bits(trained.model, model)


def test_augments_by_seed_epoch_and_place(lab: Lab) -> None:
    model = lab.make_model()
    plain = lab.train_afresh(model, lab.make_data(), epochs=2)
    shifted = lab.train_afresh(model, lab.make_data(augment=["shift"]), epochs=2)
    assert max_difference(plain.model, shifted.model) > 1e-3
    assert_same_bits(shifted.model, lab.train_afresh(model, lab.make_data(augment=["shift"]), epochs=2).model)


def test_takes_every_sample_once_an_epoch_in_the_order_of_seed_and_epoch(lab: Lab) -> None:
    taken: list[int] = []
    data = lab.make_data(num_train=50, num_val=8)  # without val, the comparison with what is stored reads train too
    images = data.splits["train"].inputs["images"]

    def take(indices: Any) -> Any:
        taken.extend(indices.tolist())
        return type(images).take(images, indices)

    object.__setattr__(images, "take", take)
    lab.train(lab.make_model(), data, epochs=2, accumulate=2, memory_format="contiguous")  # auto reads images too
    assert taken == np.concatenate([epoch_order(50, 7, 0), epoch_order(50, 7, 1)]).tolist()
