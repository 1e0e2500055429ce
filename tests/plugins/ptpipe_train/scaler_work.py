"""One of two workers in a test of the gradient scaler: `python -m scaler_work FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ptpipe import Context
from ptpipe_torch.distributed.worker_group import init_worker_group


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.5)
    history = []
    with init_worker_group(Context("one", "toy.work", 1, folder, rank=rank, num_workers=2), "gloo", timeout_s=60):
        scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, process_group=dist.group.WORLD)
        for step in range(4):
            # Each rank has other gradients, as in fsdp and pp; in step 1 those of rank 1 overflow.
            scaler.scale(weight.sum() * (rank + 1)).backward()
            if step == 1 and rank == 1:
                weight.grad[2] = torch.inf
            if step == 3:
                scaler.unscale_(optimizer)  # as before clipping
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append([weight[0].item(), scaler.get_scale()])
    (folder / f"rank-{rank}.json").write_text(json.dumps(history), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
