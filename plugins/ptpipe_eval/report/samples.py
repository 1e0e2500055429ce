"""The samples that the judged model loses most on: as thumbnails, as text, or by their ids.

Shape legend: N samples, S of those that are shown.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptpipe import PtpipeError, RunFinished, Section
from ptpipe.sections import Block, Image, ImageGrid, Table, Text, Topic
from ptpipe_eval.report.quality import rows_of
from ptpipe_torch import Data, ImageInfo, Split, TokensInfo

if TYPE_CHECKING:
    from ptpipe_eval.quality.paired import PairedSamples
    from ptpipe_eval.report import Compared, Load

_NUM_SHOWN = 12
_MAX_SIDE_PX = 96
_NUM_COLORS = 64
"""Of a thumbnail: a third of the bytes of all colors."""
_MAX_TEXT = 300
_MAX_DATA_BYTES = 256 << 20
"""Of a data set that is read, and verified, for its pictures."""


@dataclass(frozen=True)
class _Worst:
    """Samples in the order of what was lost on them, worst first."""

    title: str
    positions_S: npt.NDArray[np.int64]
    words: Sequence[str]
    """What the models made of each."""


def samples_section(compared: Compared, run: RunFinished, load: Load) -> Section | None:
    """Return the samples that the judged model loses; None where it loses none, or nothing is known of them."""
    samples = compared.comparison.samples
    worst = None if samples is None else _worst(compared, samples)
    if samples is None or worst is None or not len(worst.positions_S):
        return None
    ids = [samples.ids[position] for position in worst.positions_S.tolist()]
    pictures = _pictures(compared, run, load, ids, worst.words)
    return Section(worst.title, tuple(pictures), Topic.SAMPLES, compared.stage_id)


def _worst(compared: Compared, samples: PairedSamples) -> _Worst | None:
    base, own = rows_of(compared)
    increase_N = _increase(compared, base, own)
    right_MN = next(iter(samples.right.values()), None)
    if right_MN is not None and compared.comparison.metrics[0].name in samples.right:
        right_MN = samples.right[compared.comparison.metrics[0].name]
    if right_MN is not None:
        lost_N = np.flatnonzero(right_MN[base] & ~right_MN[own])
        order_N = lost_N if increase_N is None else lost_N[np.argsort(-increase_N[lost_N], kind="stable")]
        names = f"{compared.comparison.baseline} has right and {compared.candidate} wrong"
        title = f"The {len(lost_N):,} samples that {names}" if len(lost_N) > 1 else f"The sample that {names}"
        shown_S = order_N[:_NUM_SHOWN]
        if len(lost_N) > _NUM_SHOWN:
            title = f"The worst {_NUM_SHOWN} of {len(lost_N):,} samples that {names}"
        return _Worst(title, shown_S, _predicted(compared, samples, shown_S, base, own))
    if increase_N is None:
        return None
    shown_S = np.argsort(-increase_N, kind="stable")[:_NUM_SHOWN]
    shown_S = shown_S[increase_N[shown_S] > 0]
    words = [_numbers(compared, position, base, own, float(increase_N[position])) for position in shown_S.tolist()]
    return _Worst(f"The samples on which {compared.candidate} loses most", shown_S, words)


def _numbers(compared: Compared, position: int, base: int, own: int, increase: float) -> str:
    """Return `151, predicted 162.3 (pretrain: 161.9)` where one number is predicted, else how much the loss grew."""
    details = compared.comparison.details
    assert details is not None
    base_NT, own_NT = (details.models[number].numbers_NT for number in (base, own))
    targets_NT = details.targets_NT
    if targets_NT is None or base_NT is None or own_NT is None or not targets_NT.shape[1] == own_NT.shape[1] == 1:
        return f"loss +{increase:.3g}"
    target, before, now = (float(of[position, 0]) for of in (targets_NT, base_NT, own_NT))
    return f"{target:.5g}, predicted {now:.5g} ({compared.comparison.baseline}: {before:.5g})"


def _increase(compared: Compared, base: int, own: int) -> npt.NDArray[np.float32] | None:
    """Return by how much each sample's loss is larger than the baseline's, (N,)."""
    details = compared.comparison.details
    if details is None:
        return None
    base_N, own_N = (details.models[number].losses_N for number in (base, own))
    return None if base_N is None or own_N is None else own_N - base_N


def _predicted(
    compared: Compared, samples: PairedSamples, positions_S: npt.NDArray[np.int64], base: int, own: int
) -> list[str]:
    """Return `4, not 9` for each sample where classes are known: what was predicted, and the label."""
    details = compared.comparison.details
    own_N = None if details is None else details.models[own].classes_N
    if own_N is None or samples.labels_N is None:
        return [""] * len(positions_S)

    def name(number: int) -> str:
        return samples.class_names[number] if 0 <= number < len(samples.class_names) else str(number)

    pairs = zip(own_N[positions_S].tolist(), samples.labels_N[positions_S].tolist(), strict=True)
    return [f"{name(predicted)}, not {name(label)}" for predicted, label in pairs]


def _pictures(
    compared: Compared, run: RunFinished, load: Load, ids: Sequence[str], words: Sequence[str]
) -> list[Block]:
    """Return pictures or texts of the samples; a table of their ids where the data set has neither, or is gone."""
    rows = tuple(zip(ids, words, strict=True))
    listed = Table(("sample", "result"), rows) if any(words) else Table(("sample",), tuple((id_,) for id_ in ids))
    stage = next((stage for stage in run.stages if stage.stage_id == compared.data_stage), None)
    size = stage.outputs.get(compared.data_output, {}).get("size_bytes") if stage else None
    if not isinstance(size, int) or size > _MAX_DATA_BYTES:
        return [listed]
    try:
        data = load(compared.data_stage, compared.data_output)
        if not isinstance(data, Data):
            return [listed]
        split = _rows(data.splits[compared.comparison.split], ids)
        return _of_columns(data, split, ids, words) or [listed]
    except (PtpipeError, OSError) as error:  # files of the data set that are gone
        return [listed, Text(f"The samples themselves can't be shown: {error}")]


def _rows(split: Split, ids: Sequence[str]) -> Split:
    numbers = {name: number for number, name in enumerate(split.ids.tolist())}
    return split.subset(np.array([numbers[name] for name in ids], dtype=np.int64))


def _of_columns(data: Data, split: Split, ids: Sequence[str], words: Sequence[str]) -> list[Block]:
    all_S = np.arange(len(split))
    for name, info in data.info.inputs.items():
        if isinstance(info, ImageInfo):
            pixels_SHWC = split.inputs[name].take(all_S)
            captions = [f"{word} ({id_})" if word else id_ for word, id_ in zip(words, ids, strict=True)]
            images = (Image(_png(own), caption) for own, caption in zip(pixels_SHWC, captions, strict=True))
            return [ImageGrid(tuple(images))]
        if isinstance(info, TokensInfo) and (texts := _texts(data, split.inputs[name].take(all_S), info)):
            return [Table(("sample", "result", "text"), tuple(zip(ids, words, texts, strict=True)))]
    return []


def _png(pixels_HWC: npt.NDArray[Any]) -> bytes:
    from PIL import Image as PILImage

    is_grey = pixels_HWC.shape[-1] < 3
    image = PILImage.fromarray(np.ascontiguousarray(pixels_HWC[..., 0] if is_grey else pixels_HWC[..., :3]))
    image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX))
    if not is_grey:
        image = image.quantize(_NUM_COLORS)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _texts(data: Data, ids_SL: npt.NDArray[Any], info: TokensInfo) -> list[str]:
    """Return the texts of token ids; none where their tokenizer is not there."""
    content = data.assets.get("tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return []
    if content is None:
        return []
    tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    texts = [tokenizer.decode([number for number in row if number != info.padding_id]) for row in ids_SL.tolist()]
    return [text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..." for text in texts]
