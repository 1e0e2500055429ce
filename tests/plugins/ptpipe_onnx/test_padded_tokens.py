"""Files of networks of token ids and their mask, as `tokens` of data.arrays loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ptpipe import Context
from ptpipe_data import load_arrays
from ptpipe_data.config import ArraysConfig
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.runtime import seeded

from ...texts import quantized

LENGTHS = np.arange(40) % 6 + 2


class Pooled(nn.Module):
    """The mean of the tokens that the mask shows, each weighed by its attention to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.query, self.out = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        x_BLD, shown_BL1 = self.embedding(ids_BL), (mask_BL != 0).unsqueeze(2)
        scores_BL1 = self.query(x_BLD).mean(2, keepdim=True).masked_fill(~shown_BL1, -torch.inf)
        logits: torch.Tensor = self.out((scores_BL1.softmax(1) * x_BLD).sum(1))
        return logits


@builder
def pooled() -> nn.Module:
    return Pooled()


@pytest.mark.parametrize("path", ["float", "static"])
def test_padding_changes_nothing_at_any_length(path: str, run_export: Callable[..., OnnxFile], tmp_path: Path) -> None:
    is_token_NL = np.arange(9) < LENGTHS[:, None]
    ids_NL = np.random.default_rng(0).integers(2, 50, (40, 9)) * is_token_NL
    np.savez(tmp_path / "texts.npz", ids=ids_NL, mask=is_token_NL.astype(np.int64), label=np.arange(40) % 2)
    given = {
        "path": str(tmp_path / "texts.npz"), "inputs": ("ids", "mask"), "target": "label", "task": "classification",
        "tokens": {"ids": {}, "mask": {}},
    }  # fmt: skip
    ctx = Context("texts", "data.test", 7, tmp_path)
    data = load_arrays(ArraysConfig.model_validate(given), ctx)
    signature = Signature(data.info.signature.inputs, (TensorSpec("logits", "float32", (BATCH, 2)),))
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(pooled), signature), Pooled())
    if path == "static":
        model = quantized(model, data, ctx, "fbgemm", path)
    file = run_export(model, data, num_samples=8)
    shapes = [value.type.tensor_type.shape.dim for value in onnx.load(file.path).graph.input]
    assert [[axis.dim_param for axis in shape] for shape in shapes] == [["batch", "length"]] * 2
    with file.with_exact_sums().predictor(1) as predict:
        for row, length in enumerate(LENGTHS[:6]):
            found = []
            for size in (length, 9, 14):
                ids_1L = np.zeros((1, size), np.int64)
                ids_1L[0, :length] = ids_NL[row, :length]
                found.append(predict({"ids": ids_1L, "mask": (np.arange(size) < length)[None].astype(np.int64)}))
            for padded in found[1:]:
                np.testing.assert_allclose(padded["logits"], found[0]["logits"], atol=1e-5)
