"""Fork the workers of a stage: see `forks.py`.

torch elastic still starts, watches and ends them, and they execute what workers execute. How real ones start, and what
becomes of them, is tested in `ptpipe_elastic` and in `ptpipe_train/test_parallel_killed.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ptpipe_elastic import bootstrap, torch_elastic


class _Ended(BaseException):
    """Ends a worker that is done; torch elastic's function for a forked process must return."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork all workers that this process starts inside the `with`."""
    with patch.object(torch_elastic, "elastic_launch", _launch):
        yield


def _launch(config: LaunchConfig, _executable: str) -> Callable[..., Any]:
    def run(*command: str) -> Any:
        own_arguments = command[command.index(torch_elastic._BOOTSTRAP) + 1 :]
        _, store_url, folder, module, *arguments = own_arguments
        launched = elastic_launch(replace(config, start_method="forkserver"), start)
        return launched(dict(os.environ), store_url, folder, module, arguments)

    return run


def start(environment: Mapping[str, str], store_url: str, folder: str, module: str, arguments: list[str]) -> None:
    """Be one worker, in a forked process."""
    os.environ.update(environment)
    np.random.seed()  # another one than the other ranks', as in processes of their own
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
