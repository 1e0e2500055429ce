"""Float files to quantize: of digits, and of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ptpipe import Context, Stage
from ptpipe.events import LogLine
from ptpipe_onnx import ExportConfig, export_onnx, quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig, WeightOnlyConfig
from ptpipe_torch import Data, OnnxFile

from ....texts import network_of, text_data, trained
from ..conftest import Exported, RecordedEvents

_CONFIGS = {"quant.onnx": QuantizeOnnxConfig, "quant.weight_only": WeightOnlyConfig}


@pytest.fixture(scope="session")
def float_file(exported: Callable[..., Exported]) -> OnnxFile:
    """The `cnn` of digits."""
    return exported("cnn").file


@pytest.fixture(scope="session")
def words() -> Data:
    return text_data(max_length=20)


@pytest.fixture(scope="session")
def transformer_file(words: Data, tmp_path_factory) -> OnnxFile:
    folder = tmp_path_factory.mktemp("transformer")
    model = trained(network_of("transformer", words, Context("net", "model.test", 7, folder), num_layers=2), words)
    return export_onnx(ExportConfig(num_samples=8), Context("onnx", "export.onnx", 7, folder), model, words)


@pytest.fixture
def run_stage(tmp_path: Path, events: RecordedEvents) -> Callable[..., OnnxFile]:
    """Run `quant.onnx` or `quant.weight_only`: `run_stage(stage, file, data, **options)`."""

    def run(stage: Stage[..., OnnxFile], file: OnnxFile, data: Data, **options: Any) -> OnnxFile:
        assert stage in (quantize_onnx, quantize_weights)
        config = _CONFIGS[stage.kind].model_validate(options)
        events.clear()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return stage(config, Context("quantized", stage.kind, 7, folder, _tell=events.append), file, data)

    return run


@pytest.fixture
def log(events: RecordedEvents) -> Callable[[], str]:
    return lambda: "\n".join(event.text for event in events if isinstance(event, LogLine))
