"""Take a network along the ways that a manifest can take it, and check every form that it has on the way.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptpipe import StageError
from ptpipe.testing import Bench
from ptpipe_onnx import export_onnx
from ptpipe_quant import calibrate, convert, dynamic, prepare, prepare_qat
from ptpipe_quant.transforms import FOLDED
from ptpipe_torch import Model
from ptpipe_torch.int8.engine import quantized_engine
from ptpipe_torch.runtime import seeded
from ptpipe_train import train

from ..signatures import logits_from
from . import oracle
from .networks import NUM_BYTES, Network, decode
from .onnx_unrounded import run_file, unrounded_logits


class Refused(Exception):  # a right outcome
    """A stage refused the network with a clear line, before any training."""


@dataclass(frozen=True)
class Scheme:
    """How a network is quantized."""

    path: str
    """float, static, dynamic or qat."""
    backend: str = "fbgemm"
    observer: str = "min_max"
    weights: str = "per_channel"
    batch_norm: str = "fold"
    freeze_at: float = 0.75
    channels_last: bool = True
    exported: bool = True


def drawn(*paths: str, exported: bool | None) -> st.SearchStrategy[tuple[Network, Scheme]]:
    """Draw a network and how to quantize it on one of these paths. `exported`: whether to ONNX; None: every third."""

    def choose(content: bytes) -> tuple[Network, Scheme]:
        numbers = iter(content)

        def one_of(*options: Any) -> Any:
            return options[next(numbers) % len(options)]

        scheme = Scheme(
            path=one_of(*paths),
            backend=one_of(*["fbgemm", "qnnpack"] * 4, "x86", "onednn"),
            observer=one_of("min_max", "mse", "moving_average"),
            weights=one_of("per_channel", "per_channel", "per_channel", "per_tensor"),
            batch_norm=one_of("fold", "train"),
            freeze_at=one_of(0.75, 0.0, 0.5, 1.0),
            channels_last=one_of(True, False),
            exported=one_of(True, False, False) if exported is None else bool(one_of(exported)),
        )
        return decode(numbers), scheme

    num_bytes = 8 + NUM_BYTES
    return st.binary(min_size=num_bytes, max_size=num_bytes).map(choose)


class Trip:
    """One network on its way along one path."""

    def __init__(self, network: Network, scheme: Scheme, bench: Bench) -> None:
        self.scheme, self.bench = scheme, bench
        self.model, self.data = network.model(), network.data()
        if scheme.path == "qat":
            network.check_trains()
        order_N = np.arange(24)
        (batch,) = self.data.batches("calibration", order_N=order_N, batch_size=24)
        self.images_NCHW = batch.inputs["images"].contiguous()

    def travel(self) -> None:
        """Raise Refused, or what goes wrong."""
        with seeded(0):
            getattr(self, f"_{self.scheme.path}")()

    def _quantizing(self, stage: Any, **options: Any) -> Model:
        common = {"backend": self.scheme.backend, "weights": self.scheme.weights}
        try:
            prepared: Model = self.bench.run(stage, {**common, **options}, model=self.model)
        except StageError as error:
            raise Refused(str(error)) from error
        return prepared

    def _float_logits(self, module: nn.Module) -> torch.Tensor:
        return oracle.run(module, self.images_NCHW)

    def _float(self) -> None:
        self._export(self.model, self._float_logits(self.model.build()))

    def _static(self) -> None:
        float_NK = self._float_logits(self.model.build())
        prepared = self._quantizing(prepare, observer=self.scheme.observer)
        found_NK = self._float_logits(oracle.unobserved(prepared.build_prepared()))
        oracle.assert_close(found_NK, float_NK, "the prepared network against the user's")
        calibrated = self.bench.run(calibrate, {}, model=prepared, data=self.data).model
        by_batch = any(getattr(layer, "running_mean", 0) is None for layer in self.model.build().modules())
        # A batch norm without running statistics normalizes the batches of the calibration to other values.
        self._int8(calibrated, self.model.build(), saturates=by_batch or self.scheme.observer != "min_max")

    def _qat(self) -> None:
        options = {"batch_norm": self.scheme.batch_norm, "freeze_at": self.scheme.freeze_at}
        prepared = self._quantizing(prepare_qat, **options)
        found_NK = self._float_logits(oracle.unobserved(prepared.build_prepared()))
        oracle.assert_close(found_NK, self._float_logits(self.model.build()), "the prepared network against the user's")
        self._compare_in_training(prepared)
        if self.scheme.freeze_at == 0:  # nothing would be observed
            prepared = self.bench.run(calibrate, {}, model=prepared, data=self.data).model
        training = {"epochs": 1, "batch_size": 8, "lr": 0.003, "precision": "fp32", "device": "cpu", "num_threads": 1,
                    "memory_format": "auto" if self.scheme.channels_last else "contiguous"}  # fmt: skip
        trained = self.bench.run(train, training, model=prepared, data=self.data)
        self._int8(trained, oracle.unobserved(trained.build_prepared()), saturates=True)

    def _compare_in_training(self, prepared: Model) -> None:
        """In training mode too, with gradients; where batch norms are folded only in a network without them.

        Those behind transposed convolutions always are.
        """
        network, own = oracle.unobserved(prepared.build_prepared()).train(), self.model.build().train()
        has_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in own.modules())
        if (self.scheme.batch_norm == "fold" and has_norm) or network.meta[FOLDED]:
            return
        try:
            expected_NK, expected_gradient = _trained_step(own, self.images_NCHW)
        except RuntimeError:  # it changes its images in place, which have a gradient here alone
            return
        found_NK, gradient = _trained_step(network, self.images_NCHW)
        oracle.assert_close(found_NK, expected_NK, "the prepared network in training mode against the user's")
        oracle.assert_close(gradient, expected_gradient, "the gradient of the images")

    def _dynamic(self) -> None:
        int8 = self._quantizing(dynamic)
        with quantized_engine(self.scheme.backend):
            oracle.check_dynamic(int8, self.model, self.images_NCHW)
            expected_NK = oracle.run(oracle.without_dynamic_rounding(int8.build()), self.images_NCHW)
        self._export(int8, expected_NK)

    def _int8(self, prepared: Model, network: nn.Module, *, saturates: bool) -> None:
        """Check the int8 form of a prepared model, and its file. `network`: the float one, consumed."""
        int8 = self.bench.run(convert, {}, model=prepared)
        oracle.use_stored_weights(network, int8)
        float_NK = self._float_logits(network)
        expected_NK = oracle.check_int8(int8, self.images_NCHW, float_NK, saturates=saturates)
        with int8.predictor() as predict:
            assert np.isfinite(logits_from(predict, self.images_NCHW.numpy().copy())).all()
        self._export(int8, expected_NK)

    def _export(self, model: Model, expected_NK: torch.Tensor) -> None:
        if not self.scheme.exported:
            return
        file = self.bench.run(export_onnx, {"num_samples": 12}, model=model, data=self.data)
        images_NCHW = self.images_NCHW.numpy().copy()
        found_NK, still_rounds = unrounded_logits(file.path, images_NCHW)
        oracle.assert_close(
            torch.from_numpy(found_NK),
            expected_NK,
            "the ONNX file, unrounded, against torch's network",
            tolerance=oracle.BOUND_TOLERANCE if still_rounds else oracle.FLOAT_TOLERANCE,
        )
        assert np.isfinite(run_file(str(file.path), images_NCHW)).all()


class _DrawnInOrder(TorchDispatchMode):
    """Draws dropout's masks in the order of axes: torch draws them in that of memory, which is left to a network."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            mask, keep = args
            return mask.copy_(torch.empty(mask.shape, dtype=mask.dtype).bernoulli_(keep))
        return func(*args, **(kwargs or {}))


def _trained_step(module: nn.Module, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    images_NCHW = images_NCHW.clone().requires_grad_()
    with seeded(1), _DrawnInOrder():
        logits_NK = module(images_NCHW)
    weights_NK = torch.linspace(-1, 1, logits_NK.numel()).reshape(logits_NK.shape)
    (gradient,) = torch.autograd.grad((logits_NK * weights_NK).sum(), images_NCHW)
    return logits_NK.detach(), gradient
