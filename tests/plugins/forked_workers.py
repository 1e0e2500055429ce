"""Fork the workers of a stage from a process that has imported torch, which would take each of them seconds.

torch elastic still starts, watches and ends them, and they execute what workers execute. How real ones start, and what
becomes of them, is tested in `ptpipe_elastic` and in `ptpipe_train/test_parallel_killed.py`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptpipe_elastic import bootstrap, torch_elastic

_IMPORTED = [
    *("ptpipe_train.parallel.ddp", "ptpipe_train.parallel.fsdp", "ptpipe_train.parallel.pp", "ptpipe_train.supervised"),
    *("ptpipe_quant.stages", "ptpipe_data", "ptpipe_elastic.worker", "ptpipe_elastic.bootstrap"),
]


class _Ended(BaseException):
    """Ends a worker that is done; torch elastic's function for a forked process must return."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork all workers that this process starts. The process that they are forked from ends with the block."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    try:
        with patch.object(torch_elastic, "elastic_launch", _launch):
            yield
    finally:
        _forkserver._stop()  # type: ignore[attr-defined]


def _launch(config: LaunchConfig, _executable: str) -> Callable[..., Any]:
    def run(*command: str) -> Any:
        _, _, _, store_url, folder, module, *arguments = command
        launched = elastic_launch(replace(config, start_method="forkserver"), start)
        return launched(dict(os.environ), store_url, folder, module, arguments)

    return run


def start(environment: Mapping[str, str], store_url: str, folder: str, module: str, arguments: list[str]) -> None:
    """Be one worker, in a forked process."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with patch.object(bootstrap, "exit_now", _exit):
        try:
            bootstrap._start(os.getppid(), store_url, Path(folder), module, arguments)
        except _Ended:
            return


def _exit(code: int) -> NoReturn:
    if code:
        os._exit(code)
    raise _Ended
