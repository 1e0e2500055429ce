"""Checks of `ptpipe doctor`: whether torch's quantized engines compute correctly on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ptpipe import Check
from ptpipe_quant.cpu import Backend, wants_reduced_range
from ptpipe_torch.int8.engine import PROBE_STEP, is_for_another_processor, probe_error, supported_engines


def run_checks() -> Iterator[Check]:
    """Run a small int8 convolution on every engine that torch supports."""
    supported = supported_engines()
    names: tuple[Backend, ...] = get_args(Backend)
    if not set(names) & set(supported):
        remedy = "install a build of torch with quantized engines: pip install --force-reinstall torch"
        yield Check.fail("int8 engines", "this build of torch has none for this machine", remedy)
        return
    for name in names:
        if name in supported:
            yield _run_engine(name)
        elif is_for_another_processor(name):
            yield Check.ok(f"int8 {name}", "for x86 processors alone")
        else:
            yield Check.warn(f"int8 {name}", "not supported by torch on this machine", "choose another `backend`")


def _run_engine(backend: Backend) -> Check:
    subject = f"int8 {backend}"
    remedy = "choose another `backend` in the manifest"
    try:
        error = probe_error(backend)
    except Exception as failure:  # noqa: BLE001  # an engine may raise anything
        return Check.fail(subject, f"listed, but fails: {str(failure).strip().partition(chr(10))[0]}", remedy)
    if error > PROBE_STEP / 2:
        return Check.fail(subject, f"a convolution is wrong by {error:g}; rounding explains {PROBE_STEP / 2:g}", remedy)
    is_reduced, reason = wants_reduced_range(backend)
    if is_reduced:
        return Check.warn(subject, f"a convolution runs; weights are reduced to 7 bits: {reason}")
    return Check.ok(subject, f"a convolution runs; activations have 8 bits: {reason}")
