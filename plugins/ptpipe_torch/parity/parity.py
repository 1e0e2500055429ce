"""Compare the outputs of an exported model, such as logits, with those of its torch model on real samples.

Tolerances and their derivation (D: the difference of the two models' outputs):

float32. The two runtimes add the same products in another order. That changes a sum of K terms by about sqrt(K) times
2**-24 of its largest terms, and layers accumulate likewise: sqrt(25,000 * 200) * 2**-24 = 1.3e-4 for a very large
network. Eight times that, 1e-3 of the largest logit, is allowed; 1e-6 is usual.

int8. The two compute the same integers except in the last rounding of a layer (a tie, or a bias that the conversion
left unrounded, which the file stores as int32), and a dynamic model's inputs have 8 bits in ONNX where torch may use 7.
One such difference in a thousand is enough to make all later roundings of a deep network independent. That is the worst
case, and the difference of two independently rounded computations is sqrt(2) times the error of either. The error E of
torch's int8 model is known: its difference from its own float network. E counts as at least half a step of the output,
the error of its last rounding, which few samples may not show.

int8, layers not proven (dynamic models, other formats than ONNX). Hence the root mean square of D may be sqrt(2) times
that of E, its maximum twice that of E (the same factor squared, as maxima vary more), each plus the float32 tolerance.
A file that passes differs no more from torch's int8 model than that does from the float model. Whatever E is, D must
stay below half of the spread of a sample's logits: beyond that the two models would rank classes differently, and
neither would be of use.

int8, layers proven. `export.onnx` has proven every layer of its file against the reference network, on some samples.
What is left to find here is what they don't see: a layer that torch's engine computes otherwise than the reference
network, another batch size, samples beyond those. Such a fault is large or none. A right file of an untrained deep
network, however, differs by the full sqrt(2) E, or by a little more, since both are estimates from a few samples, and E
may exceed the spread of its logits. So D may be 2 E (root mean square) and 4 E (maximum), whatever the spread is, and
the labels must agree where quantization leaves them decided: the difference of two logits, each off by sqrt(2) E
at most, has a standard deviation of 2 E, so that a label whose margin (largest minus second largest logit of torch's
int8 model) is over 6 E, three of these, changes in 0.1 % of the cases. At least 98 % of such labels must be the same;
one may differ in any case. In a trained network these are most samples, in an untrained one few or none. Errors of
samples differ: those of the images of an untrained segmentation network by a factor of 18, and a label was lost in one
pixel of twenty whose margin was over 6 E. So E is at least that of the sample's own logits here.

Outputs that are no scores of classes are compared in their natural units (see `Task.output_scale`), which makes the
columns of a regression comparable; their spread is that of a column over the samples, and there are no labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, StageError
from ptpipe_torch.model.signature import Signature

Logits = npt.NDArray[np.float32]

FLOAT_TOLERANCE = 1e-3
"""Of the largest logit."""
SPREAD_TOLERANCE = 0.5
"""Of the standard deviation among a sample's logits."""
DECIDED = 6.0
"""Margin of a label that quantization hardly ever changes, in units of its root mean square error."""
_ROUNDING = 1e-12
"""Of a mean of squares in float64: a variance below it is that of a constant."""
MIN_AGREEMENT = 0.98
"""Of these labels."""
FALSE_ALARM = 1e-6
"""Probability that a machine whose roundings are all others exceeds the largest difference that is allowed."""
_NUM_STEPS = 255
_RMS, _MAX = "{}s differ by (rms)", "{}s differ by (maximum)"


@dataclass(frozen=True)
class Parity:
    """One output for the same N samples, of shape (N, K), from the exported model and from torch.

    The constructor raises StageError if either has values that are not finite.
    """

    exported_NK: Logits
    torch_NK: Logits
    float_NK: Logits | None = None
    """For an int8 model: from its float network."""
    step: float | None = None
    """Quantization step of the exported model's output; None if that is not quantized or not known."""
    are_class_scores: bool = True
    """Whether a row has the scores of classes, the highest of which is predicted."""
    are_layers_proven: bool = False
    """Whether the file's layers were compared with torch's one by one."""
    rerounded_NK: Logits | None = None
    """Of the torch int8 model, for inputs with noise of half a step, so that all roundings fall otherwise; None where
    inputs are no floats."""
    exported: str = "ONNX file"
    """What the exported model is called in messages."""
    num_samples: int | None = None
    """That the rows are of, where these are pixels or tokens; None: a row is a sample."""
    num_features: int | None = None
    """Size of the last axis of an output with three; None: it has fewer, or more."""
    is_counted_N: npt.NDArray[np.bool_] | None = None
    """Which rows of class scores are predictions, as the padding of texts is none; None: all. Tolerances hold for all
    rows, figures of predicted classes and of signal over noise are of these."""

    def __post_init__(self) -> None:
        for name, logits_NK in (("torch model", self.torch_NK), (self.exported, self.exported_NK)):
            if not np.isfinite(logits_NK).all():
                raise StageError(f"the {self._value}s of the {name} are not finite")

    @cached_property
    def figures(self) -> Mapping[str, JSON]:
        """Recorded figures, in units of the output and of its step."""
        difference_NK = np.abs(self.exported_NK - self.torch_NK)
        figures: dict[str, JSON] = {
            "num_samples": self.num_samples or len(self.exported_NK),
            f"max_abs_{self._value}_difference": float(difference_NK.max()),
            f"mean_abs_{self._value}_difference": float(difference_NK.mean()),
        }
        if self.are_class_scores:
            figures["top1_agreement"] = float(np.mean(self._counted(self.exported_NK.argmax(1) == self._classes)))
        if self.step is not None:
            figures[f"max_{self._value}_difference_steps"] = float(difference_NK.max() / self.step)
            figures[f"mean_{self._value}_difference_steps"] = float(difference_NK.mean() / self.step)
        if self.float_NK is not None:
            figures[f"rms_{self._value}_difference"] = _rms(difference_NK)
            figures["rms_quantization_error"] = _rms(self.torch_NK - self.float_NK)
            figures |= {f"quantization_{name}": value for name, value in self._quantization(self.float_NK).items()}
            if self.are_class_scores:
                figures["num_decided_labels"] = int(self._counted(self._decided()).sum())
        return figures

    @cached_property
    def _classes(self) -> npt.NDArray[np.intp]:
        classes_N: npt.NDArray[np.intp] = self.torch_NK.argmax(1)
        return classes_N

    def _quantization(self, float_NK: Logits) -> Mapping[str, float]:
        """Return how near the int8 model's outputs are to the float network's; what all classes share is no signal."""
        if not self.are_class_scores:
            return signal_to_noise(float_NK, self.torch_NK, self.has_positions, self.num_features)
        pair = (self._counted(of) for of in (float_NK, self.torch_NK))
        expected_NK, found_NK = (of - of.mean(axis=1, keepdims=True) for of in pair)
        agreement = float(np.mean(self._counted(self._classes == float_NK.argmax(1))))
        return {"top1_agreement": agreement, **signal_to_noise(expected_NK, found_NK, False, None)}

    def _counted(self, of_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return of_N if self.is_counted_N is None else of_N[self.is_counted_N]

    @property
    def has_positions(self) -> bool:
        """Whether a sample has several rows."""
        return self.num_samples not in (None, len(self.torch_NK))

    @property
    def _value(self) -> str:
        return "logit" if self.are_class_scores else "output"

    def limits_elsewhere(self, num_values: int) -> tuple[float, float]:
        """Return how far `num_values` outputs may differ on another machine from what they are here: rms and maximum.

        Sums of integers are exact anywhere, and their scaling is one multiplication: equal outputs, or such that differ
        by a step, are usual. Sums of floats depend on their order, and decide ties of roundings. The worst case is that
        all roundings of an int8 network become others, which `rerounded_NK` shows; twice that is allowed. An output's
        difference is then a sum of many roundings, nearly normal: the largest of n exceeds sqrt(2 ln(2 n / p)) times
        the root mean square with a probability below p. Quantization's own error would be no bound: most of it is of
        weights and of values clipped at the ends of ranges, which are the same anywhere.
        """
        rounding = FLOAT_TOLERANCE * float(np.abs(self.torch_NK).max())
        if self.float_NK is None:
            return rounding, rounding
        if self.rerounded_NK is None:
            rms = math.sqrt(2) * self._error(self.float_NK)
        else:
            rms = 2 * max(_rms(self.rerounded_NK - self.torch_NK), (self.step or 0.0) / 2)
        return rms + rounding, math.sqrt(2 * math.log(2 * num_values / FALSE_ALARM)) * rms + rounding

    def check(self) -> None:
        """Raise StageError, with figures, if the two differ by more than the tolerances of this module."""
        difference_NK = self.exported_NK - self.torch_NK
        for quantity, found, allowed, reason in self._limits(difference_NK):
            if found > allowed:
                what = quantity.format(self._value)
                raise StageError(
                    f"{self.exported} and torch model disagree: {what} {found:.4g}, where {allowed:.4g} is allowed "
                    f"({reason}); {self._description()}"
                )
        if self.are_class_scores:
            self._check_labels()

    def _check_labels(self) -> None:
        decided_N = self._decided()
        differs_N = (self.exported_NK.argmax(1) != self._classes) & decided_N
        if differs_N.sum() > max(1, (1 - MIN_AGREEMENT) * decided_N.sum()):
            raise StageError(
                f"{self.exported} and torch model disagree: on {differs_N.sum()} of the {decided_N.sum()} labels whose "
                f"margin is {DECIDED:g} times quantization's error; {self._description()}"
            )

    def _decided(self) -> npt.NDArray[np.bool_]:
        """Return for which samples quantization leaves no doubt about the label."""
        if self.float_NK is None or self.torch_NK.shape[1] < 2:
            return np.zeros(len(self.torch_NK), bool)
        second_N, first_N = np.partition(self.torch_NK, -2, axis=1)[:, -2:].T
        errors_N = np.sqrt(np.square(self.torch_NK - self.float_NK).mean(axis=1))
        decided: npt.NDArray[np.bool_] = first_N - second_N > DECIDED * errors_N.clip(min=self._error(self.float_NK))
        return decided

    def _error(self, float_NK: Logits) -> float:
        return max(_rms(self.torch_NK - float_NK), (self.step or 0.0) / 2)

    def _limits(self, difference_NK: Logits) -> list[tuple[str, float, float, str]]:
        largest = float(np.abs(difference_NK).max())
        rounding = FLOAT_TOLERANCE * float(np.abs(self.torch_NK).max())
        if self.float_NK is None:
            return [(_MAX, largest, rounding, f"{FLOAT_TOLERANCE:g} of the largest {self._value}")]
        rms, error = _rms(difference_NK), self._error(self.float_NK)
        largest_error = max(float(np.abs(self.torch_NK - self.float_NK).max()), (self.step or 0.0) / 2)
        if self.are_layers_proven:
            return [
                (_RMS, rms, 2 * error + rounding, f"twice quantization's own {error:.4g}"),
                (_MAX, largest, 4 * largest_error + rounding, "four times the largest change by quantization"),
            ]
        spread = float(self.torch_NK.std(axis=1 if self.are_class_scores else 0).mean())
        half = "half of the spread of a sample's logits" if self.are_class_scores else "half of the spread of an output"
        return [
            (_RMS, rms, math.sqrt(2) * error + rounding, f"sqrt(2) times quantization's own {error:.4g}"),
            (_MAX, largest, 2 * largest_error + rounding, "twice the largest change by quantization"),
            (_RMS, rms, SPREAD_TOLERANCE * spread + rounding, f"{half}, {spread:.4g}"),
        ]

    def _description(self) -> str:
        figures = self.figures
        agreement = f", top-1 agreement {figures['top1_agreement']:.2%}" if "top1_agreement" in figures else ""
        steps = f" ({figures[f'max_{self._value}_difference_steps']:.1f} steps)" if self.step is not None else ""
        return (
            f"over {figures['num_samples']} samples{agreement}, "
            f"largest difference {figures[f'max_abs_{self._value}_difference']:.4g}{steps}, "
            f"mean {figures[f'mean_abs_{self._value}_difference']:.4g}"
        )


def signal_to_noise(
    expected_NK: Logits, found_NK: Logits, has_positions: bool, num_features: int | None
) -> dict[str, float]:
    """Return signal-to-noise ratios in dB, without those where nothing differs.

    `sqnr_db`: 10 log10 of the sum of squares of `expected_NK` over that of the differences. `channel_sqnr_db`, of
    outputs with channels, K, and positions (`has_positions`): all channels count alike, each by its noise over its
    variance, 1 at most. Scores beside boxes in pixels, all rounded to 0, cost nothing in the other figure. With
    `num_features`, the last axis of an output with three may have the channels, too: the worse one counts.
    """
    noise, signal = (
        float(np.square(values_NK, dtype=np.float64).mean()) for values_NK in (found_NK - expected_NK, expected_NK)
    )
    if not noise or not signal:
        return {}
    ratios = {"sqnr_db": signal / noise}
    if has_positions:
        pairs = [(expected_NK, found_NK)]
        if num_features:
            pairs.append((_by_feature(expected_NK, num_features), _by_feature(found_NK, num_features)))
        ratios["channel_sqnr_db"] = min(1 / _channel_noise(*pair) for pair in pairs)
    return {name: round(10 * math.log10(ratio), 2) for name, ratio in ratios.items()}


def _channel_noise(expected_NK: Logits, found_NK: Logits) -> float:
    """Return the mean over the columns of their noise over their variance, 1 at most; it is not 0."""
    noise_K = np.square(found_NK - expected_NK, dtype=np.float64).mean(axis=0)
    square_K = np.square(expected_NK, dtype=np.float64).mean(axis=0)
    variance_K = square_K - np.square(expected_NK.mean(axis=0, dtype=np.float64))
    is_constant_K = variance_K <= _ROUNDING * square_K
    ratios_K = np.where(is_constant_K, noise_K > 0, noise_K / np.where(is_constant_K, 1, variance_K))
    return float(np.minimum(ratios_K, 1).mean())


def _by_feature(values_NK: Logits, num_features: int) -> Logits:
    """Return rows of the second axis of an output, (N, K, F), as rows of its last one."""
    rows = values_NK.reshape(-1, num_features, values_NK.shape[1])
    return np.moveaxis(rows, 1, 2).reshape(-1, num_features)


def has_floats(signature: Signature) -> bool:
    """Return whether `with_noise` changes inputs."""
    return any(spec.dtype == "float32" for spec in signature.inputs)


def with_noise(inputs: Mapping[str, npt.NDArray[Any]], generator: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    """Return inputs with uniform noise of half a step, of 255 to the range of their values, added to floats."""
    noisy = dict(inputs)
    for name, values in inputs.items():
        if values.dtype == np.float32:
            half = np.ptp(values) / (2 * _NUM_STEPS)
            noisy[name] = values + generator.uniform(-half, half, values.shape).astype(np.float32)
    return noisy


def _rms(values: Logits) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
