"""PyTorch profiler: a trace of some steps, and a table of their most expensive operators."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ptpipe import Context

_WARM_UP_STEPS = 3
_NUM_ROWS = 30


class StepProfile:
    """Profiles a few steps of this process, after some warm-up steps, and attaches the files to the run."""

    def __init__(self, ctx: Context, num_steps: int, device: torch.device) -> None:
        self._ctx, self._device = ctx, device
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler's library prints to the terminal
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profiler.start()

    def step_done(self) -> None:
        """Count a step."""
        self._profiler.step()

    def stop(self) -> None:
        """Write what was recorded, where the training ended before the last step to profile."""
        self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        folder = self._ctx.scratch / "profile"
        folder.mkdir(exist_ok=True)
        trace, table = folder / "trace.json", folder / "operators.txt"
        profiler.export_chrome_trace(str(trace))
        device = "cuda" if self._device.type == "cuda" else "cpu"
        rows = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=_NUM_ROWS)
        table.write_text(rows, encoding="utf-8")
        self._ctx.attach(trace)
        self._ctx.attach(table)
