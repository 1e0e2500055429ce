"""Files that make integers of floats, as transformers with buckets of distances do.

Shape legend: N texts, L tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ptpipe import Context
from ptpipe_onnx import ExportConfig, export_onnx, quantize_onnx
from ptpipe_torch import Data, FunctionRef, Model, Recipe, builder

from .test_post_training import Run


class Buckets(nn.Module):
    """What is added to a score of attention is looked up by the logarithm of the distance, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.distances = nn.Embedding(40, 16), nn.Embedding(8, 1)
        self.parts, self.head = nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, tokens_NL: torch.Tensor) -> torch.Tensor:
        query, key, value = self.parts(self.tokens(tokens_NL)).chunk(3, -1)
        places_L = torch.arange(tokens_NL.shape[1])
        distance_LL = (places_L[:, None] - places_L).abs()
        far_LL = 2 + (torch.log(distance_LL.float() / 2) / math.log(10) * 5).long()
        bucket_LL = torch.where(distance_LL < 2, distance_LL, far_LL)
        scores_NLL = query @ key.transpose(1, 2) + 4 * self.distances(bucket_LL).squeeze(-1)
        return self.head((scores_NLL.softmax(-1) @ value).mean(1))


@builder
def buckets() -> nn.Module:
    torch.manual_seed(0)
    return Buckets()


def test_buckets_of_distances(words: Data, run_stage: Run, tmp_path: Path) -> None:
    model = Model.from_module(Recipe(FunctionRef.to(buckets), words.info.signature), buckets())
    folder = tmp_path / "float"
    folder.mkdir()
    ctx = Context("onnx", "export.onnx", 7, folder)
    file = export_onnx(ExportConfig(num_samples=8), ctx, model, words)
    quantized = run_stage(quantize_onnx, file, words)
    tokens_NL = np.random.default_rng(0).integers(1, 40, (50, 20))
    with file.predictor() as predict, quantized.predictor() as predict_quantized:
        expected, found = (of({"tokens": tokens_NL})["logits"] for of in (predict, predict_quantized))
    assert np.square(found - expected).mean() < 0.01 * expected.var()
