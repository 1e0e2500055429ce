from __future__ import annotations

import math

import numpy as np
import pytest

from ptpipe import StageError
from ptpipe_torch.parity.parity import Parity, signal_to_noise, with_noise

RNG = np.random.default_rng(5)
TORCH_NK = RNG.normal(size=(400, 10)).astype(np.float32) * 3
NOISE_NK = RNG.normal(size=(400, 10)).astype(np.float32)
NOISE_NK /= np.sqrt(np.mean(np.square(NOISE_NK)))


def test_figures() -> None:
    torch_NK = np.array([[0, 1, 2], [3, 1, 0]], np.float32)
    exported_NK = np.array([[0, 2.5, 2], [3, 1, -0.5]], np.float32)
    figures = dict(Parity(exported_NK, torch_NK, torch_NK + 2, step=0.5).figures)
    assert figures.pop("quantization_sqnr_db") > 100  # 2 more for all classes changes none
    assert figures == {
        "num_samples": 2,
        "top1_agreement": 0.5,
        "max_abs_logit_difference": 1.5,
        "mean_abs_logit_difference": pytest.approx(2 / 6),
        "max_logit_difference_steps": 3.0,
        "mean_logit_difference_steps": pytest.approx(4 / 6),
        "rms_logit_difference": pytest.approx(math.sqrt(2.5 / 6)),
        "rms_quantization_error": 2.0,
        "quantization_top1_agreement": 1.0,
        "num_decided_labels": 0,
    }
    assert set(Parity(exported_NK, torch_NK).figures) == {
        "num_samples",
        "top1_agreement",
        "max_abs_logit_difference",
        "mean_abs_logit_difference",
    }


@pytest.mark.parametrize("are_logarithms", [False, True])
def test_classes_are_compared_with_the_float_networks_by_what_tells_them_apart(are_logarithms: bool) -> None:
    """`log_softmax` adds a number to all scores of a sample, which would count as signal."""
    float_NK, noise_NK = TORCH_NK + 5, NOISE_NK - NOISE_NK.mean(1, keepdims=True)
    torch_NK = float_NK + 0.3 * noise_NK + NOISE_NK[:, :1]
    if are_logarithms:
        float_NK, torch_NK = (of - np.log(np.exp(of).sum(1, keepdims=True)) for of in (float_NK, torch_NK))
    figures = Parity(torch_NK, torch_NK, float_NK).figures
    assert figures["quantization_sqnr_db"] == pytest.approx(20, abs=0.1)
    assert figures["top1_agreement"] == 1.0  # of the file and torch's int8 model
    assert figures["quantization_top1_agreement"] == np.mean(torch_NK.argmax(1) == float_NK.argmax(1)) < 1


def test_rows_of_padding_are_no_predictions() -> None:
    """Their classes may all be others: a network's outputs there are of no use, and nearly equal."""
    is_counted_N = np.arange(400) % 4 == 0
    float_NK = TORCH_NK + NOISE_NK * 1e-3
    float_NK[~is_counted_N] = TORCH_NK[~is_counted_N, ::-1]
    exported_NK = np.where(is_counted_N[:, None], TORCH_NK, -TORCH_NK)
    found = Parity(exported_NK, TORCH_NK, float_NK, is_counted_N=is_counted_N)
    alone = Parity(*(of[is_counted_N] for of in (exported_NK, TORCH_NK, float_NK)))
    for name in ("top1_agreement", "quantization_top1_agreement", "quantization_sqnr_db"):
        assert found.figures[name] == pytest.approx(alone.figures[name])
    assert found.figures["top1_agreement"] == 1 and found.figures["num_decided_labels"] <= is_counted_N.sum()
    assert found.figures["max_abs_logit_difference"] == pytest.approx(2 * np.abs(TORCH_NK[~is_counted_N]).max())
    with pytest.raises(StageError, match="disagree"):  # a fault anywhere is one of the file
        found.check()


def test_a_float_file_may_differ_by_rounding_only() -> None:
    largest = float(np.abs(TORCH_NK).max())
    Parity(TORCH_NK, TORCH_NK).check()
    for fraction, is_fine in ((0.9e-3, True), (1.1e-3, False)):
        exported_NK = TORCH_NK.copy()
        exported_NK[17, 3] += fraction * largest
        if is_fine:
            Parity(exported_NK, TORCH_NK).check()
        else:
            with pytest.raises(
                StageError, match=r"disagree: logits differ by .maximum. .* over 400 samples, top-1 agreement"
            ):
                Parity(exported_NK, TORCH_NK).check()


def test_an_int8_file_may_differ_as_much_as_another_rounding_would() -> None:
    float_NK = TORCH_NK + 0.1 * NOISE_NK
    another_NK = TORCH_NK + 0.1 * NOISE_NK[::-1]
    Parity(another_NK, TORCH_NK, float_NK).check()
    Parity(TORCH_NK + 0.135 * NOISE_NK[::-1], TORCH_NK, float_NK).check()
    with pytest.raises(StageError, match=r"sqrt\(2\) times quantization's own 0\.1\b"):
        Parity(TORCH_NK + 0.17 * NOISE_NK[::-1], TORCH_NK, float_NK).check()


def test_a_step_of_the_output_is_always_allowed() -> None:
    float_NK = TORCH_NK + 0.01 * NOISE_NK
    exported_NK = TORCH_NK.copy()
    exported_NK[::10] += 0.5
    Parity(exported_NK, TORCH_NK, float_NK, step=0.5).check()
    with pytest.raises(StageError, match="disagree"):
        Parity(exported_NK, TORCH_NK, float_NK, step=0.4).check()
    exported_NK[:] = TORCH_NK + 0.5
    with pytest.raises(StageError, match="disagree"):
        Parity(exported_NK, TORCH_NK, float_NK, step=0.5).check()


def test_one_bad_sample_among_many_is_found() -> None:
    float_NK = TORCH_NK + 0.1 * NOISE_NK
    exported_NK = TORCH_NK.copy()
    exported_NK[200, 4] += 2.2 * 0.1 * np.abs(NOISE_NK).max()
    with pytest.raises(StageError, match=r"logits differ by .maximum. .*twice the largest change .*\(\d+\.\d steps\)"):
        Parity(exported_NK, TORCH_NK, float_NK, step=0.05).check()


def test_noise_beyond_what_tells_classes_apart_fails_however_bad_quantization_is() -> None:
    broken_NK = TORCH_NK + 10 * NOISE_NK
    with pytest.raises(StageError, match="half of the spread"):
        Parity(TORCH_NK + 2 * NOISE_NK[::-1], TORCH_NK, broken_NK).check()


def test_proven_layers_may_differ_as_much_as_all_their_roundings_do() -> None:
    """Right files of untrained networks: quantization's error exceeds the spread of the logits."""
    float_NK, another_NK = TORCH_NK + 10 * NOISE_NK, TORCH_NK + 18 * NOISE_NK[::-1]
    Parity(another_NK, TORCH_NK, float_NK, are_layers_proven=True).check()
    with pytest.raises(StageError, match=r"allowed \(sqrt\(2\) times"):
        Parity(another_NK, TORCH_NK, float_NK).check()
    with pytest.raises(StageError, match=r"allowed \(twice quantization's own 10\)"):
        Parity(TORCH_NK + 21 * NOISE_NK[::-1], TORCH_NK, float_NK, are_layers_proven=True).check()
    exported_NK = TORCH_NK.copy()
    exported_NK[7, 2] += 41 * np.abs(NOISE_NK).max()
    with pytest.raises(StageError, match="four times the largest change"):
        Parity(exported_NK, TORCH_NK, float_NK, are_layers_proven=True).check()


def margins() -> np.ndarray:
    second_N, first_N = np.sort(TORCH_NK, axis=1)[:, -2:].T
    return first_N - second_N


def with_labels_changed(samples_N: np.ndarray) -> np.ndarray:
    """Return logits whose second largest of these samples is the largest."""
    changed_NK = TORCH_NK.copy()
    changed_NK[samples_N, TORCH_NK[samples_N].argsort(1)[:, -2]] += margins()[samples_N] + 0.01
    return changed_NK


@pytest.mark.parametrize(("num_changed", "is_fine"), [(1, True), (5, True), (6, False)])
def test_labels_that_quantization_leaves_decided_must_agree(num_changed: int, is_fine: bool) -> None:
    errors_N = np.sqrt(np.square(0.1 * NOISE_NK).mean(1)).clip(min=0.1)
    is_decided_N = margins() > 6 * errors_N
    exported_NK = with_labels_changed(np.flatnonzero(is_decided_N & (margins() < 0.9))[:num_changed])
    parity = Parity(exported_NK, TORCH_NK, TORCH_NK + 0.1 * NOISE_NK, are_layers_proven=True)
    assert parity.figures["num_decided_labels"] == is_decided_N.sum() == 277  # 2 % are 5.5
    if is_fine:
        parity.check()
    else:
        with pytest.raises(StageError, match=r"on 6 of the 277 labels whose margin is 6 times .* top-1 agreement"):
            parity.check()


def test_a_label_of_a_sample_with_a_large_error_is_not_decided() -> None:
    """Images of a segmentation network have errors of their own; those of a few must not stand for all."""
    float_NK = TORCH_NK + 0.02 * NOISE_NK
    noisy_N = np.flatnonzero((margins() > 0.7) & (margins() < 1.4))[:30]
    float_NK[noisy_N] += 0.4 * NOISE_NK[noisy_N]
    error = np.sqrt(np.square(float_NK - TORCH_NK).mean())
    assert (margins()[noisy_N] > 6 * error).all(), "decided, if all samples had the same error"
    Parity(with_labels_changed(noisy_N), TORCH_NK, float_NK, are_layers_proven=True).check()
    others_N = np.setdiff1d(np.flatnonzero((margins() > 0.7) & (margins() < 1.4)), noisy_N)[:30]
    with pytest.raises(StageError, match=r"on 30 of the \d+ labels"):
        Parity(with_labels_changed(others_N), TORCH_NK, float_NK, are_layers_proven=True).check()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite(bad: float) -> None:
    bad_NK = TORCH_NK.copy()
    bad_NK[0, 0] = bad
    with pytest.raises(StageError, match="the logits of the ONNX file are not finite"):
        Parity(bad_NK, TORCH_NK)
    with pytest.raises(StageError, match="the logits of the torch model are not finite"):
        Parity(TORCH_NK, bad_NK)


def test_outputs_that_are_no_scores_of_classes_have_no_labels() -> None:
    parity = Parity(TORCH_NK[:, :1], TORCH_NK[:, :1], TORCH_NK[:, :1] + 0.1, are_class_scores=False)
    parity.check()
    assert parity.figures.keys() == {
        "num_samples", "max_abs_output_difference", "mean_abs_output_difference", "rms_output_difference",
        "rms_quantization_error", "quantization_sqnr_db",
    }  # fmt: skip
    with pytest.raises(
        StageError, match=r"outputs differ by .maximum. .* of the largest output\); over \d+ samples, largest"
    ):
        Parity(TORCH_NK + 1, TORCH_NK, are_class_scores=False).check()


def test_channels_of_pictures_count_alike() -> None:
    """Boxes of up to hundreds of pixels beside scores, which one grid for all of them rounds to 0."""
    float_NK = np.concatenate([RNG.uniform(0, 300, (600, 4)), RNG.random((600, 12))], axis=1).astype(np.float32)
    torch_NK = np.round(float_NK / 2) * 2
    figures = Parity(torch_NK, torch_NK, float_NK, are_class_scores=False, num_samples=12).figures
    assert figures["num_samples"] == 12 and figures["quantization_sqnr_db"] > 40
    assert figures["quantization_channel_sqnr_db"] == pytest.approx(10 * math.log10(16 / 12), abs=0.05)
    rows = Parity(torch_NK, torch_NK, float_NK, are_class_scores=False, num_samples=600).figures
    assert "quantization_channel_sqnr_db" not in rows  # columns of a sample are no channels
    assert "quantization_channel_sqnr_db" not in Parity(torch_NK, torch_NK, float_NK, num_samples=12).figures
    assert signal_to_noise(float_NK, float_NK, has_positions=True, num_features=None) == {}


def test_channels_may_be_the_last_axis() -> None:
    """As YOLOv5 has them: (samples, anchors, boxes and scores)."""
    output_NAF = np.concatenate([RNG.uniform(0, 300, (12, 50, 4)), RNG.random((12, 50, 12))], axis=2).astype(np.float32)
    float_NK, torch_NK = (
        np.moveaxis(array, 1, 2).reshape(-1, 50) for array in (output_NAF, np.round(output_NAF / 2) * 2)
    )
    rows = {"are_class_scores": False, "num_samples": 12}
    one, both = (
        Parity(torch_NK, torch_NK, float_NK, **rows, num_features=size).figures["quantization_channel_sqnr_db"]
        for size in (None, 16)
    )
    assert one > 40 and both == pytest.approx(10 * math.log10(16 / 12), abs=0.05)


@pytest.mark.parametrize(("other", "expected"), [(7.0, None), (6.0, 10 * math.log10(16))])
def test_a_channel_that_is_constant_must_stay_so(other: float, expected: float | None) -> None:
    values_NK = RNG.random((600, 16)).astype(np.float32)
    values_NK[:, 5] = 7.0
    found_NK = values_NK.copy()
    found_NK[:, 5] = other
    found = signal_to_noise(values_NK, found_NK, has_positions=True, num_features=None).get("channel_sqnr_db")
    assert found == (expected if expected is None else pytest.approx(expected, abs=0.01))


def test_two_outputs_that_are_nearly_equal_differ_as_much_as_each_does() -> None:
    """The spread is that of an output over the samples, not that of a sample's outputs."""
    twins_NK = np.repeat(TORCH_NK[:, :1], 2, axis=1) + 1e-4 * NOISE_NK[:, :2]
    file_NK, float_NK = twins_NK + 0.01 * NOISE_NK[:, 2:4], twins_NK + 0.01 * NOISE_NK[::-1, 2:4]
    Parity(file_NK, twins_NK, float_NK, are_class_scores=False).check()
    with pytest.raises(StageError, match="half of the spread of a sample's logits"):
        Parity(file_NK, twins_NK, float_NK).check()


def test_other_machines_may_round_otherwise_but_not_quantize_worse() -> None:
    generator = np.random.default_rng(0)
    torch_NK = generator.normal(0, 5, (100, 10)).astype(np.float32)
    float_NK, rerounded_NK = (torch_NK + np.float32(of) * np.sign(torch_NK) for of in (3, 0.1))
    rounding = 1e-3 * float(np.abs(torch_NK).max())
    assert Parity(torch_NK, torch_NK, None, None).limits_elsewhere(80) == (rounding, rounding)
    rms, largest = Parity(torch_NK, torch_NK, float_NK, 0.05, rerounded_NK=rerounded_NK).limits_elsewhere(80)
    assert rms == pytest.approx(0.2 + rounding, rel=1e-4)
    assert largest == pytest.approx(6.15 * 0.2 + rounding, rel=1e-2)
    rms, _ = Parity(torch_NK, torch_NK, float_NK, 0.5, rerounded_NK=rerounded_NK).limits_elsewhere(80)
    assert rms == pytest.approx(0.5 + rounding, rel=1e-4)  # at least a step
    rms, _ = Parity(torch_NK, torch_NK, float_NK, 0.05).limits_elsewhere(80)
    assert rms == pytest.approx(2**0.5 * 3 + rounding, rel=1e-4)


def test_noise_is_of_half_a_step_and_for_floats_alone() -> None:
    images, ids = np.linspace(-1, 4, 1000, dtype=np.float32), np.arange(9)
    noisy = with_noise({"images": images, "ids": ids}, np.random.default_rng(0))
    difference = np.abs(noisy["images"] - images)
    assert 0.4 * 5 / 255 < difference.max() <= 0.5 * 5 / 255 * (1 + 1e-4)
    assert noisy["images"].dtype == np.float32
    assert (noisy["ids"] == ids).all()
