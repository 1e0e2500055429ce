"""Samples mixed with others: by hand, as torchvision does it, and the same however they are divided into batches.

Shape legend: N samples, B of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, one_hot

from ptpipe import StageError
from ptpipe_torch import (
    ArrayColumn,
    ArrayInfo,
    Batch,
    Classification,
    ColumnInfo,
    Data,
    DatasetInfo,
    ImageInfo,
    LoaderOptions,
    MultiLabel,
    Regression,
    Segmentation,
    Split,
    Task,
    TokensInfo,
    epoch_order,
    torchvision,
)
from ptpipe_torch.data.mixing import Mixing, MixOptions, cut_boxes, weights_outside

from ....datasets import image_info, image_split

NUM, SIZE_HW, NUM_CLASSES = 23, (6, 8), 3
WAYS = {"mixup": MixOptions(0.4, 0), "cutmix": MixOptions(0, 1.0), "both": MixOptions(0.4, 1.0)}
IMAGES = ImageInfo(shape_CHW=(3, *SIZE_HW), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def pixels_of(num: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (num, *SIZE_HW, 3), dtype=np.uint8)


def make_data(**options: Any) -> Data:
    split = image_split(
        np.array([f"x/{n:02d}" for n in range(NUM)]), np.arange(NUM) % NUM_CLASSES, ArrayColumn(pixels_of(NUM))
    )
    info = image_info("x", tuple("abc"), IMAGES.shape_CHW, IMAGES.mean, IMAGES.std)
    return Data(info, {"train": split}, LoaderOptions(**{"batch_size": 6, "augment": ("flip", "shift")} | options))


def segmentation_data() -> Data:
    rng = np.random.default_rng(1)
    task = Segmentation(class_names=tuple("abc"), shape_HW=SIZE_HW)
    columns = {"masks": ArrayColumn(rng.integers(0, 3, (NUM, *SIZE_HW), dtype=np.uint8))}
    split = Split(np.array([f"x/{n:02d}" for n in range(NUM)]), {"images": ArrayColumn(pixels_of(NUM))}, columns)
    return Data(DatasetInfo("streets", {"images": IMAGES}, task), {"train": split}, LoaderOptions(batch_size=6))


def mixed(data: Data, options: MixOptions | None, epoch: int = 0, **arguments: Any) -> list[Batch]:
    order_N = epoch_order(NUM, 7, epoch)
    mixing = options.draw(data.info, order_N, (7, epoch)) if options else None
    return list(data.batches("train", **{"order_N": order_N, "augment_seed": (7, epoch), "mixing": mixing} | arguments))


def by_sample(batches: list[Batch]) -> dict[int, list[torch.Tensor]]:
    """Return everything about each sample, by its position."""
    found = {}
    for batch in batches:
        tensors = [*batch.args, *batch.targets.values()]
        tensors += [*batch.partners.targets.values(), batch.partners.weights_B] if batch.partners else []
        assert all(len(tensor) == len(batch) for tensor in tensors)
        for row, index in enumerate(batch.indices_N.tolist()):
            found[index] = [tensor[row] for tensor in tensors]
    return found


def same(one: Mapping[int, list[torch.Tensor]], other: Mapping[int, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        a.equal(b) for index, tensors in one.items() for a, b in zip(tensors, other[index], strict=True)
    )


def info_of(task: Task | None = None, **inputs: ColumnInfo) -> DatasetInfo:
    return DatasetInfo("x", inputs, task or Classification(class_names=("a", "b")))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_the_formulas_say(way: str) -> None:
    """Pixel by pixel, from the samples of the same epoch that are not mixed."""
    data, order_N = make_data(), epoch_order(NUM, 7, 3)
    mixing = WAYS[way].draw(data.info, order_N, (7, 3))
    plain = by_sample(mixed(data, None, 3))
    assert set(mixing.is_cut_N.tolist()) == {"mixup": {False}, "cutmix": {True}, "both": {True, False}}[way]
    for index, (image_CHW, label, partner_label, weight) in by_sample(mixed(data, WAYS[way], 3)).items():
        (own_CHW, own_label), (other_CHW, other_label) = plain[index], plain[mixing.partners_N[index]]
        assert (label, partner_label) == (own_label, other_label)
        if mixing.is_cut_N[index]:
            assert mixing.boxes_N4 is not None
            top, left, bottom, right = mixing.boxes_N4[index]
            expected_CHW = own_CHW.clone()
            expected_CHW[:, top:bottom, left:right] = other_CHW[:, top:bottom, left:right]
            assert weight.item() == pytest.approx(1 - (bottom - top) * (right - left) / (6 * 8))
            assert torch.equal(image_CHW, expected_CHW)
        else:
            assert weight.item() == pytest.approx(mixing.weights_N[index])
            torch.testing.assert_close(image_CHW, weight * own_CHW + (1 - weight) * other_CHW)


def test_partners_are_the_samples_eight_places_on_or_back() -> None:
    order_N = epoch_order(NUM, 7, 0)
    mixing = WAYS["both"].draw(make_data().info, order_N, (7, 0))
    places = [*range(8, 16), *range(8), *(place - 1 for place in range(16, NUM))]
    assert mixing.partners_N[order_N].tolist() == order_N[places].tolist()
    other = WAYS["both"].draw(make_data().info, order_N, (7, 1))
    assert not np.allclose(mixing.weights_N, other.weights_N)


@given(num=st.integers(1, 200))
def test_every_sample_has_a_partner_and_two_have_others(num: int) -> None:
    mixing = MixOptions(1.0).draw(make_data().info, epoch_order(num, 3, 0), (3, 0))
    assert set(mixing.partners_N) <= set(range(num))
    assert num == 1 or (mixing.partners_N != np.arange(num)).all()


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_nothing_more_is_read_where_batches_have_both_partners(workers: int) -> None:
    order_N = epoch_order(96, 7, 0)
    mixing = WAYS["mixup"].draw(make_data().info, order_N, (7, 0))
    for start in range(0, 96, 32):
        own_B = order_N[start : start + 32][workers - 1 :: workers]
        assert mixing.to_read(own_B).tolist() == own_B.tolist()
    read = mixing.to_read(order_N[:8]).tolist()  # a small batch, and then its partners
    assert read[:8] == order_N[:8].tolist() and sorted(read[8:]) == sorted(order_N[8:16].tolist())


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on_batches_shards_workers_or_layout(way: str) -> None:
    data, order_N = make_data(), epoch_order(NUM, 7, 0)
    whole = by_sample(mixed(data, WAYS[way], batch_size=NUM))
    assert same(whole, by_sample(mixed(data, WAYS[way])))
    assert same(whole, by_sample(mixed(data, WAYS[way], channels_last=True)))
    shards = [mixed(data, WAYS[way], order_N=order_N[rank::2], batch_size=3) for rank in range(2)]
    assert same(whole, by_sample([batch for shard in shards for batch in shard]))
    assert same(whole, by_sample(mixed(make_data(num_workers=2), WAYS[way])))
    assert not same(whole, by_sample(mixed(data, WAYS[way], 1)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_memory_format_stays(way: str, channels_last: bool) -> None:
    (batch,) = mixed(make_data(), WAYS[way], batch_size=NUM, channels_last=channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert batch.inputs["images"].is_contiguous(memory_format=layout)


def test_targets_alone_are_mixed_alike() -> None:
    whole = by_sample(mixed(segmentation_data(), WAYS["both"]))
    targets = by_sample(mixed(segmentation_data(), WAYS["both"], with_inputs=False))
    assert same({index: tensors[1:] for index, tensors in whole.items()}, targets)


@pytest.mark.parametrize("alpha", [1e-4, 0.2, 1.0, 4.0])
def test_weights_are_those_of_a_beta_distribution(alpha: float) -> None:
    order_N = epoch_order(20_000, 1, 0)
    for mixing in (MixOptions(mixup_alpha=alpha).draw(make_data().info, order_N, (1, 0)),):
        assert mixing.weights_N.mean() == pytest.approx(0.5, abs=0.02)
        assert mixing.weights_N.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)
    both = MixOptions(alpha, alpha).draw(make_data().info, order_N, (1, 0))
    assert both.is_cut_N.mean() == pytest.approx(0.5, abs=0.02)


@given(
    weight=st.floats(0, 1),
    center=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    size_HW=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_boxes_lie_in_the_image_and_have_the_area(
    weight: float, center: tuple[float, float], size_HW: tuple[int, int]
) -> None:
    boxes_14 = cut_boxes(np.array([weight]), np.array([center]), size_HW)
    top, left, bottom, right = boxes_14[0].tolist()
    height, width = size_HW
    assert 0 <= top <= bottom <= height and 0 <= left <= right <= width
    (outside,) = weights_outside(boxes_14, size_HW)
    assert outside == pytest.approx(1 - (bottom - top) * (right - left) / (height * width), abs=1e-12)
    fraction = np.sqrt(1 - weight)
    assert bottom - top <= fraction * height + 0.5 and right - left <= fraction * width + 0.5
    if top > 0 and bottom < height and left > 0 and right < width:  # not clipped
        assert bottom - top >= fraction * height - 0.5 and right - left >= fraction * width - 0.5
        error = (0.5 * (height + width) * fraction + 0.25) / (height * width)
        assert abs(outside - weight) <= error + 1e-9


def test_boxes_are_anywhere_and_on_no_side_more_often() -> None:
    mixing = WAYS["cutmix"].draw(make_data().info, epoch_order(20_000, 1, 0), (1, 0))
    assert mixing.boxes_N4 is not None
    cut_HW = np.zeros(SIZE_HW)
    for top, left, bottom, right in mixing.boxes_N4:
        cut_HW[top:bottom, left:right] += 1
    assert cut_HW.min() > 0.3 * cut_HW.max() > 0
    for mirrored_HW in (cut_HW[::-1], cut_HW[:, ::-1]):
        np.testing.assert_allclose(cut_HW, mirrored_HW, rtol=0.05)


def fixed(options: MixOptions, weight: float) -> Mixing:
    """A mixing of the whole split with one weight, and boxes of that area about the centre."""
    order_N, info = np.arange(NUM), make_data().info
    drawn = replace(options.draw(info, order_N, (0, 0)), partners_N=np.roll(order_N, 1))  # as torchvision has them
    weights_N = np.full(NUM, weight)
    if drawn.size_HW is None:
        return replace(drawn, weights_N=weights_N)
    boxes_N4 = cut_boxes(weights_N, np.full((NUM, 2), 0.5), drawn.size_HW)
    return replace(drawn, weights_N=weights_outside(boxes_N4, drawn.size_HW), boxes_N4=boxes_N4)


def logits() -> torch.Tensor:
    return torch.randn(NUM, NUM_CLASSES, generator=torch.Generator().manual_seed(0))


def mixed_losses(task: Task, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    assert batch.partners is not None
    weights_B = batch.partners.weights_B
    return weights_B * task.losses(outputs, batch.targets) + (1 - weights_B) * task.losses(
        outputs, batch.partners.targets
    )


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
@pytest.mark.parametrize("weight", [1.0, 0.7, 0.0])
def test_it_is_what_torchvision_does(way: str, weight: float) -> None:
    data = make_data(augment=())
    (plain,) = data.batches("train", batch_size=NUM)
    mixing = fixed(WAYS[way], weight)
    (batch,) = data.batches("train", batch_size=NUM, mixing=mixing)
    torchvision()  # also with a CPU build of torch
    v2 = import_module("torchvision.transforms.v2")
    labels_N = plain.targets["labels"]
    params = {"labels": labels_N, "batch_size": NUM, "num_classes": NUM_CLASSES, "lam": weight}
    if mixing.boxes_N4 is not None:
        top, left, bottom, right = mixing.boxes_N4[0].tolist()
        params |= {"box": (left, top, right, bottom), "lam_adjusted": float(mixing.weights_N[0])}
    theirs = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[way](num_classes=NUM_CLASSES)
    torch.testing.assert_close(batch.inputs["images"], theirs.transform(plain.inputs["images"], params))
    soft_NK = theirs.transform(labels_N, params)
    expected = cross_entropy(logits(), soft_NK, reduction="none")
    torch.testing.assert_close(mixed_losses(data.info.task, {"logits": logits()}, batch), expected)
    if weight == 1:
        assert torch.equal(batch.inputs["images"], plain.inputs["images"])
        assert torch.equal(
            mixed_losses(data.info.task, {"logits": logits()}, batch),
            data.info.task.losses({"logits": logits()}, plain.targets),
        )


@pytest.mark.parametrize("weights", [(), (2.0, 0.5, 0.0)])
def test_the_loss_is_that_of_mixed_one_hot_targets(weights: tuple[float, ...]) -> None:
    task = Classification(class_names=tuple("abc"), label_smoothing=0.1, class_weights=weights)
    (batch,) = mixed(make_data(), WAYS["both"], batch_size=NUM)
    assert batch.partners is not None
    weights_B1 = batch.partners.weights_B[:, None]
    own_BK, other_BK = (one_hot(of["labels"], NUM_CLASSES) for of in (batch.targets, batch.partners.targets))
    weights_K = torch.tensor(weights) if weights else None
    expected = torch.nn.CrossEntropyLoss(weights_K, reduction="none", label_smoothing=0.1)(
        logits(), weights_B1 * own_BK + (1 - weights_B1) * other_BK
    )
    torch.testing.assert_close(mixed_losses(task, {"logits": logits()}, batch), expected)


def test_masks_are_cut_as_their_images() -> None:
    data, order_N = segmentation_data(), epoch_order(NUM, 7, 0)
    mixing = WAYS["cutmix"].draw(data.info, order_N, (7, 0))
    plain, cut = by_sample(mixed(data, None)), by_sample(mixed(data, WAYS["cutmix"]))
    assert mixing.boxes_N4 is not None
    for index, (top, left, bottom, right) in enumerate(mixing.boxes_N4):
        image_CHW, mask_HW = cut[index]  # and nothing of a partner: the mask says it all
        other_CHW, other_HW = plain[int(mixing.partners_N[index])]
        expected_CHW, expected_HW = (tensor.clone() for tensor in plain[index])
        expected_CHW[:, top:bottom, left:right] = other_CHW[:, top:bottom, left:right]
        expected_HW[top:bottom, left:right] = other_HW[top:bottom, left:right]
        assert torch.equal(image_CHW, expected_CHW) and torch.equal(mask_HW, expected_HW)


def test_masks_of_both_ways_count_by_the_samples_own() -> None:
    data, order_N = segmentation_data(), epoch_order(NUM, 7, 0)
    mixing = WAYS["both"].draw(data.info, order_N, (7, 0))
    plain = by_sample(mixed(data, None))
    for index, (_, mask_HW, partner_HW, _) in by_sample(mixed(data, WAYS["both"])).items():
        if mixing.is_cut_N[index]:
            assert torch.equal(mask_HW, partner_HW)
        else:
            assert torch.equal(mask_HW, plain[index][1])
            assert torch.equal(partner_HW, plain[int(mixing.partners_N[index])][1])


def test_several_images_have_one_box_and_numbers_are_blended() -> None:
    rng = np.random.default_rng(2)
    arrays = {name: rng.normal(size=(NUM, 2, 6, 8)).astype(np.float32) for name in ("left", "right")}
    split = Split(
        np.array([f"x/{n:02d}" for n in range(NUM)]),
        {name: ArrayColumn(array) for name, array in arrays.items()},
        {"labels": ArrayColumn(np.arange(NUM) % 2)},
    )
    inputs = {name: ArrayInfo(dtype="float32", shape=(2, 6, 8)) for name in arrays}
    data = Data(info_of(None, **inputs), {"train": split})
    order_N = np.arange(NUM)
    for options in WAYS.values():
        options.check(data.info)
        mixing = options.draw(data.info, order_N, (0, 0))
        (batch,) = data.batches("train", batch_size=NUM, mixing=mixing)
        changes = [batch.inputs[name].numpy() - arrays[name] for name in arrays]
        others = [arrays[name][mixing.partners_N] - arrays[name] for name in arrays]
        ratios = [change / other for change, other in zip(changes, others, strict=True)]
        np.testing.assert_allclose(*ratios, atol=1e-3)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            info_of(tokens=TokensInfo(vocabulary_size=9, max_length=5)),
            r"mixup_alpha: the input tokens \(batch, length\) int64 has no",
        ),
        (info_of(images=IMAGES, ages=ArrayInfo(dtype="int64")), r"mixup_alpha: the input ages \(batch\) int64 has no"),
        (info_of(sound=ArrayInfo(dtype="float32", shape=("length",))), "the input sound .* has another length in each"),
    ],
)
def test_what_cannot_be_blended_is_refused(info: DatasetInfo, message: str) -> None:
    with pytest.raises(StageError, match=message):
        WAYS["mixup"].check(info)


HALF_MASKS = Segmentation(class_names=("a", "b"), shape_HW=(3, 4))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (info_of(row=ArrayInfo(dtype="float32", shape=(4,))), r"the input row \(batch, 4\) float32 is no image"),
        (info_of(images=IMAGES, age=ArrayInfo(dtype="float32", shape=(1,))), r"the input age \(batch, 1\) float32 is"),
        (
            info_of(images=IMAGES, small=ArrayInfo(dtype="float32", shape=(3, 3, 4))),
            "images .* and small .* are images of different sizes",
        ),
        (info_of(HALF_MASKS, images=IMAGES), r"the target masks \(batch, 3, 4\) int64 can't be cut as the images"),
    ],
)
def test_what_has_no_box_to_cut_is_refused(info: DatasetInfo, message: str) -> None:
    with pytest.raises(StageError, match=f"^cutmix_alpha: .*{message}"):
        WAYS["cutmix"].check(info)


@pytest.mark.parametrize(
    "task",
    [
        Classification(class_names=("a", "b")),
        MultiLabel(label_names=("a", "b")),
        Regression(target_names=("a",), mean=(0.0,), std=(1.0,)),
        Segmentation(class_names=("a", "b"), shape_HW=SIZE_HW),
    ],
)
def test_every_task_of_images_can_be_mixed(task: Task) -> None:
    for options in WAYS.values():
        options.check(info_of(task, images=IMAGES))
