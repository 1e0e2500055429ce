"""What a search tried, as an artifact. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ptpipe import JSON, Artifact, IntegrityError
from ptpipe_torch.task.task import drop_name

_FILE = "trials.json"


@dataclass(frozen=True)
class Choice:
    """What a trial does otherwise than `quant.prepare` by default."""

    skip: tuple[str, ...]
    """As the option of `quant.prepare`: what is kept float."""
    layers: tuple[tuple[str, str], ...] = ()
    """Layers with another remedy, by name: an observer, or `per_channel`."""

    def layer_options(self) -> dict[str, dict[str, JSON]]:
        """Return the option `layers` of `quant.prepare` that says the same."""
        options: dict[str, dict[str, JSON]] = {}
        for name, remedy in self.layers:
            options.setdefault(name, {})["weights" if remedy == "per_channel" else "observer"] = remedy
        return options

    def layers_text(self) -> str:
        """Return `layer_options` as YAML: `{9: {observer: percentile}}`."""
        return json.dumps(self.layer_options()).replace('"', "")


@dataclass(frozen=True)
class Trial:
    """An int8 model that was measured."""

    choice: Choice
    drop: float
    """By how much its primary metric is worse than the float model's, on these samples."""
    drop_low: float
    drop_high: float
    """One-sided limits, wide enough for all times that the search looked."""
    num_samples: int
    """On how many samples it was decided."""
    is_met: bool
    """Whether it meets `max_drop`."""
    is_sure: bool
    """Whether the limits decide; else the drop on all samples does."""
    int8_fraction: float
    """Fraction of the parameters that are int8."""

    @property
    def rank(self) -> tuple[bool, float]:
        """The best trial has the largest: it meets the budget with most in int8, or comes closest."""
        return self.is_met, self.int8_fraction if self.is_met else -self.drop


@dataclass(frozen=True)
class Trials(Artifact):
    """All trials of a search, in order."""

    trials: tuple[Trial, ...]
    metric: str
    is_fraction: bool
    max_drop: float
    split: str

    @property
    def best(self) -> Trial:
        """The trial whose model was returned."""
        return max(self.trials, key=lambda trial: trial.rank)

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return cls(tuple(trial_of(item) for item in content.pop("trials")), **content)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"not a file of trials: {error!r}") from error

    @property
    def drop_name(self) -> str:
        """What a loss is called."""
        return drop_name(is_fraction=self.is_fraction)

    def summary(self) -> dict[str, JSON]:
        best = self.best
        return {
            "metric": self.metric,
            "num_trials": len(self.trials),
            "max_drop": self.max_drop,
            self.drop_name: best.drop,
            "is_met": best.is_met,
            "skip": list(best.choice.skip),
            "layers": dict[str, JSON](best.choice.layer_options()),
            "int8_parameters_fraction": best.int8_fraction,
        }


def trial_of(content: Mapping[str, Any]) -> Trial:
    """Return the trial that `dataclasses.asdict` wrote."""
    return Trial(**{**content, "choice": choice_of(content["choice"])})


def choice_of(content: Mapping[str, Any]) -> Choice:
    """Return the choice that `dataclasses.asdict` wrote; before there were remedies, without `layers`."""
    layers = tuple((str(name), str(remedy)) for name, remedy in content.get("layers", ()))
    return Choice(tuple(content["skip"]), layers)
