"""Training on mixed samples: what a loop by hand comes to, the same for any division of a batch.

Shape legend: N samples of a batch, K classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from ptpipe import StageError
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import ArrayColumn, ArrayInfo, Data, DatasetInfo, Model, epoch_order
from ptpipe_torch.data.mixing import MixOptions

from .conftest import NUM_CLASSES, Lab, assert_same_bits, max_difference

WAYS: dict[str, dict[str, Any]] = {
    "mixup": {"mixup_alpha": 0.4},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0},
}
EXACT = {"memory_format": "contiguous"}


def trained_by_hand(model: Model, data: Data, options: MixOptions, epochs: int) -> Model:
    """SGD on the cross-entropy with mixed one-hot targets."""
    module = model.build_prepared().train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    for epoch in range(epochs):
        order_N = epoch_order(len(data.splits["train"]), 7, epoch)
        mixing = options.draw(data.info, order_N, (7, epoch))
        for batch in data.batches("train", order_N=order_N, augment_seed=(7, epoch), mixing=mixing):
            assert batch.partners is not None
            own_NK, other_NK = (one_hot(of["labels"], NUM_CLASSES) for of in (batch.targets, batch.partners.targets))
            weights_N1 = batch.partners.weights_B[:, None]
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(module(*batch.args), weights_N1 * own_NK + (1 - weights_N1) * other_NK)
            loss.backward()
            optimizer.step()
    return model.with_state_dict_of(module)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_a_training_with_mixed_one_hot_targets(lab: Lab, way: str) -> None:
    model, data = lab.make_model(norm=True), lab.make_data(augment=["flip"])
    trained = lab.train(model, data, epochs=2, **WAYS[way] | EXACT).model
    assert max_difference(trained, trained_by_hand(model, data, MixOptions(**WAYS[way]), 2)) < 1e-5
    assert max_difference(trained, lab.train_afresh(model, data, epochs=2, **EXACT).model) > 0.01


def test_off_it_changes_no_bit(lab: Lab) -> None:
    model, data = lab.make_model(norm=True, dropout=0.5), lab.make_data(augment=["flip"])
    plain = lab.train_afresh(model, data, epochs=2)
    assert_same_bits(plain.model, lab.train(model, data, epochs=2, mixup_alpha=0, cutmix_alpha=0).model)


@pytest.mark.parametrize("way", WAYS)
def test_accumulated_batches_are_one_batch(lab: Lab, way: str) -> None:
    model, data = lab.make_model(), lab.make_data(117, augment=["shift"])
    whole = lab.train_afresh(model, data, epochs=2, batch_size=32, **WAYS[way])
    parts = lab.train_afresh(model, data, epochs=2, batch_size=16, accumulate=2, **WAYS[way])
    assert max_difference(whole.model, parts.model) < 1e-5
    assert whole.metrics["train_loss"] == pytest.approx(parts.metrics["train_loss"], rel=1e-5)


def test_val_is_not_mixed(lab: Lab) -> None:
    model, data = lab.make_model(), lab.make_data(100, 40)
    trained = lab.train(model, data, epochs=2, **WAYS["both"])
    (batch,) = data.batches("val", batch_size=40)
    loss = nn.functional.cross_entropy(trained.model.build()(*batch.args), batch.targets["labels"]).item()
    assert trained.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_fake_quantization_can_be_trained_so(lab: Lab, backend: str) -> None:
    model = prepare_qat(PrepareQatConfig(backend=backend), lab.context(), lab.make_model(norm=True))
    data = lab.make_data(200, 100)
    trained = lab.train(model, data, epochs=6, ema={"decay": 0.9}, **WAYS["both"])
    int8 = convert(ConvertConfig(), lab.context(), trained.model)
    (batch,) = data.batches("val", batch_size=100)
    with torch.no_grad():
        accuracy = (int8.build()(*batch.args).argmax(1) == batch.targets["labels"]).double().mean().item()
    assert accuracy == pytest.approx(trained.metrics["val_accuracy"], abs=0.04)
    assert accuracy > 0.7


@pytest.mark.thorough
def test_a_compiled_training_is_the_same(lab: Lab) -> None:
    model, data = lab.make_model(norm=True), lab.make_data(96)
    plain = lab.train_afresh(model, data, epochs=2, **WAYS["both"])
    compiled = lab.train_afresh(model, data, epochs=2, compile=True, **WAYS["both"])
    assert max_difference(plain.model, compiled.model) < 1e-4


def test_data_that_cannot_be_mixed_are_refused_before_the_training(lab: Lab) -> None:
    plain = lab.make_data()
    ages = ArrayInfo(dtype="float32", shape=(1,))
    info = DatasetInfo("aged", {**plain.info.inputs, "ages": ages}, plain.info.task)
    splits = {
        name: replace(split, inputs={**split.inputs, "ages": ArrayColumn(np.zeros((len(split), 1), np.float32))})
        for name, split in plain.splits.items()
    }
    model = lab.make_model().with_recipe(signature=info.signature)
    with pytest.raises(StageError, match=r"^cutmix_alpha: the input ages \(batch, 1\) float32 is no image"):
        lab.train(model, Data(info, splits), cutmix_alpha=1.0)
    assert lab.events == []
