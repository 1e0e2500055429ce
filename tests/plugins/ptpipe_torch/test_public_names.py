from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pluggy
import pytest

import ptpipe_torch
from ptpipe import hookimpl, hookspecs
from ptpipe_torch import runtime


def test_public_names_are_sorted_and_exist() -> None:
    assert ptpipe_torch.__all__ == sorted(set(ptpipe_torch.__all__))
    for name in ptpipe_torch.__all__:
        assert getattr(ptpipe_torch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ptpipe_torch.nothing


def test_importing_it_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from ptpipe_torch import SINGLE_WORKER, WorkerGroup, init_worker_group, torch_threads\n"
        "print([name for name in ('torch', 'numpy', 'torchvision', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Cycle:
    """An object that only the garbage collector frees, as a traced network is."""

    def __init__(self) -> None:
        # Not a tensor: malloc may give it memory that is resident already, and then the process does not grow.
        self.itself, self.weights = self, mmap.mmap(-1, 100 << 20)
        self.weights.write(b"1" * (100 << 20))


class Launcher:
    """Runs a stage that leaves 100 MB of garbage."""

    def __init__(self) -> None:
        self.garbage: weakref.ref[Cycle] | None = None

    @hookimpl
    def ptpipe_launch(self, call: Any, tell: Callable[..., None]) -> Mapping[str, Any]:
        self.garbage = weakref.ref(Cycle())
        return {"model": call}


def test_a_stages_garbage_is_freed_when_it_has_ended() -> None:
    manager, launcher = pluggy.PluginManager("ptpipe"), Launcher()
    manager.add_hookspecs(hookspecs)
    manager.register(launcher)
    manager.register(ptpipe_torch)
    gc.disable()
    runtime._return_free_memory()  # what earlier tests left on the heap: returned later, it would hide the growth
    try:
        assert manager.hook.ptpipe_launch(call="a model", tell=print) == {"model": "a model"}
        assert launcher.garbage is not None and launcher.garbage() is None
    finally:
        gc.enable()
