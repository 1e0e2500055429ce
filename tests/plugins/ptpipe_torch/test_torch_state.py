from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pluggy
import pytest
import torch
from torch.nn.modules import module
from torch.optim import optimizer

import ptpipe_torch
from ptpipe import hookimpl, hookspecs
from ptpipe_torch.torch_state import _settings, torch_defaults

LEFT_BEHIND: dict[str, Callable[[], object]] = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "gradients": lambda: torch._C._set_grad_enabled(False),
    "denormals": lambda: torch.set_flush_denormal(True),
    "determinism": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__(),
    "hooks of modules": lambda: module.register_module_forward_hook(lambda *_: None),
    "hooks of optimizers": lambda: optimizer.register_optimizer_step_pre_hook(lambda *_: None),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 of convolutions": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "engine": lambda: setattr(torch.backends.quantized, "engine", "qnnpack"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process of the tests as it was, whatever fails."""
    before = values()
    yield
    for setting, value in zip(_settings(), before, strict=True):
        if setting.get() != value:
            setting.put(value)


def values() -> list[Any]:
    return [setting.get() for setting in _settings()]


def defaults() -> list[Any]:
    return [setting.default for setting in _settings()]


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_what_is_set_inside_ends_with_it(name: str) -> None:
    before = values()
    with pytest.raises(ZeroDivisionError), torch_defaults():
        LEFT_BEHIND[name]()
        assert values() != defaults()
        _ = 1 / 0
    assert values() == before
    # The older names of these flags raise where they contradict the newer ones.
    assert torch.get_float32_matmul_precision() == "highest"
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_what_was_set_before_is_as_torch_has_it_inside_and_back_afterwards(name: str) -> None:
    LEFT_BEHIND[name]()
    before = values()
    with torch_defaults():
        assert values() == defaults()
    assert values() == before


@pytest.mark.parametrize("name", ["medium", "high", "highest"])
def test_the_older_name_of_the_callers_precision_is_as_it_was(name: str) -> None:
    torch.set_float32_matmul_precision(name)
    with torch_defaults():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == name


PRIVATE = [
    "_get_fp32_precision_getter",
    "_set_fp32_precision_setter",
    "_set_cudnn_allow_tf32",
    "_set_deterministic_algorithms",
    "_set_grad_enabled",
]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_release_of_torch_without_a_private_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for leave in LEFT_BEHIND.values():
        leave()
    with monkeypatch.context() as release:
        release.delattr(torch._C, name)
        with torch_defaults():
            assert torch.get_default_dtype() == torch.float32
            assert torch.backends.mha.get_fastpath_enabled()
    assert torch.get_default_dtype() == torch.float64
    assert not torch.backends.mha.get_fastpath_enabled()


def test_gradients_inside_the_callers_inference_mode() -> None:
    with torch.inference_mode():
        with torch_defaults():
            assert not torch.is_inference_mode_enabled()
            (torch.ones(2, requires_grad=True) * 2).sum().backward()
        assert torch.is_inference_mode_enabled()


def test_weights_that_an_autocast_has_converted_are_forgotten() -> None:
    layer, sample = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    with torch_defaults():
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        layer(sample)  # keeps the weight as bf16 as long as the outermost autocast lasts
    with torch.no_grad():
        layer.weight.fill_(3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(sample).item() == 3.0


def test_a_process_in_which_the_stage_imports_torch() -> None:
    code = """
import sys
from ptpipe_torch.torch_state import _settings, torch_defaults
with torch_defaults():
    pass
assert not {"torch", "numpy"} & set(sys.modules)
with torch_defaults():
    import torch
    fresh = [setting.get() for setting in _settings()]
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
assert [setting.get() for setting in _settings()] == [setting.default for setting in _settings()] == fresh
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Wrapper:
    @hookimpl(wrapper=True)
    def ptpipe_launch(self, call: Any) -> Generator[None, Any, Any]:
        torch.set_float32_matmul_precision("high")
        return (yield)


class Launcher:
    @hookimpl
    def ptpipe_launch(self, call: Any, tell: Any) -> dict[str, Any]:
        torch.set_default_dtype(torch.float64)
        if call == "precision":
            return {"output": torch.get_float32_matmul_precision()}
        if call == "fails":
            raise ZeroDivisionError
        return {"output": call}


@pytest.fixture
def manager() -> pluggy.PluginManager:
    made = pluggy.PluginManager("ptpipe")
    made.add_hookspecs(hookspecs)
    made.register(Launcher())
    made.register(ptpipe_torch)
    return made


def test_a_plugin_that_wraps_stages_sets_what_they_run_with(manager: pluggy.PluginManager) -> None:
    manager.register(Wrapper())
    outputs = manager.hook.ptpipe_launch(call="precision", tell=print)
    assert outputs == {"output": "high"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_no_stage_gets_what_another_has_set(manager: pluggy.PluginManager) -> None:
    assert manager.hook.ptpipe_launch(call="well", tell=print) == {"output": "well"}
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError):
        manager.hook.ptpipe_launch(call="fails", tell=print)
    assert torch.get_default_dtype() == torch.float32
