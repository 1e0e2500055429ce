"""Whether torch will find a CUDA device, found out without importing torch: keys of stages depend on it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*= *['\"]", re.MULTILINE)
_DEVICES = {"cuda": ("dev/nvidia[0-9]*", "dev/dxg", "proc/driver/nvidia/gpus/*"), "hip": ("dev/kfd",)}
_HIDING = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}


def finds_cuda_device(
    *, environment: Mapping[str, str] = os.environ, root: Path = Path("/"), torch_folder: Path | None = None
) -> bool:
    """Return whether this build of torch can use a GPU, there is one with a driver, and the environment hides none.

    What torch itself finds decides in the preflight: where the two differ, `device: auto` is refused.

    Args:
        environment: has CUDA_VISIBLE_DEVICES, where it is set.
        root: of the file system.
        torch_folder: of the package torch; None: the installed one.
    """
    spec = find_spec("torch") if torch_folder is None else None
    folder = Path(spec.origin).parent if spec is not None and spec.origin else torch_folder
    try:
        build = _BUILD.search((folder / "version.py").read_text(encoding="utf-8")) if folder else None
    except OSError:
        return False
    if build is None:
        return False
    for name in _HIDING[build[1]]:
        # The list ends at its first invalid entry (CUDA C Programming Guide, "CUDA Environment Variables").
        if environment.get(name, "0").partition(",")[0].strip() in ("", "-1", "NoDevFiles"):
            return False
    return any(next(root.glob(pattern), None) is not None for pattern in _DEVICES[build[1]])
