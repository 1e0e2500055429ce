"""Keep the facts of paired samples beside a comparison: bits for what is right, float32 for the drops of resamples.

Shape legend: N samples, M models, R resamples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptpipe import IntegrityError
from ptpipe_eval.comparison import SAMPLES_FILE
from ptpipe_eval.quality.paired import PairedSamples
from ptpipe_torch.quality.bootstrap import BootstrapDrop

_ARRAYS, _FACTS = "samples.safetensors", SAMPLES_FILE
_RIGHT, _DROPS, _SCORES, _FLIPS, _LABELS = "right.", "drops.", "scores.", "flips", "labels"
_MAX_FILE_BYTES = 1 << 30
"""Of each file: 50,000 samples and 20 models take 2 MB."""


def save_samples(samples: PairedSamples, folder: Path) -> None:
    """Write the facts as safetensors and JSON."""
    from safetensors.numpy import save_file

    arrays: dict[str, npt.NDArray[Any]] = {
        _RIGHT + name: np.packbits(right_MN, axis=1) for name, right_MN in samples.right.items()
    }
    for name, drops in samples.bootstraps.items():
        arrays[_DROPS + name] = np.stack([drop.drops_R for drop in drops if drop is not None])
    for name, scores_MN in samples.scores.items():
        arrays[_SCORES + name] = scores_MN
    if samples.flips_MN is not None:
        arrays[_FLIPS] = np.packbits(samples.flips_MN, axis=1)
    if samples.labels_N is not None:
        arrays[_LABELS] = samples.labels_N.astype(np.int64)
    save_file(arrays, folder / _ARRAYS)
    content = {
        "ids": list(samples.ids),
        "class_names": list(samples.class_names),
        "targets_sha256": samples.targets_sha256,
        "too_large": list(samples.too_large),
        "bootstraps": {name: [_facts(drop) for drop in drops] for name, drops in samples.bootstraps.items()},
    }
    (folder / _FACTS).write_text(json.dumps(content, separators=(",", ":"), allow_nan=False), encoding="utf-8")


def load_samples(folder: Path, num_rows: int, baseline: int) -> PairedSamples:
    """Read what `save_samples` wrote for that many models. Raises IntegrityError for anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        for name in (_ARRAYS, _FACTS):
            if (folder / name).stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"{name} is too large")
        content = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        return _samples(load_file(folder / _ARRAYS), content, num_rows, baseline)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"not the samples of a comparison: {' '.join(str(error).split())[:300]}") from error


def _samples(
    arrays: Mapping[str, npt.NDArray[Any]], content: Mapping[str, Any], num_rows: int, baseline: int
) -> PairedSamples:
    ids = tuple(_text(name) for name in content["ids"])
    names = tuple(_text(name) for name in content["class_names"])
    bits = {name: _bits(array, num_rows, len(ids)) for name, array in arrays.items() if name.startswith(_RIGHT)}
    targets_sha256 = content.get("targets_sha256")  # former comparisons have none
    labels_N = arrays.get(_LABELS)
    if labels_N is not None and (labels_N.shape != (len(ids),) or labels_N.dtype != np.int64):
        raise ValueError(f"{labels_N.dtype} labels of shape {labels_N.shape} for {len(ids)} samples")
    return PairedSamples(
        ids=ids,
        baseline=baseline,
        right={name.removeprefix(_RIGHT): of for name, of in bits.items()},
        flips_MN=_bits(arrays[_FLIPS], num_rows, len(ids)) if _FLIPS in arrays else None,
        bootstraps={
            name: _drops(arrays[_DROPS + name], facts, len(ids), num_rows, baseline)
            for name, facts in content["bootstraps"].items()
        },
        labels_N=labels_N,
        class_names=names,
        too_large=tuple(_text(name) for name in content.get("too_large", ())),
        scores={
            name.removeprefix(_SCORES): _finite_scores(array, num_rows, len(ids))
            for name, array in arrays.items()
            if name.startswith(_SCORES)
        },
        targets_sha256=None if targets_sha256 is None else _text(targets_sha256),
    )


def _bits(packed: npt.NDArray[Any], num_rows: int, num_samples: int) -> npt.NDArray[np.bool_]:
    if packed.dtype != np.uint8 or packed.shape != (num_rows, (num_samples + 7) // 8):
        raise ValueError(f"bits of shape {packed.shape} for {num_rows} models and {num_samples} samples")
    return np.unpackbits(packed, axis=1, count=num_samples).astype(bool)


def _finite_scores(scores: npt.NDArray[Any], num_rows: int, num_samples: int) -> npt.NDArray[np.float16]:
    if scores.dtype != np.float16 or scores.shape != (num_rows, num_samples) or not np.isfinite(scores).all():
        raise ValueError(f"{scores.dtype} scores of shape {scores.shape} for {num_rows} models")
    return scores


def _drops(
    drops: npt.NDArray[Any], facts: list[Any], num_samples: int, num_rows: int, baseline: int
) -> tuple[BootstrapDrop | None, ...]:
    if drops.dtype != np.float32 or drops.ndim != 2 or len(drops) != num_rows - 1 or not np.isfinite(drops).all():
        raise ValueError(f"{drops.dtype} drops of shape {drops.shape} for {num_rows} models")
    if len(facts) != num_rows or [fact is None for fact in facts] != [row == baseline for row in range(num_rows)]:
        raise ValueError("the drops are not those of the models")
    remaining = iter(drops)
    return tuple(
        None
        if fact is None
        else BootstrapDrop(
            float(fact["drop"]),
            num_samples,
            int(fact["num_differing"]),
            int(fact.get("num_mistakes", fact["num_differing"])),  # former files have none
            float(fact["worst_effect"]),
            float(fact["acceleration"]),
            next(remaining),
        )
        for fact in facts
    )


def _facts(drop: BootstrapDrop | None) -> dict[str, float | int] | None:
    names = ("drop", "num_differing", "num_mistakes", "worst_effect", "acceleration")
    return None if drop is None else {name: getattr(drop, name) for name in names}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value
