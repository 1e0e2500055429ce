"""Signatures of networks that classify pictures, and calls of their predictors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ptpipe_torch import BATCH, Predictor, Signature, TensorSpec


def pictures(shape_CHW: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The inputs of such a network."""
    return (TensorSpec("images", "float32", (BATCH, *shape_CHW)),)


def stored_pictures(shape_CHW: Sequence[int]) -> list[dict[str, Any]]:
    """The same, as arguments of a stored transform."""
    return [spec.to_json() for spec in pictures(shape_CHW)]


def classifier(shape_CHW: Sequence[int], num_classes: int) -> Signature:
    return Signature(pictures(shape_CHW), (TensorSpec("logits", "float32", (BATCH, num_classes)),))


def logits_from(predict: Predictor, images_NCHW: Any) -> Any:
    return predict({"images": images_NCHW})["logits"]
