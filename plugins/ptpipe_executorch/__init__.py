"""ExecuTorch programs: export.executorch. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptpipe import Context, Stage, hookimpl, stage
from ptpipe_executorch.config import ExecuTorchConfig
from ptpipe_executorch.model import ExecuTorchModel, missing_executorch
from ptpipe_torch import Data, Model
from ptpipe_torch.files import emptied_on_error

__all__ = ["ExecuTorchConfig", "ExecuTorchModel", "export_executorch", "ptpipe_stages"]


def _without_executorch(config: ExecuTorchConfig) -> Iterable[str]:
    message = missing_executorch()
    return [message] if message else []


@stage("export.executorch", packages=("torch", "executorch"), preflight=_without_executorch)
def export_executorch(config: ExecuTorchConfig, ctx: Context, model: Model, data: Data) -> ExecuTorchModel:
    """Export a float or int8 model to an ExecuTorch program for XNNPACK, and compare it with the torch model.

    Writes `model.pte`, for phones and other devices on ARM and x86. int8 weights are stored as int8, and int8 layers
    run as XNNPACK's integer kernels. The stage reports which layers XNNPACK computes in int8, which in float, and which
    are left to ExecuTorch's own kernels. It fails, with figures, if the outputs differ from torch's by more than
    rounding explains. `eval.*` stages and gates measure the result, by ExecuTorch's runtime, as any other model. Needs
    `ptpipe[executorch]`.
    """
    from ptpipe_executorch.export import export_model

    with emptied_on_error(ctx.scratch):
        return export_model(config, ctx, model, data)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the kinds of this plugin."""
    return [export_executorch]
