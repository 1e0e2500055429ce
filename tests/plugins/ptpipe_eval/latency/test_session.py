"""Sessions with real processes, most of them forked: see `tests/forked_servers.py`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ptpipe import NamedCode, StageError, host
from ptpipe_eval.latency.inputs import CellBatches
from ptpipe_eval.latency.session import Session
from ptpipe_torch import FunctionRef, Model, Recipe

from ....processes import is_running
from ....signatures import classifier

PLUGIN = Path(__file__).parents[1] / "digit_models.py"
INPUTS = {"images": np.ones((1, 1, 8, 8), np.float32)}


@pytest.fixture
def session(tmp_path: Path, forked_servers: None) -> Callable[..., Session]:
    def make(**options: Any) -> Session:
        defaults: dict[str, Any] = {
            "inputs": [CellBatches(1, None, {"normalized": [INPUTS]})],
            "threads": ("one",),
            "budget_s": 1.0,
            "precision": 0.01,
            "seed": 7,
            "code": NamedCode((str(PLUGIN),)),
            "folder": tmp_path,
        }
        return Session(**defaults | options)

    return make


@pytest.fixture
def large(models: ModuleType) -> Callable[[int], Any]:
    """Return a model that multiplies matrices this many times."""

    def make(num_times: int) -> Any:
        model = models.Repeated(np.ones((20_000, 64), np.float32), np.ones(20_000, np.float32))
        model.num_times = num_times
        return model

    return make


def test_models_of_every_format_are_measured_together(session, numpy_model, torch_model, onnx_model) -> None:
    rounds: list[Any] = []
    images_NCHW = np.ones((3, 1, 8, 8), np.float32)
    batches = [
        CellBatches(1, None, {"normalized": [INPUTS]}),
        CellBatches(3, 8, {"normalized": [{"images": images_NCHW}] * 2}),
    ]
    own = session(inputs=batches, threads=("one", "all"), budget_s=1.0)
    measured = own.measure(["numpy", "torch", "onnx"], [numpy_model, torch_model, onnx_model], 1, rounds.append)
    assert len(measured) == 3
    for position, one in enumerate(measured):
        cells = [(cell.label, cell.length, cell.num_threads) for cell in one.latencies]
        everyone = host.num_threads()
        assert cells == [
            ("batch 1, one thread", None, 1),
            ("batch 3, length 8, one thread", 8, 1),
            ("batch 1, all threads", None, everyone),
            ("batch 3, length 8, all threads", 8, everyone),
        ]
        for cell in one.latencies:
            assert (cell.speed == "baseline") == (position == 1)
            assert 0 < cell.median_ms < 100 and cell.ratio > 0 and cell.num_runs > 20 and cell.cpu_ms > 0
            assert cell.p10_ms <= cell.p90_ms
            # A busy machine times fewer.
            assert cell.p90_ms <= cell.p99_ms if cell.num_runs >= 299 else cell.p99_ms is None
            assert len(cell.round_ratios) >= cell.num_starts
        assert one.start_up.load_ms > 0 and one.start_up.first_call_ms > 0
    assert all(cell.ratio == 1 for cell in measured[1].latencies)
    assert measured[0].latencies[0].ratio < 1, "a product in numpy costs less than a call of torch"
    assert {(event["batch_size"], event["num_threads"]) for event in rounds} == {
        (size, threads) for size in (1, 3) for threads in (1, host.num_threads())
    }


def test_a_model_that_computes_three_times_as_much_takes_three_times_as_long(session, large) -> None:
    one, three = session(budget_s=1.0).measure(["one", "three"], [large(1), large(3)], 0, lambda event: None)
    (cell,) = three.latencies
    assert 2.3 < cell.ratio < 3.7
    assert cell.speed in ("slower", "unmeasurable")  # whether another test takes the processor is not in our hands
    if cell.speed == "slower":
        assert cell.ratio_low <= cell.ratio <= cell.ratio_high and cell.noise < 1
        assert one.latencies[0].low_ms <= one.latencies[0].median_ms <= one.latencies[0].high_ms


def test_calls_too_slow_for_the_budget_leave_it_to_the_others(session, large) -> None:
    """A batch of 2,000 takes a hundred times as long as one of ten: five calls of it are beyond the budget."""
    sizes = (10, 2000)
    batches = [
        CellBatches(size, None, {"normalized": [{"images": np.ones((size, 1, 8, 8), np.float32)}]}) for size in sizes
    ]
    began_s = time.monotonic()
    (measured,) = session(inputs=batches, budget_s=1.0).measure(["one"], [large(5)], 0, lambda event: None)
    quick, slow = measured.latencies
    assert time.monotonic() - began_s < 30
    assert quick.num_starts > slow.num_starts == slow.num_runs == 1
    assert slow.median_ms > 20 * quick.median_ms and slow.ratio_low is None
    assert slow.bound_ms == pytest.approx(2 * slow.median_ms, rel=1e-3)  # a single start tells little


def test_peak_memory_is_what_the_model_adds(session, models) -> None:
    def taking(megabytes: int) -> Any:
        num_classes = megabytes * 1_000_000 // 4 // 64
        return models.LinearModel(np.ones((num_classes, 64), np.float32), np.zeros(num_classes, np.float32))

    pair = session(budget_s=0.2).measure(["small", "large"], [taking(1), taking(80)], 0, lambda event: None)
    small, large_one = (own.start_up.peak_memory_bytes for own in pair)
    assert 60e6 < large_one - small < 200e6


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("raise", r"^latency: bad: ValueError: not today$"),
        ("die", r"^latency: bad: the process that measured it was ended by SIGKILL$"),
        ("exit", r"^latency: bad: the process that measured it ended with exit code 9$"),
    ],
)
def test_a_model_that_fails_is_named(session, numpy_model, models, weights, mood, message) -> None:
    bad = models.Misbehaving(*weights)
    bad.mood = mood
    with pytest.raises(StageError, match=message):
        session().measure(["good", "bad"], [numpy_model, bad], 0, lambda event: None)


def test_what_a_model_prints_is_not_taken_for_a_result(session, models, weights, capfd) -> None:
    loud = models.Misbehaving(*weights)
    loud.mood = "print"
    (measured,) = session(budget_s=0.1).measure(["loud"], [loud], 0, lambda event: None)
    assert measured.latencies[0].median_ms > 0
    assert capfd.readouterr().out == ""


def test_a_damaged_model_is_named(session, onnx_model, monkeypatch) -> None:
    def save_nothing(folder: Path) -> None:
        (folder / "info.json").write_text("{}")

    monkeypatch.setattr(onnx_model, "save", save_nothing)
    with pytest.raises(StageError, match=r"^latency: onnx: info\.json can't be read"):
        session().measure(["onnx"], [onnx_model], 0, lambda event: None)


def test_a_class_that_can_not_be_imported_is_named(session, numpy_model) -> None:
    with pytest.raises(
        StageError, match=r"^latency: a: ModuleNotFoundError: No module named 'ptpipe_file_digit_models'"
    ):
        session(code=NamedCode()).measure(["a"], [numpy_model], 0, lambda event: None)


KILLED = """
import sys
from pathlib import Path
import numpy as np
from ptpipe import NamedCode
from ptpipe.launching import load_vocabulary
from ptpipe_eval.latency.inputs import CellBatches
from ptpipe_eval.latency.session import Session

(plugin,) = [own for own in load_vocabulary([sys.argv[1]]).plugins if own.source == "manifest"]
model = plugin.module.Misbehaving(np.ones((10, 64), np.float32), np.ones(10, np.float32))
model.mood = sys.argv[2]
inputs = [CellBatches(1, None, {"normalized": [{"images": np.ones((1, 1, 8, 8), np.float32)}]})]
session = Session(inputs, ("one",), 600.0, 1e-9, 7, NamedCode((sys.argv[1],)), Path(sys.argv[3]))
session.measure(["a"], [model], 0, lambda event: print(event, flush=True))
"""


@pytest.mark.sampled(2)
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_run_ends(tmp_path, signal_number) -> None:
    arguments = [sys.executable, "-c", KILLED, str(PLUGIN), "", str(tmp_path)]
    run = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert "elapsed_s" in run.stdout.readline()
        children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        (server,) = children
        workers = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        assert len(workers) <= 2
        run.send_signal(signal_number)
        run.wait(20)
        deadline_s = time.monotonic() + 60
        while any(map(is_running, (server, *workers))):
            assert time.monotonic() < deadline_s, "the processes that measure outlive the run"
            time.sleep(0.05)
    finally:
        run.kill()
        run.communicate()
    left = [file.name for file in tmp_path.iterdir()]
    assert not left or signal_number == signal.SIGKILL


def test_results_are_json(session, numpy_model) -> None:
    (measured,) = session(budget_s=0.1).measure(["a"], [numpy_model], 0, lambda event: None)
    assert json.loads(json.dumps(asdict(measured), allow_nan=False))


def test_user_functions_reach_the_processes(session, tmp_path) -> None:
    """A network of the user's own file is built in the workers, where the manifest names the function."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\n\ndef make_net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    recipe = Recipe(FunctionRef.in_file(file, "make_net", {}), classifier((1, 8, 8), 10))
    model = Model(recipe, {"1.weight": torch.ones(10, 64), "1.bias": torch.ones(10)})
    with pytest.raises(StageError, match=r"latency: net: the stored result needs mine\.py:make_net"):
        session().measure(["net"], [model], 0, lambda event: None)
    allowed = NamedCode(source_functions=(f"{file}:make_net",))
    (measured,) = session(code=allowed, budget_s=0.1).measure(["net"], [model], 0, lambda event: None)
    assert measured.latencies[0].median_ms > 0
