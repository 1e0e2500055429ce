"""What int8 kernels can do on the processor that runs the tests."""

from __future__ import annotations

import pytest

from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_torch.model.exact_session import may_saturate


def reduced(backend: str) -> bool:
    """Return the option `reduce_range` with which a backend's sums don't saturate here: False with VNNI."""
    return wants_reduced_range(backend)[0]  # type: ignore[arg-type]  # a name from the backends that torch has


needs_vnni = pytest.mark.skipif(may_saturate(), reason="sums of 8-bit products saturate on this processor")
