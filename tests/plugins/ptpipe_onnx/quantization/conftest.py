"""Float files to quantize: of digits, and of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ptpipe import Context, Stage
from ptpipe.events import LogLine
from ptpipe_onnx import ExportConfig, export_onnx, quantize_onnx, quantize_weights
from ptpipe_onnx.quantization.config import QuantizeOnnxConfig, WeightOnlyConfig
from ptpipe_torch import Data, OnnxFile, TensorSpec, Unlabeled

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


@pytest.fixture(scope="session")
def unlabeled(digits: Data) -> Data:
    """The digits, for files of any outputs."""
    splits = {name: replace(split, targets={}) for name, split in digits.splits.items()}
    return Data(replace(digits.info, task=Unlabeled()), splits)


@pytest.fixture
def file_of(float_file: OnnxFile, tmp_path: Path) -> Callable[..., OnnxFile]:
    """Write a file for digits: `file_of(nodes, arrays)`, of one output, `logits`, or also `features` of a shape."""

    def write(
        nodes: Sequence[NodeProto],
        arrays: Mapping[str, np.ndarray],
        features: tuple[int, ...] | None = None,
        opset: int = 17,
    ) -> OnnxFile:
        tensor, signature = helper.make_tensor_value_info, float_file.signature
        if features is not None:
            spec = TensorSpec("features", "float32", ("batch", *features))
            signature = replace(signature, outputs=(*signature.outputs, spec))
        outputs = [tensor(spec.name, TensorProto.FLOAT, ["N", *spec.sample_shape]) for spec in signature.outputs]
        inputs = [tensor("images", TensorProto.FLOAT, ["N", 1, 16, 16])]
        weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        graph = helper.make_graph(nodes, "digits", inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        path = tmp_path / "digits.onnx"
        onnx.save_model(model, path)
        return OnnxFile(path, signature)

    return write


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
