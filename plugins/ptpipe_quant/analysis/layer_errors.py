"""What rounding does to each layer, as an artifact. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ptpipe import JSON, Artifact, IntegrityError
from ptpipe_torch.task.task import drop_name

_FILE = "layer_errors.json"
_NUM_SHOWN = 10


@dataclass(frozen=True)
class TensorError:
    """The difference between the values x of a tensor and their int8 form q(x)."""

    sqnr_db: float | None
    """Signal-to-quantization-noise ratio, 10 log10(sum x^2 / sum (x - q(x))^2), in dB; None: nothing is rounded."""
    minimum: float
    maximum: float
    clipped_fraction: float
    """The fraction of the values that lie so far outside of the int8 range that they are more than half a step off."""
    max_error_ratio: float
    """The largest |x - q(x)| / (scale / 2) among the values that are not clipped; at most 1."""


@dataclass(frozen=True)
class Effect:
    """What rounding costs the network as a whole."""

    sqnr_db: float | None
    """Signal-to-quantization-noise ratio of the network's outputs, in dB; None: they are the same."""
    drop: float
    """By how much the primary metric is worse than without rounding."""
    drop_low: float
    drop_high: float
    """One-sided limits."""

    def costs(self, name: str) -> dict[str, JSON]:
        """Return the drop and its limits by their names in tables and records. `name`: of the drop."""
        return {name: self.drop, f"{name}_low": self.drop_low, f"{name}_high": self.drop_high}


@dataclass(frozen=True)
class LayerError:
    """One layer or operator, in the order of a forward pass."""

    name: str
    """The path of a module, or a function and the module that calls it."""
    weight: TensorError | None
    """None: it has no weights of its own, or float ones."""
    output: TensorError | None
    """None: no int8 tensor of its own comes out of it."""
    effect: Effect
    """Where this layer alone is rounded, its weights and its output, and all others are float."""

    @property
    def harm(self) -> tuple[float, float]:
        """What layers are sorted by: what they cost the metric for sure, then the noise of the network's outputs."""
        noise_db = -math.inf if self.effect.sqnr_db is None else -self.effect.sqnr_db
        return max(0.0, self.effect.drop_low), noise_db


@dataclass(frozen=True)
class LayerErrors(Artifact):
    """What rounding does to each layer of a calibrated model."""

    layers: tuple[LayerError, ...]
    total: Effect
    """Where all layers are rounded."""
    metric: str
    """The primary metric."""
    is_fraction: bool
    """Whether it is shown in percent, and its drops in points."""
    float_value: float
    """The metric without rounding."""
    split: str
    num_samples: int
    confidence: float
    """Of each limit."""

    @property
    def drop_name(self) -> str:
        """What a cost is called."""
        return drop_name(is_fraction=self.is_fraction)

    @property
    def worst_first(self) -> list[LayerError]:
        """The layers, the most harmful one first."""
        return sorted(self.layers, key=lambda layer: layer.harm, reverse=True)

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            layers = tuple(_layer(item) for item in content.pop("layers"))
            return cls(layers=layers, total=Effect(**content.pop("total")), **content)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"not a file of layer errors: {error!r}") from error

    def summary(self) -> dict[str, JSON]:
        worst: list[JSON] = [self.row(layer) for layer in self.worst_first[:_NUM_SHOWN]]
        return {
            "metric": self.metric,
            "num_layers": len(self.layers),
            self.drop_name: self.total.drop,
            "split": self.split,
            "num_samples": self.num_samples,
            "worst_layers": worst,
        }

    def row(self, layer: LayerError) -> dict[str, JSON]:
        """Return one layer's figures, flat, by the names that tables format by."""
        weight, output = layer.weight, layer.output
        return {
            "layer": layer.name,
            **layer.effect.costs(self.drop_name),
            "network_sqnr_db": layer.effect.sqnr_db,
            "weight_sqnr_db": None if weight is None else weight.sqnr_db,
            "output_sqnr_db": None if output is None else output.sqnr_db,
            "output_minimum": None if output is None else output.minimum,
            "output_maximum": None if output is None else output.maximum,
            "output_clipped_fraction": None if output is None else output.clipped_fraction,
        }


def _layer(content: Mapping[str, Any]) -> LayerError:
    weight, output = (None if content[name] is None else TensorError(**content[name]) for name in ("weight", "output"))
    return LayerError(str(content["name"]), weight, output, Effect(**content["effect"]))
