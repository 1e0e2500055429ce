"""A data set of texts of one's own: is a line of Python, without its `#`, a comment or code? Its tokens are bytes.

Shape legend: N lines, V bytes of all lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from ptpipe import JSON, Context, StageConfig, StageError, stage
from ptpipe_torch import (
    ArrayColumn,
    Classification,
    Data,
    DatasetInfo,
    LoaderOptions,
    RaggedColumn,
    Split,
    TokensInfo,
)


class CommentsConfig(StageConfig):
    """Options of `data.comments`."""

    path: str = Field(description="folder of Python files")
    max_length: int = Field(default=80, ge=8, le=1000, description="bytes of a line; longer ones are cut off")
    batch_size: int = Field(default=64, ge=1, le=65536, description="lines per batch")


def as_bytes(texts: Sequence[str], max_length: int) -> RaggedColumn:
    """Return texts as ids: 1 to 256 are bytes, 0 is padding."""
    import numpy as np

    rows = [np.frombuffer(text.encode()[:max_length], np.uint8).astype(np.int64) + 1 for text in texts]
    offsets_N = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return RaggedColumn(np.concatenate(rows), offsets_N, padding=0)


def fingerprint(config: CommentsConfig) -> JSON:
    """Return the size and the time of the last change of every file."""
    files = sorted(Path(config.path).rglob("*.py"))
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


@stage("data.comments", packages=("numpy",), fingerprint=fingerprint)
def comments(config: CommentsConfig, ctx: Context) -> Data:
    """Read the lines of Python files: comments and as many lines of code."""
    import numpy as np

    files = sorted(Path(config.path).rglob("*.py"))
    lines = {line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    prose = sorted(line.lstrip("# ") for line in lines if line.startswith("# "))
    code = sorted(line for line in lines if line and "#" not in line)
    if len(prose) < 10 or len(code) < len(prose):
        raise StageError(f"{config.path} has too few comments: {len(prose)} in {len(files)} Python files")
    rng = np.random.default_rng(ctx.seed)
    texts = [*prose, *rng.choice(code, len(prose), replace=False).tolist()]
    every = Split(
        np.array([f"line/{number:06}" for number in range(len(texts))]),
        {"tokens": as_bytes(texts, config.max_length)},
        {"labels": ArrayColumn(np.repeat([0, 1], len(prose)))},
    )
    order_N = rng.permutation(len(texts))
    bounds = [round(part * len(texts)) for part in (0, 0.7, 0.8, 1)]
    parts = zip(("train", "val", "test"), bounds, bounds[1:], strict=False)
    splits = {name: every.subset(order_N[start:stop]) for name, start, stop in parts}
    splits["calibration"] = splits["train"].subset(np.arange(min(256, bounds[1])))
    tokens = TokensInfo(vocabulary_size=257, max_length=config.max_length)
    info = DatasetInfo("comments", {"tokens": tokens}, Classification(class_names=("comment", "code")))
    return Data(info, splits, LoaderOptions(config.batch_size, batch_by_length=True))
