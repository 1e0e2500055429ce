"""Segmentation: losses, metrics and masks that are augmented as their images are.

Shape legend: B samples, K classes, H height, W width.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score
from torch.nn.functional import cross_entropy

from ptpipe_torch import ImageInfo, Segmentation, Task
from ptpipe_torch.data.augment import AUGMENTATIONS
from ptpipe_torch.task.segmentation import MaskInfo

K, H, W, IGNORE = 4, 6, 5, 11
TASK = Segmentation(class_names=("sky", "road", "car", "cat"), shape_HW=(H, W), ignore=IGNORE)


def batch(num: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    masks_BHW = torch.randint(0, K - 1, (num, H, W), generator=generator)  # the last class never occurs
    masks_BHW[:, 0] = IGNORE
    return {"logits": torch.randn(num, K, H, W, generator=generator)}, {"masks": masks_BHW}


def test_a_samples_loss_is_the_mean_over_its_pixels_that_count() -> None:
    outputs, targets = batch(3)
    expected = [
        cross_entropy(outputs["logits"][n : n + 1], targets["masks"][n : n + 1], ignore_index=IGNORE) for n in range(3)
    ]
    torch.testing.assert_close(TASK.losses(outputs, targets), torch.stack(expected))


def test_a_sample_without_such_pixels_has_no_loss_and_no_gradient() -> None:
    outputs, targets = batch(2)
    targets["masks"][1] = IGNORE
    logits = outputs["logits"].requires_grad_()
    losses_B = TASK.losses(outputs, targets)
    losses_B.sum().backward()
    assert losses_B[1] == 0 and losses_B[0] > 0
    assert logits.grad is not None and not logits.grad[1].any() and logits.grad[0].any()
    assert TASK.samples(outputs, targets)["score"][1] == 0


def test_figures_are_those_of_scikit_learn_whatever_the_batches() -> None:
    parts = [batch(num, seed) for seed, num in enumerate((3, 1, 4))]
    sums = [TASK.sums(*part) for part in parts]
    totals = {name: sum(part[name].numpy() for part in sums) for name in sums[0]}
    figures = TASK.figures(totals, 8)
    masks = torch.cat([targets["masks"] for _, targets in parts]).flatten().numpy()
    predicted = torch.cat([outputs["logits"].argmax(1) for outputs, _ in parts]).flatten().numpy()
    counted = masks != IGNORE
    masks, predicted = masks[counted], predicted[counted]
    ious = jaccard_score(masks, predicted, average=None, labels=range(K), zero_division=0)
    assert figures["mean_iou"] == pytest.approx(ious.mean())  # predicted, though it never occurs: it counts
    assert [row["iou"] for row in figures["per_class"]] == pytest.approx(ious.tolist())
    assert figures["pixel_accuracy"] == pytest.approx((masks == predicted).mean())
    assert figures["confusion"] == confusion_matrix(masks, predicted, labels=range(K)).tolist()
    every = torch.cat([TASK.losses(*part) for part in parts]).double()
    assert figures["loss"] == pytest.approx(every.mean().item())


def test_a_class_that_neither_occurs_nor_is_predicted_is_left_out_of_the_mean() -> None:
    masks_BHW = torch.zeros(1, H, W, dtype=torch.int64)
    logits = torch.zeros(1, K, H, W)
    logits[:, 0] = 1
    figures = TASK.figures(
        {name: total.numpy() for name, total in TASK.sums({"logits": logits}, {"masks": masks_BHW}).items()}, 1
    )
    assert figures["mean_iou"] == 1
    assert [row["iou"] for row in figures["per_class"]] == [1, None, None, None]


def test_what_is_kept_of_a_sample() -> None:
    outputs, targets = batch(2)
    kept = TASK.samples(outputs, targets)
    assert kept["prediction"].dtype == torch.uint8 and kept["prediction"].equal(outputs["logits"].argmax(1).byte())
    counted = targets["masks"] != IGNORE
    right = (outputs["logits"].argmax(1) == targets["masks"]) & counted
    torch.testing.assert_close(kept["score"], right.sum((1, 2)) / counted.sum((1, 2)))


def test_the_facts_are_stored() -> None:
    assert Task.from_json(TASK.to_json()) == TASK
    assert TASK.targets == {"masks": MaskInfo(shape_HW=(H, W), ignore=IGNORE)}
    assert str(TASK.outputs[0]) == f"logits (batch, {K}, {H}, {W}) float32"


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_mask_is_augmented_as_its_image(name: str) -> None:
    """An image that shows its own mask still does, but where neighbours are blended or nothing was there."""
    rng = np.random.default_rng(3)
    num, side = 16, 24
    coarse = rng.integers(1, 4, (num, 4, 4), dtype=np.uint8)
    mask_BHW = np.kron(coarse, np.ones((1, 6, 6), dtype=np.uint8))
    image_BHWC = np.repeat(mask_BHW[..., None] * 60, 3, axis=3)
    positions = np.arange(num) + 100
    info = ImageInfo(shape_CHW=(3, side, side), mean=(0.5,) * 3, std=(0.5,) * 3)
    image = info.augment(image_BHWC.copy(), positions, (7, 1), [name])[..., 0]
    mask = MaskInfo(shape_HW=(side, side), ignore=255).augment(mask_BHW.copy(), positions, (7, 1), [name])
    assert set(np.unique(mask)) <= {1, 2, 3, 255}
    assert not np.array_equal(mask, mask_BHW)
    uncovered = mask == 255
    assert uncovered.any() == (name in ("crop", "erase", "rotate", "shift"))
    exact = np.where(uncovered, image == 0, image == 60 * mask)
    assert exact.mean() > (0.75 if name in ("rotate", "zoom") else 0.9999)


def test_masks_become_int64() -> None:
    convert = MaskInfo(shape_HW=(H, W), ignore=IGNORE).conversion("masks")
    tensor = convert(torch.zeros(2, H, W, dtype=torch.uint8), True)
    assert tensor.dtype == torch.int64 and tensor.shape == (2, H, W)


def test_weights_of_classes_weight_pixels() -> None:
    outputs, targets = batch(3)
    weights = (2.0, 0.5, 1.0, 0.0)
    weighted = TASK.model_copy(update={"class_weights": weights}).losses(outputs, targets)
    masks_BHW = targets["masks"]
    plain_BHW = cross_entropy(outputs["logits"], masks_BHW, reduction="none", ignore_index=IGNORE)
    of_pixel = torch.tensor([*weights, *[0.0] * (IGNORE + 1 - K)])[masks_BHW]
    expected = (plain_BHW * of_pixel).sum((1, 2)) / (masks_BHW != IGNORE).sum((1, 2))
    torch.testing.assert_close(weighted, expected)


def test_smoothed_labels_of_pixels_are_torchs_and_no_figure_has_them() -> None:
    outputs, targets = batch(3)
    for weights in ((), (2.0, 0.5, 1.0, 0.0)):
        plain = TASK.model_copy(update={"class_weights": weights})
        smoothed = plain.with_label_smoothing(0.2)
        losses_BHW = cross_entropy(
            outputs["logits"],
            targets["masks"],
            torch.tensor(weights) if weights else None,
            reduction="none",
            ignore_index=IGNORE,
            label_smoothing=0.2,
        )
        expected_B = losses_BHW.sum((1, 2)) / (targets["masks"] != IGNORE).sum((1, 2))
        assert torch.equal(smoothed.losses(outputs, targets), expected_B)
        assert not torch.allclose(plain.losses(outputs, targets), expected_B)
        sums = plain.sums(outputs, targets)
        assert all(torch.equal(of, sums[name]) for name, of in smoothed.sums(outputs, targets).items())
        rows = smoothed.sample_sums(outputs, targets)
        assert torch.equal(rows["loss"], plain.losses(outputs, targets).double())


def test_a_class_that_is_ignored_has_no_iou_and_is_wrong_where_it_is_predicted() -> None:
    """Of 6 pixels of `a`, 2 are called `void`; of 4 of `b` none; 2 of `void` don't count."""
    task = Segmentation(class_names=("void", "a", "b"), shape_HW=(3, 4), ignore=0)
    masks = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]).view(1, 3, 4)
    predicted = torch.tensor([1, 2, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]).view(1, 3, 4)
    outputs = {"logits": torch.nn.functional.one_hot(predicted, 3).permute(0, 3, 1, 2).float()}
    targets = {"masks": masks}
    figures = task.figures({name: of.numpy() for name, of in task.sums(outputs, targets).items()}, 1)
    assert [row["iou"] for row in figures["per_class"]] == [None, pytest.approx(4 / 6), 1.0]
    assert figures["mean_iou"] == pytest.approx(5 / 6) and figures["pixel_accuracy"] == pytest.approx(8 / 10)
    rows = task.sample_sums(outputs, targets)
    totals = {name: of.numpy().sum(0, dtype=np.float64)[None] for name, of in rows.items()}
    assert task.metric_values(totals, 1)["mean_iou"] == pytest.approx([5 / 6])
