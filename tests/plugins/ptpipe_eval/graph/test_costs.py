from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest

from ptpipe_eval.graph import costs, peaks
from ptpipe_eval.graph.costs import measure_costs
from ptpipe_eval.graph.facts import Costs, Peaks
from ptpipe_eval.graph.roofline import find_limit, with_limit
from ptpipe_torch import BATCH, FileInterface, OnnxFile, Selected, Signature, TensorSpec

from ....latencies import latency

SAMPLE = {"images": np.ones((1, 1, 8, 8), np.float32)}
IO_BYTES = 64 * 4 + 10 * 4


def test_one_network_in_two_formats(torch_model, onnx_model):
    first, second = (measure_costs(model, SAMPLE) for model in (torch_model, onnx_model))
    for found in (first, second):
        assert (found.macs, found.macs_by_dtype) == (640, {"float32": 640})
        assert (found.weights_read_bytes, found.io_bytes) == (650 * 4, IO_BYTES)
        assert found.weight_bytes == {"float32": 650 * 4}
        assert found.flops_per_byte == pytest.approx(2 * 640 / (2600 + IO_BYTES))
        assert found.float_operators == found.uncounted == ()
    assert first.operators["aten.addmm"] == second.operators["Gemm"] == 1
    assert second.compressed_bytes == len(zlib.compress(onnx_model.path.read_bytes(), 6)) < onnx_model.size_bytes
    assert Costs.from_json(json.loads(json.dumps(first.to_json()))) == first


@pytest.mark.parametrize("form", ["normalized", "nhwc"])
def test_inputs_and_outputs_of_any_size_count_at_the_samples(onnx_model, form):
    logits = TensorSpec("logits", "float32", (BATCH, 3, "2*height", "width", "logits_4"))
    signature = Signature((TensorSpec("images", "float32", (BATCH, 1, "8*height", "width")),), (logits,))
    raw = Signature((TensorSpec("images", "uint8", (BATCH, "8*height", "width", 1)),), (logits,))
    interface = FileInterface(form, raw) if form == "nhwc" else None
    model = OnnxFile(onnx_model.path, signature, interface=interface)
    images = np.ones((1, 16, 5, 1), np.uint8) if interface else np.ones((1, 1, 16, 5), np.float32)
    found = measure_costs(model, {"images": images})
    assert found.sizes == {"8*height": 16, "width": 5}
    assert found.io_bytes == images.nbytes + 3 * 4 * 5 * 4


def test_test_vectors_are_no_part_of_the_compressed_size(onnx_model, tmp_path):
    vectors = tmp_path / "vectors.npz"
    vectors.write_bytes(np.random.default_rng(0).bytes(100_000))
    model = OnnxFile(onnx_model.path, onnx_model.signature, "float32", {}, vectors)
    assert measure_costs(model, SAMPLE).compressed_bytes < onnx_model.size_bytes


def test_a_selected_model_costs_what_the_model_does(onnx_model):
    assert measure_costs(Selected("onnx", onnx_model), SAMPLE) == measure_costs(onnx_model, SAMPLE)


def test_a_model_of_another_plugin_is_weighed_and_not_counted(numpy_model):
    found = measure_costs(numpy_model, SAMPLE)
    assert found.compressed_bytes > 1000
    assert (found.macs, found.flops_per_byte) == (None, None)
    assert found.uncounted == ("numpy float32 has no graph that can be read",)


def test_a_network_that_fails_when_it_is_counted_is_no_error(torch_model, monkeypatch):
    monkeypatch.setattr("ptpipe_eval.graph.torch_graph.count_network", lambda *_: 1 / 0)
    found = measure_costs(torch_model, SAMPLE)
    assert (found.macs, found.uncounted) == (None, ("it can't be counted: ZeroDivisionError: division by zero",))


def test_large_files_are_estimated_from_parts(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 16, 40_000).astype(np.uint8).tobytes()
    (tmp_path / "a").write_bytes(content)
    whole = costs._compressed(tmp_path / "a")
    monkeypatch.setattr(costs, "_PART_BYTES", 1000)
    assert costs._compressed(tmp_path / "a") == pytest.approx(whole, rel=0.05)


PEAKS = Peaks(1, {"float32": 1e9, "int8": 4e9}, {"1000": 1e9, "4000": 2e9, "16000": 1e8})


def test_the_larger_of_computing_and_reading_is_the_limit():
    known = Costs(1, macs=3000, macs_by_dtype={"float32": 1000, "int8": 2000}, weights_read_bytes=500, io_bytes=10)
    limit = find_limit(known, PEAKS, 1)  # 510 bytes fit a cache that was not measured
    assert (limit.limit_ms, limit.limited_by) == (pytest.approx(1.5e-3), "compute")
    large = replace(known, weights_read_bytes=15_000)
    assert find_limit(large, PEAKS, 1).limited_by == "memory"
    assert find_limit(large, PEAKS, 1).limit_ms == pytest.approx(1e3 * 15_010 / 2e9)  # the best at 4000 bytes or more
    assert find_limit(large, PEAKS, 100).limit_ms == pytest.approx(1e3 * 16_000 / 1e8)
    assert find_limit(large, PEAKS, 1000).limited_by == "compute"  # more samples of the same weights
    for unknown in (replace(known, macs=None), replace(known, macs_by_dtype={"float16": 3000})):
        assert find_limit(unknown, PEAKS, 1) is None


def test_a_latency_has_its_fraction_of_the_peak():
    known = Costs(1, macs=1000, macs_by_dtype={"float32": 1000}, weights_read_bytes=0, io_bytes=10)
    cell = with_limit(latency(1, 0.004), known, PEAKS)
    assert (cell.limit_ms, cell.limited_by, cell.peak_fraction) == (0.001, "compute", 0.25)
    beaten = latency(1, 0.0005)  # the peaks were measured on a busy machine
    assert with_limit(beaten, known, PEAKS) == beaten
    assert with_limit(beaten, None, PEAKS) == with_limit(beaten, known, None) == beaten


def test_peaks_are_measured_once_a_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peaks, "_SECONDS", 0.01)
    measure = peaks.measure_peaks
    calls = []
    monkeypatch.setattr(peaks, "measure_peaks", lambda number: calls.append(number) or measure(number, 0.01))
    first = peaks.machine_peaks(2)
    assert first.macs_per_s.keys() == {"float32", "int8"} and min(first.macs_per_s.values()) > 1e8
    one = peaks.machine_peaks(1)
    assert all(first.macs_per_s[name] >= rate for name, rate in one.macs_per_s.items())
    assert (peaks.machine_peaks(2), calls) == (first, [2, 1])
    peaks.forget_peaks(2)
    for file in tmp_path.rglob("*.json"):
        file.write_text("[" * 3)
    assert peaks.machine_peaks(1).num_threads == 1 and calls == [2, 1, 1]
