"""Trials as tasks of a Ray cluster, or of a Ray started for the sweep on this machine.

Ray reruns a task whose worker was lost. Its process on that node ends with the worker, and the store and the checkpoint
have what it had done: all nodes must share the artifacts folder, and have the same software and data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ptpipe import Terminated, UsageError
from ptpipe_sweep.processes import MAX_RETRIES, NOT_BEGUN, run_trial
from ptpipe_sweep.worker import Request

LOCAL = "local"
_STOP_S = 90.0
_WAIT_S = 0.2


def _task(text: str, threads: int) -> str:
    return json.dumps(run_trial(Request(**json.loads(text)), threads))


@contextmanager
def connected(address: str, num_workers: int, threads: int) -> Iterator[Callable[..., None]]:
    """Connect to a cluster inside the `with`, and yield `run_trials`; raises UsageError where that fails.

    `address`: a cluster's; `local` starts one on this machine.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'ptpipe[ray]'") from error
    here = {"num_cpus": num_workers * threads, "include_dashboard": False}
    try:
        where: dict[str, Any] = here if address == LOCAL else {"address": address}
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: {str(error).strip().partition(chr(10))[0]}") from error
    try:
        yield run_trials
    finally:
        ray.shutdown()


def run_trials(
    requests: Sequence[Request], num_workers: int, threads: int, ended: Callable[[Request, Mapping[str, Any]], None]
) -> None:
    """Run trials as tasks, each with its threads as CPUs; the cluster decides how many at a time.

    `num_workers` is not used. As `processes.run_trials` otherwise.
    """
    import ray

    task = ray.remote(num_cpus=threads, max_retries=MAX_RETRIES)(_task)
    running = {task.remote(json.dumps(asdict(request)), threads): request for request in requests}
    try:
        while running:
            for reference in ray.wait([*running], timeout=_WAIT_S)[0]:  # Ctrl-C does not end a longer wait
                request = running.pop(reference)
                ended(request, _result(reference))
    except (KeyboardInterrupt, Terminated):
        _stop(running, ended)
        raise


def _stop(running: Mapping[Any, Request], ended: Callable[[Request, Mapping[str, Any]], None]) -> None:
    """Interrupt the trials that run, and report their ends; those that wait end before they begin."""
    import ray

    # Not `ray.cancel`, after which the task counts as done at once, and its trial is killed and not interrupted.
    stop_files = {request.stop_file for request in running.values()}
    for path in stop_files:
        path.touch()
    done, _ = ray.wait([*running], num_returns=len(running), timeout=_STOP_S) if running else ([], [])
    for reference in done:
        if (result := _result(reference)) != NOT_BEGUN:
            ended(running[reference], result)
    for path in stop_files:
        path.unlink()


def _result(reference: Any) -> dict[str, Any]:
    import ray

    try:
        found: dict[str, Any] = json.loads(ray.get(reference))
    except ray.exceptions.RayError as error:
        first = str(error).strip().partition("\n")[0]
        return {"exit_code": 1, "message": f"Ray lost the trial: {first}"}
    return found
