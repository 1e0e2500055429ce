"""`compile: true`: forward and backward pass compiled by torch.compile, by a C++ compiler on a CPU.

Each shape of a batch is compiled for itself (`dynamic=False`): kernels for any size would round differently, and a
resumed training may meet the shapes in another order. Dropout draws the numbers that it draws uncompiled
(`fallback_random`). Nothing that was compiled before is used: torch's cache is pickles, in a folder under /tmp.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptpipe import StageError
from ptpipe_torch import RangeObserver
from ptpipe_torch.errors import first_line
from ptpipe_torch.runtime import environment_variables, loggers_limited

if TYPE_CHECKING:
    from ptpipe_train.config import Device

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_OPTIONS: dict[str, Any] = {
    "compile_threads": 1,
    "fallback_random": True,
    "fx_graph_cache": False,
    "cpp_cache_precompile_headers": False,  # they would lie in a folder that other runs use
}
"""Of TorchInductor. One thread: others are processes, which would outlive the training."""
_TOOLKIT_LOGGER = "torch.utils.cpp_extension"
"""Torch 2.15 warns by it of a CUDA toolkit where no device is visible, when it compiles for a CPU, too."""


def find_missing_compiler(device: Device) -> Iterator[str]:
    """Yield a line for each thing that torch.compile needs for the device and this machine doesn't have."""
    named = os.environ.get("CXX")
    compiler = named or ("clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(compiler):
        which = "as CXX says" if named else "CXX can name another one"
        yield f"compile: there is no C++ compiler {compiler} here ({which}); install one or leave compile out"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "compile: Python's header files (Python.h, python3-dev) are not installed here; leave compile out"
    if device != "cpu" and torch.cuda.is_available() and find_spec("triton") is None:
        yield "compile: triton, which compiles for CUDA devices, is not installed here; leave compile out"


def compiled(module: nn.Module) -> Any:
    """Return a compiled wrapper of a network, whose layers and state dict stay as they are.

    Raises StageError for fake quantization.
    """
    if any(isinstance(layer, RangeObserver) for layer in module.modules()):
        raise StageError(
            "compile: fake quantization reads ranges back in each forward pass, where a compiled one would break off; "
            "compile the training of the float model alone"
        )
    return torch.compile(module, dynamic=False, options=_OPTIONS)


@contextmanager
def compiler_session() -> Iterator[None]:
    """Compile inside the `with` into a temporary folder of this process; afterwards nothing compiled is left.

    Raises StageError where the compiler fails.
    """
    with (
        TemporaryDirectory(prefix="ptpipe-compile-", ignore_cleanup_errors=True) as folder,
        environment_variables(dict.fromkeys(_CACHE_VARIABLES, folder)),
        warnings.catch_warnings(),
        loggers_limited([_TOOLKIT_LOGGER]),
    ):
        # TF32 is less exact than the fp32 that was asked for.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        _import_compiler()
        from torch._dynamo import config, reset
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            # A training has fewer shapes than the limit. By default the rest would run uncompiled, after a warning.
            with config.patch(fail_on_recompile_limit_hit=True):
                yield
        except FailOnRecompileLimitHit as error:
            raise StageError(
                f"compile: the forward pass was compiled {config.recompile_limit} times, because something in the "
                "network differs from step to step: leave compile out"
            ) from error
        except TorchDynamoException as error:
            raise StageError(f"compile: torch.compile failed ({first_line(error)}): leave compile out") from error
        finally:
            reset()


def _import_compiler() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its modules use what torch has deprecated
        import_module("torch._inductor.compile_fx")
