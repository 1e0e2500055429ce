"""Processes that tests wait for."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; the system reaps one without a parent when it pleases."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
