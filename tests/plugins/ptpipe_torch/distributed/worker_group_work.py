"""What each of some workers does in a test of worker groups: `python -m worker_group_work FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ptpipe import Context
from ptpipe_torch.distributed.worker_group import init_worker_group


def main(folder: Path) -> None:
    rank, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for stage_id in ("one", "two"):  # a process may do several stages
        ctx = Context(stage_id, "toy.work", 1, folder, rank=rank, num_workers=num)
        with init_worker_group(ctx, "gloo", timeout_s=60) as workers:
            results[stage_id] = {
                "rank and size": [workers.rank, workers.size],
                "sum": workers.all_reduce([0.1 * (rank + 1), 2.0**53, float(rank)]),
                "gather": workers.all_gather([float(rank), 0.1]),
                "agrees on equal": workers.all_equal(bytes(range(32))),
                "agrees on unequal": workers.all_equal(bytes([*range(31), rank])),
                "slice": list(range(7))[workers.rank_slice(7)],
            }
    (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
