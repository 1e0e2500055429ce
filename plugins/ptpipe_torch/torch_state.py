"""What torch keeps for the whole process and results depend on: each stage gets torch's own defaults of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from ptpipe import host

_FLAGS = (
    ("cudnn", "enabled", True),
    ("cudnn", "benchmark", False),
    ("cudnn", "deterministic", False),
    ("mkldnn", "enabled", True),
    ("mkldnn", "deterministic", False),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction", True),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction", True),
)
"""Of modules in `torch.backends`, each with its default."""
_PRECISIONS = {
    **dict.fromkeys((("generic", "all"), ("cuda", "all"), ("cuda", "matmul")), "none"),
    **dict.fromkeys((("cuda", "conv"), ("cuda", "rnn")), "tf32"),
    **dict.fromkeys((("mkldnn", operators) for operators in ("all", "matmul", "conv", "rnn")), "none"),
}
"""What float32 operators compute in, by backend and operators, those of all operators first."""
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")
"""Algorithms of `scaled_dot_product_attention`."""


class _Setting(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], object]
    default: Any


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Give torch's global settings their defaults inside the `with`, and restore those of before on exit.

    What a stage, a plugin's module or the caller of `ptpipe.run` has set for the process would change the results of
    others, which are stored under the keys of unchanged ones. Does nothing as long as nothing has imported torch.
    Functions of torch that a plugin has replaced stay replaced, and random streams are left alone.
    """
    settings = tuple(_settings()) if "torch" in sys.modules else ()
    before = [_value(setting) for setting in settings]
    with _inference_mode_left() if settings else nullcontext():
        try:
            _put_defaults(settings)
            yield
        finally:
            _put_all(settings, before)
            if not settings and "torch" in sys.modules:
                _put_defaults(tuple(_settings()))


def _put_defaults(settings: Sequence[_Setting]) -> None:
    _put_all(settings, [setting.default for setting in settings])


def _value(setting: _Setting) -> Any:
    with suppress(AttributeError):  # as in `_put_all`
        return setting.get()
    return None


def _put_all(settings: Sequence[_Setting], values: Sequence[Any]) -> None:
    for setting, value in zip(settings, values, strict=True):
        with suppress(AttributeError):  # some of torch's functions are private: another release may have no such one
            if setting.get() != value:
                setting.put(value)


def _inference_mode_left() -> AbstractContextManager[None]:
    import torch

    mode: AbstractContextManager[None] = torch.inference_mode(False)
    return mode


def _settings() -> Iterator[_Setting]:
    import torch

    yield _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32)
    yield _Setting(torch.get_default_device, _set_default_device, torch.device("cpu"))
    yield _Setting(torch.get_num_threads, torch.set_num_threads, host.num_threads())
    yield _Setting(torch.is_grad_enabled, lambda value: torch._C._set_grad_enabled(value), True)
    yield _Setting(_flushes_denormals, torch.set_flush_denormal, False)
    yield _Setting(_determinism, _set_determinism, (False, False, True))
    yield _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
        (False, True),
    )
    yield _Setting(_hooks, _set_hooks, {})
    yield from _autocast_settings()
    yield from _backend_settings()


def _autocast_settings() -> Iterator[_Setting]:
    import torch

    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
        yield _Setting(partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device), False)
        yield _Setting(partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device), dtype)
    yield _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True)
    yield _Setting(_autocast_nesting, _set_autocast_nesting, 0)


def _backend_settings() -> Iterator[_Setting]:
    import torch

    backends = torch.backends
    for name, flag, default in _FLAGS:
        module = backends.cuda.matmul if name == "cuda.matmul" else getattr(backends, name)
        yield _Setting(partial(getattr, module, flag), partial(setattr, module, flag), default)
    yield _Setting(_precisions, _set_precisions, _PRECISIONS)
    for name in _ATTENTIONS:
        is_enabled, enable = getattr(backends.cuda, f"{name}_sdp_enabled"), getattr(backends.cuda, f"enable_{name}_sdp")
        yield _Setting(is_enabled, enable, True)
    yield _Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True)
    engine = next((name for name in ("x86", "onednn") if name in backends.quantized.supported_engines), "none")
    yield _Setting(lambda: backends.quantized.engine, partial(setattr, backends.quantized, "engine"), engine)


def _set_default_device(device: Any) -> None:
    import torch

    torch.set_default_device(None)  # the CPU, where no `with torch.device(...)` is around this
    if torch.get_default_device() != device:
        torch.set_default_device(device)


def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0  # torch has no function for it; Python's numbers are treated alike


def _determinism() -> tuple[bool, bool, bool]:
    import torch

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # of a class in its place
    )


def _set_determinism(values: tuple[bool, bool, bool]) -> None:
    import torch

    torch._C._set_deterministic_algorithms(values[0], warn_only=values[1])
    torch.utils.deterministic.fill_uninitialized_memory = values[2]  # type: ignore[attr-defined]


def _precisions() -> dict[tuple[str, str], str]:
    import torch

    return {operators: torch._C._get_fp32_precision_getter(*operators) for operators in _PRECISIONS}


def _set_precisions(wanted: dict[tuple[str, str], str]) -> None:
    import torch

    # Torch's older names for these are kept apart: reading them fails where the two contradict each other.
    reduced = "medium" if wanted["mkldnn", "matmul"] == "bf16" else "high"
    torch.set_float32_matmul_precision(reduced if wanted["cuda", "matmul"] == "tf32" else "highest")
    torch._C._set_cudnn_allow_tf32(wanted["cuda", "conv"] == "tf32")
    for operators, precision in wanted.items():
        torch._C._set_fp32_precision_setter(*operators, precision)


def _autocast_nesting() -> int:
    import torch

    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_nesting(wanted: int) -> None:
    import torch

    while _autocast_nesting() > wanted:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < wanted:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()  # of weights that the outermost `autocast` would have dropped


def _hooks() -> dict[tuple[Any, str], dict[Any, Any]]:
    """Return the hooks of all modules and of all optimizers that there are, by the dict that holds them."""
    return {place: dict(hooks) for place, hooks in _hook_dicts().items() if hooks}


def _set_hooks(wanted: dict[tuple[Any, str], dict[Any, Any]]) -> None:
    for place, hooks in _hook_dicts().items():
        hooks.clear()
        hooks.update(wanted.get(place, {}))


def _hook_dicts() -> dict[tuple[Any, str], dict[Any, Any]]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    return {
        (holder, name): value
        for holder in (module, optimizer)
        for name, value in vars(holder).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
