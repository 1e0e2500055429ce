"""What a comparison's table and record have of the paired samples. All intervals are at 95 %, each for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ptpipe import JSON
from ptpipe_torch.quality.proportions import ProportionDrop, mcnemar_mid_p

if TYPE_CHECKING:
    from ptpipe_eval.quality.paired import Drop, PairedSamples
    from ptpipe_torch import Metric

_TWO_SIDED = 0.975
"""The one-sided confidence whose two limits are an interval at 95 %."""
_MAX_CLASSES = 20


def bounds_summary(samples: PairedSamples, row: int, primary: Metric) -> dict[str, JSON]:
    """Return the interval of the drop in the primary metric, of a row that is not the baseline's."""
    drop = samples.drop(primary.name, row)
    if drop is None:
        return {}
    low, high = drop.limits(_TWO_SIDED)
    return {f"{primary.drop_name}_low": low, f"{primary.drop_name}_high": high}


def paired_summary(samples: PairedSamples, row: int, metrics: Sequence[Metric]) -> dict[str, JSON]:
    """Return what else is known of a row that is not the baseline's."""
    found: dict[str, JSON] = {}
    if samples.flips_MN is not None:
        found["num_flips"] = int(samples.flips_MN[row].sum())
    found["paired"] = {
        metric.name: _drop_summary(of) for metric in metrics if (of := samples.drop(metric.name, row)) is not None
    }
    by_class = next((drops for metric in metrics if (drops := samples.class_drops(metric.name, row))), [])
    changed = [(name, of) for name, of in by_class if of.num_lost or of.num_gained]
    changed.sort(key=lambda pair: -pair[1].drop)
    found["per_class"] = [
        {"name": name, "num_samples": of.num_samples, **_drop_summary(of)} for name, of in changed[:_MAX_CLASSES]
    ]
    return found


def _drop_summary(drop: Drop) -> dict[str, JSON]:
    low, high = drop.limits(_TWO_SIDED)
    found: dict[str, JSON] = {"drop": drop.drop, "low": low, "high": high}
    if isinstance(drop, ProportionDrop):
        found |= {
            "num_lost": drop.num_lost,
            "num_gained": drop.num_gained,
            "discordance": drop.discordance,
            "mcnemar_mid_p": mcnemar_mid_p(drop.num_lost, drop.num_gained),
        }
    return found
