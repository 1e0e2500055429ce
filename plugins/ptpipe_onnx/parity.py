"""How far a written ONNX file is from the torch model that it was made of, on real samples.

Tolerances, and where they come from (D: the difference of the two models' logits):

float32. The two runtimes add the same products in another order. A sum of K terms then moves by about sqrt(K) of the
last bit, 2**-24 of its largest terms, and layers add up likewise: sqrt(25,000 * 200) * 2**-24 = 1.3e-4 for a very
large network. Eight times that, 1e-3 of the largest logit, is allowed; 1e-6 is usual.

int8. The two compute the same integers but for the last rounding of a layer (a bias rounded to int32, a tie), and a
dynamic model's inputs have 8 bits in ONNX where torch uses 7. One such flip in a thousand is enough to make all
later roundings of a deep network independent of each other. Independent is the worst they can be, and the
difference of two roundings of one computation is sqrt(2) times as large as the error of either. The error E of
torch's int8 model is known: its distance from its own float network. Hence the root mean square of D may be
sqrt(2) times that of E, its maximum twice that of E (the same factor, squared, as a maximum scatters), and each a
float32 tolerance more. E counts as at least half a step of the output, which its last rounding alone can amount to:
few samples may not show it. A file that passes is no farther from torch's int8 model than that is from the float one.

Whatever E is, D must stay below half of how much a sample's logits differ among each other: above that the two
models would rank classes differently, and neither says much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptpipe import JSON, StageError

Logits = npt.NDArray[np.float32]

FLOAT_TOLERANCE = 1e-3
"""Of the largest logit."""
SPREAD_TOLERANCE = 0.5
"""Of the standard deviation among a sample's logits."""
_RMS, _MAX = "logits differ by (rms)", "a logit differs by"


@dataclass(frozen=True)
class Parity:
    """Logits of the same N samples, of shape (N, K), from the ONNX file and from torch.

    Construction raises StageError where either gives anything but finite numbers.
    """

    onnx_NK: Logits
    torch_NK: Logits
    float_NK: Logits | None = None
    """For an int8 model: from the float network that it stands for."""
    step: float | None = None
    """Quantization step of the ONNX file's output, where that is quantized."""

    def __post_init__(self) -> None:
        for name, logits_NK in (("torch model", self.torch_NK), ("ONNX file", self.onnx_NK)):
            if not np.isfinite(logits_NK).all():
                raise StageError(f"the {name} gives logits that are not finite numbers")

    @property
    def figures(self) -> Mapping[str, JSON]:
        """What is recorded, in units of a logit and of the output's step."""
        difference_NK = np.abs(self.onnx_NK - self.torch_NK)
        figures: dict[str, JSON] = {
            "num_samples": len(self.onnx_NK),
            "top1_agreement": float(np.mean(self.onnx_NK.argmax(1) == self.torch_NK.argmax(1))),
            "max_abs_logit_difference": float(difference_NK.max()),
            "mean_abs_logit_difference": float(difference_NK.mean()),
        }
        if self.step is not None:
            figures["max_logit_difference_steps"] = float(difference_NK.max() / self.step)
            figures["mean_logit_difference_steps"] = float(difference_NK.mean() / self.step)
        if self.float_NK is not None:
            figures["rms_logit_difference"] = _rms(difference_NK)
            figures["rms_quantization_error"] = _rms(self.torch_NK - self.float_NK)
        return figures

    def check(self) -> None:
        """Raise StageError, with figures, where the two disagree beyond the tolerances of this module."""
        difference_NK = self.onnx_NK - self.torch_NK
        for what, found, allowed, reason in self._limits(difference_NK):
            if found > allowed:
                raise StageError(
                    f"the ONNX file and the torch model disagree: {what} {found:.4g}, where {allowed:.4g} is allowed "
                    f"({reason}); {self._described()}"
                )

    def _limits(self, difference_NK: Logits) -> list[tuple[str, float, float, str]]:
        largest = float(np.abs(difference_NK).max())
        rounding = FLOAT_TOLERANCE * float(np.abs(self.torch_NK).max())
        if self.float_NK is None:
            return [(_MAX, largest, rounding, f"{FLOAT_TOLERANCE:g} of the largest logit")]
        error_NK = self.torch_NK - self.float_NK
        half_step = (self.step or 0.0) / 2
        rms, error = _rms(difference_NK), max(_rms(error_NK), half_step)
        largest_error = max(float(np.abs(error_NK).max()), half_step)
        spread = float(self.torch_NK.std(axis=1).mean())
        return [
            (_RMS, rms, math.sqrt(2) * error + rounding, f"sqrt(2) times quantization's own {error:.4g}"),
            (_MAX, largest, 2 * largest_error + rounding, "twice the most that quantization moved one"),
            (_RMS, rms, SPREAD_TOLERANCE * spread + rounding, f"half of the spread of a sample's logits, {spread:.4g}"),
        ]

    def _described(self) -> str:
        figures = self.figures
        steps = f" ({figures['max_logit_difference_steps']:.1f} steps)" if self.step is not None else ""
        return (
            f"over {figures['num_samples']} samples, top-1 agreement {figures['top1_agreement']:.2%}, "
            f"largest difference {figures['max_abs_logit_difference']:.4g}{steps}, "
            f"mean {figures['mean_abs_logit_difference']:.4g}"
        )


def _rms(values: Logits) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
