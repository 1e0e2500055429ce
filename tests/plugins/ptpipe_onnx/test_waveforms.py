"""Networks of waveforms of any length, and of complex numbers, as ONNX files.

Shape legend: N waveforms, T samples, F frequencies, L frames.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ptpipe import StageError
from ptpipe_onnx import graph, torch_exporter
from ptpipe_onnx.export import build_graph
from ptpipe_torch import BATCH, FunctionRef, Model, OnnxFile, Recipe, Signature, TensorSpec, builder
from ptpipe_torch.runtime import seeded

from ...networks import Applied

WINDOW, LENGTH = torch.hann_window(64), "64*length"


def spectrum(x_NT: torch.Tensor) -> torch.Tensor:
    return torch.stft(x_NT, 64, 16, window=WINDOW, return_complex=True)


class Enhancer(nn.Module):
    """Multiplies the spectrum by a mask, and returns as many samples as it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.mask = nn.GRU(33, 16, batch_first=True), nn.Linear(16, 33)
        self.register_buffer("window", WINDOW.clone())

    def forward(self, waves_NT: torch.Tensor) -> torch.Tensor:
        spectrum_NFL = torch.stft(waves_NT, 64, 16, window=self.window, return_complex=True)
        states_NLS, _ = self.recurrent(torch.log1p(spectrum_NFL.abs()).transpose(1, 2))
        masked_NFL = spectrum_NFL * torch.sigmoid(self.mask(states_NLS)).transpose(1, 2)
        return torch.istft(masked_NFL, 64, 16, window=self.window, length=waves_NT.shape[-1])


@builder
def enhancer() -> nn.Module:
    return Enhancer()


def test_waveforms_of_any_length_are_enhanced(tmp_path: Path) -> None:
    signature = Signature(
        (TensorSpec("waves", "float32", (BATCH, LENGTH)),), (TensorSpec("enhanced", "float32", (BATCH, LENGTH)),)
    )
    with seeded(0):
        model = Model.from_module(Recipe(FunctionRef.to(enhancer), signature), enhancer())
    built = build_graph(model, opset=20).model
    graph.set_shapes(built.graph, signature)
    graph.write(built, tmp_path / "model.onnx")
    file = OnnxFile(tmp_path / "model.onnx", signature)
    with file.predictor(1) as predict, model.predictor(1) as expect:
        for shape in ((1, 64), (2, 1024), (3, 960), (1, 4096), (2, 8000)):
            inputs = {"waves": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
            np.testing.assert_allclose(predict(inputs)["enhanced"], expect(inputs)["enhanced"], atol=1e-5)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "real and imaginary parts": lambda x: torch.view_as_real(spectrum(x)),
    "one part after the other": lambda x: torch.cat([spectrum(x).real, spectrum(x).imag], 1),
    "normalized": lambda x: torch.stft(x, 64, 16, window=WINDOW, normalized=True, return_complex=True).abs(),
    "without padding": lambda x: torch.stft(x, 64, 16, window=WINDOW, center=False, return_complex=True).abs(),
    "inverse": lambda x: torch.istft(spectrum(x) * 0.5, 64, 16, window=WINDOW),
    "power": lambda x: (spectrum(x) * spectrum(x).conj()).real,
    "from a pair": lambda x: torch.view_as_complex(torch.stack([x, 2 * x], -1)).abs(),
    "from polar coordinates": lambda x: torch.view_as_real(torch.polar(x.abs(), x)),
    "of a frame": lambda x: torch.fft.rfft(x[:, :128]).abs(),
    "of a frame and back": lambda x: torch.fft.irfft(torch.fft.rfft(x[:, :128]) * 0.5),
}


@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, 1024) for name in FUNCTIONS), *((name, LENGTH) for name in FUNCTIONS if name != "inverse")],
)
def test_complex_numbers(name: str, length: int | str, run_onnx: Callable[..., np.ndarray]) -> None:
    network = Applied(FUNCTIONS[name]).eval()
    waves = [torch.randn(2, size, generator=torch.Generator().manual_seed(1)) for size in (1024, 1984)]
    sizes = zip(*(network(wave).shape[1:] for wave in waves), strict=True)
    shape = [f"size_{axis}" if length == LENGTH and len({*own}) > 1 else own[0] for axis, own in enumerate(sizes)]
    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, length)),), (TensorSpec("y", "float32", (BATCH, *shape)),)
    )
    content = ir.to_proto(torch_exporter.optimize(torch_exporter.export(network, signature, 20))).SerializeToString()
    for wave in waves if length == LENGTH else waves[:1]:
        expected = network(wave).numpy()
        np.testing.assert_allclose(run_onnx(content, wave.numpy()), expected, atol=2e-6 * np.abs(expected).max())


def test_what_has_no_form_for_complex_numbers_is_named() -> None:
    network = Applied(lambda x: torch.view_as_real(torch.exp(torch.complex(x, x)))).eval()
    signature = Signature((TensorSpec("x", "float32", (BATCH, 8)),), (TensorSpec("y", "float32", (BATCH, 8, 2)),))
    with pytest.raises(StageError, match=r"aten\.exp has no ONNX form for complex numbers \(.*Write it with other"):
        torch_exporter.export(network, signature, 20)
