"""fp16 where each worker holds other gradients: real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from ptpipe_elastic.torch_elastic import run_workers


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
@pytest.mark.usefixtures("forked_workers")
def test_all_skip_the_step_in_which_one_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    run_workers("scaler_work", [str(tmp_path)], 2, tmp_path / "logs")
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    # Weight and scale after each step: the second is skipped and halves the scale, two good ones double it.
    assert first == [[0.5, 8.0], [0.5, 4.0], [0.0, 4.0], [-0.5, 8.0]]
    assert second == [[0.0, 8.0], [0.0, 4.0], [-1.0, 4.0], [-2.0, 8.0]]
