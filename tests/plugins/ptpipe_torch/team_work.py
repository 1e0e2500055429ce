"""What each of some workers does in a test of teams: `python -m team_work FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ptpipe import Context
from ptpipe_torch.team import joined_team


def main(folder: Path) -> None:
    rank, num = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    said = {}
    for stage_id in ("one", "two"):  # a process may do several stages
        ctx = Context(stage_id, "toy.work", 1, folder, rank=rank, num_workers=num)
        with joined_team(ctx, "gloo", timeout_s=60) as team:
            said[stage_id] = {
                "team": [team.rank, team.size],
                "sum": team.sum([0.1 * (rank + 1), 2.0**53, float(rank)]),
                "gather": team.gather([float(rank), 0.1]),
                "agrees on equal": team.agrees_on(bytes(range(32))),
                "agrees on unequal": team.agrees_on(bytes([*range(31), rank])),
                "share": list(range(7))[team.share(7)],
            }
    (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
