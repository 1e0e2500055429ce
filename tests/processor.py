"""What kernels can do where the tests run: on this processor, in these versions of torch and ONNX Runtime."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_torch.int8.engine import supported_engines
from ptpipe_torch.model.exact_session import may_saturate
from ptpipe_torch.ort import ort

ONNX_RUNTIME = Version(ort.__version__)


def reduced(backend: str) -> bool:
    """Return the option `reduce_range` with which a backend's sums don't saturate here: False with VNNI."""
    return wants_reduced_range(backend)[0]  # type: ignore[arg-type]  # a name from the backends that torch has


needs_vnni = pytest.mark.skipif(may_saturate(), reason="sums of 8-bit products saturate on this processor")

is_fbgemm_right = Version(torch.__version__) < Version("2.12")
"""Whether fbgemm's transposed convolutions of 2x2 are right: in torch 2.11 they are, in 2.13 not."""

needs_fbgemm_fault = pytest.mark.skipif(
    "fbgemm" not in supported_engines() or is_fbgemm_right, reason="there is no fbgemm, or one without the fault"
)
