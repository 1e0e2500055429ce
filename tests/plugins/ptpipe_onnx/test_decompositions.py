"""Operators that need no decomposition, which traces a network again, and those that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

from ptpipe_onnx import torch_exporter, writes_in_place
from ptpipe_torch import BATCH, Signature, TensorSpec

SHAPE = (4, 6, 6)


class Network(nn.Module):
    """A function of a convolution's result."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.layers, self.function = nn.Conv2d(4, 4, 3, padding=1), nn.ModuleList(layers), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.conv(x), *self.layers)


def with_statistics(layer: nn.Module) -> nn.Module:
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer


def examples() -> torch.Tensor:
    return torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))


def exported(network: nn.Module, shape: tuple[int, ...]) -> bytes:
    """Return its file; `shape`: of the outputs."""
    outputs = (TensorSpec("y", "float32", (BATCH, *shape[1:])),)
    signature = Signature((TensorSpec("x", "float32", (BATCH, *SHAPE)),), outputs)
    model = torch_exporter.optimize(torch_exporter.export(network.eval(), signature, 18))
    return ir.to_proto(model).SerializeToString()


def check(network: nn.Module, run_onnx: Callable[..., np.ndarray]) -> None:
    """Export it and compare what the file returns with what the network does."""
    with torch.no_grad():
        expected = network.eval()(examples())
    found = run_onnx(exported(network, tuple(expected.shape)), examples().numpy())
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls, decompose = [], _fx_passes.decompose_with_registry

    def counted(program: Any, registry: Any) -> Any:
        calls.append(program)
        return decompose(program, registry)

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", counted)
    return calls


def two_norms(x: torch.Tensor, norm: nn.Module, other: nn.Module) -> torch.Tensor:
    return other(norm(x).relu_()).add_(x)


def shared_with_nothing(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2  # of the values before
    x.mul_(3).clamp_(-1, 1)
    return x + doubled  # of those after


def through_dropout(x: torch.Tensor, drop: nn.Module) -> torch.Tensor:
    same = drop(x)
    same.relu_()
    return x * 2


def converted(x: torch.Tensor) -> torch.Tensor:
    counts = (x > 0).sum(1, keepdim=True).to("cpu")
    return x.to(torch.float32) * counts.to(x.dtype) + counts.to(
        dtype=torch.float32, memory_format=torch.preserve_format
    )


def transposed(x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
    line, plane, volume = layers
    return volume(plane(line(x.flatten(2)).unflatten(2, (6, -1))).unsqueeze(2)).mean((2, 3, 4))


def view_before(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(1)
    x.relu_()
    return rows


def view_of_it(x: torch.Tensor) -> torch.Tensor:
    x.flatten(2).relu_()
    return x * 2


def parts(x: torch.Tensor) -> torch.Tensor:
    first, _ = x.chunk(2, 1)
    first.mul_(2)
    return x + 1


def unsafe_view(x: torch.Tensor) -> torch.Tensor:
    rows = torch.ops.aten._unsafe_view(x, [-1, 144])
    x.relu_()
    return rows + 1


def slices(x: torch.Tensor) -> torch.Tensor:
    rows = x[:, :, 1]
    x[:, 1:3].add_(1)
    x[:, 0] = 0
    x[:, :, -1, 2:5:2] = 5
    x[:, -1:, :, 2] = rows[:, :1]
    x[..., 0] = x[..., 1]
    rows.mul_(0.5)
    return x + rows.unsqueeze(2)


def parts_of_all_kinds(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split([1, 3], 1)
    second.unbind(-1)[2].mul_(2)
    second.transpose(1, 2).permute(0, 3, 1, 2)[:, :2].sigmoid_()
    x.view_as(x).unsqueeze(1).squeeze(1)[0].copy_(first[0] * 2)
    x.unflatten(1, (2, 2))[:, 1].zero_()
    return first.exp() + x.contiguous().detach()


def masked(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros(6, 6)
    mask[:2] = 1
    mask[2:, 3:] = 2
    x[x > 1] = 0
    x[:, [0, 2]] = x[:, [1, 3]]
    return x + mask.masked_fill(mask == 2, -100)


def powers(x: torch.Tensor) -> torch.Tensor:
    return x.pow_(2).ldexp_(torch.tensor(2)) + 1


def permuted_by_einsum(x: torch.Tensor) -> torch.Tensor:
    torch.einsum("b...w->bw...", x).relu_()
    torch.einsum("bchw->bhwc", x)[:, 0].mul_(2)
    return x + 1


def unsafe_parts(x: torch.Tensor) -> torch.Tensor:
    torch.unsafe_split(x, 2, 1)[0].mul_(2)
    torch.unsafe_split_with_sizes(x, [1, 3], 1)[1].add_(1)
    torch.unsafe_chunk(x, 3, 2)[2].relu_()
    return x + 1


def broadcast(x: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros_like(x)
    sums.copy_(x[:, :1])
    sums[:, 1:].copy_(x[:1, :1, :, :1] > 0)
    return sums.relu_()


def window_mask(x: torch.Tensor) -> torch.Tensor:
    """As Swin has it."""
    mask, count = x.new_zeros((6, 6)), 0
    for rows in (slice(0, -3), slice(-3, -1), slice(-1, None)):
        for columns in (slice(0, -3), slice(-3, -1), slice(-1, None)):
            mask[rows, columns] = count
            count += 1
    mask = mask.view(2, 3, 2, 3).permute(0, 2, 1, 3).reshape(4, 9)
    mask = mask.unsqueeze(1) - mask.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


def with_mask(x: torch.Tensor) -> torch.Tensor:
    return (x.flatten(2)[:, :, :9].unsqueeze(2) + window_mask(x)).softmax(-1)


def read_between(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_full((6, 6), 3)
    mask[0] = 1
    masked = x * mask
    mask[1] = 2
    return masked + mask


def of_both(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(6, 6)
    mask[0] = 1
    twice = mask * 2
    mask[1] = x.mean()
    mask[2] = 3
    twice[0] = 5
    return x + mask + twice


def seen_by_view(x: torch.Tensor) -> torch.Tensor:
    column = torch.zeros(6, 1)
    column[2] = 3
    planes = column.expand(x.shape[0], 4, 6, 6)
    column[0] = 1
    return x + planes


def through_dropout_of_constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6)
    mask[0] = 2
    nn.functional.dropout(mask, 0.5, training=False)[1] = 3
    return x + mask


IN_PLACE = [
    *(view_before, view_of_it, parts, unsafe_view, slices, parts_of_all_kinds, masked, powers),
    *(permuted_by_einsum, unsafe_parts, broadcast, with_mask, read_between, of_both, seen_by_view),
]


def resized(x: torch.Tensor) -> torch.Tensor:
    rows = nn.functional.interpolate(x, size=(9, 4), mode="bilinear", antialias=True).flatten(2)
    return (1.5 - rows.reshape_as(rows.unflatten(2, (4, 9)))).swapaxes(1, -1).square()


NETWORKS = [
    (two_norms, lambda: [with_statistics(nn.BatchNorm2d(4)), with_statistics(nn.BatchNorm2d(4, affine=False))]),
    (shared_with_nothing, list),
    (converted, list),
    (
        transposed,
        lambda: [
            nn.ConvTranspose1d(4, 4, 3, padding=1, groups=2, bias=False),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.ConvTranspose3d(4, 2, 3, stride=2, padding=1, output_padding=1, dilation=1),
        ],
    ),
    *((function, list) for function in IN_PLACE),
    (lambda x, layer: layer(x.mean((0, 3))).expand(2, -1, -1), lambda: [nn.ConvTranspose1d(4, 3, 2)]),
    (lambda x, norm: norm(x), lambda: [nn.BatchNorm2d(4, track_running_stats=False)]),
    (lambda x, *layers: layers[1](layers[0](x)), lambda: [nn.Conv2d(4, 4, size, padding="same") for size in (3, 5)]),
    (
        lambda x, *layers: torch.cat([layer(x).flatten(2) for layer in layers], 2),
        lambda: [nn.AdaptiveAvgPool2d(size) for size in (6, (3, 2), (4, 5))],
    ),
    (resized, list),
]
DROPOUTS = [
    (lambda x, drop: drop(x.relu()).add(1), lambda: [nn.Dropout(0.5, inplace=True)]),
    (lambda x, drop: drop(x.flatten(1)) * 2, lambda: [nn.Dropout(0.5, inplace=True)]),
    (through_dropout, lambda: [nn.Dropout(0.5)]),
    (through_dropout_of_constants, list),
]
"""Which torch's exporter takes for copies."""


@pytest.mark.parametrize(("function", "make"), [*NETWORKS, *DROPOUTS])
def test_without_tracing_again(
    monkeypatch: pytest.MonkeyPatch, run_onnx: Callable[..., np.ndarray], function: Callable[..., Any], make: Any
) -> None:
    calls = count_calls(monkeypatch)
    torch.manual_seed(0)
    check(Network(function, *make()), run_onnx)
    assert not calls


@pytest.mark.parametrize(("function", "make"), NETWORKS)
def test_files_compute_what_those_of_two_traces_do(
    monkeypatch: pytest.MonkeyPatch, run_onnx: Callable[..., np.ndarray], function: Callable[..., Any], make: Any
) -> None:
    torch.manual_seed(0)
    network = Network(function, *make()).eval()
    with torch.no_grad():
        shape = tuple(network(examples()).shape)
    once = run_onnx(exported(network, shape), examples().numpy())
    calls = count_calls(monkeypatch)
    for step in ("decompose", "_decompose_each"):
        monkeypatch.setattr(torch_exporter, step, lambda *arguments: None)
    twice = run_onnx(exported(network, shape), examples().numpy())
    assert len(calls) == 1
    np.testing.assert_array_equal(once, twice)


def rounded(x: torch.Tensor) -> torch.Tensor:
    sums = x + 0.5
    sums.add_(torch.full((1,), 1e-9, dtype=torch.float64))
    return sums * 1


def filled_constants(function: Callable[..., Any], shape: tuple[int, ...]) -> list[ir.Value]:
    """Return the tensors of a file that the network fills in place."""
    signature = Signature(
        (TensorSpec("x", "float32", (BATCH, *SHAPE)),), (TensorSpec("y", "float32", (BATCH, *shape)),)
    )
    graph = torch_exporter.export(Network(function).eval(), signature, 18).graph
    return [value for name, value in graph.initializers.items() if name.startswith("filled_")]


def test_constants_are_evaluated() -> None:
    (value,) = filled_constants(with_mask, (4, 9, 9))
    assert set(value.const_value.numpy().flat) == set(range(9))
    graph = ir.from_proto(onnx.load_from_string(exported(Network(with_mask), (2, 4, 9, 9)))).graph
    assert {node.op_type for node in graph} == {"Conv", "Reshape", "Slice", "Unsqueeze", "Add", "Softmax"}


def of_transposed(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x[0, 0].new_ones(2, 3).t())  # whose memory is that of its transpose, as the source's
    mask[0] = 2
    mask.reshape(-1)[3] = 5
    return x[:, :, :3, :2] * mask


def test_constants_like_others_have_their_strides(run_onnx: Callable[..., np.ndarray]) -> None:
    check(Network(of_transposed), run_onnx)


def large_mask(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_zeros((6 * 210, 210))  # over 1 MiB
    mask[7] = 1
    return x + mask.view(6, 210, 210)[:, 0, :6]


def test_large_constants_are_computed_by_the_file(run_onnx: Callable[..., np.ndarray]) -> None:
    assert not filled_constants(large_mask, SHAPE)
    check(Network(large_mask), run_onnx)


def branching(x: torch.Tensor) -> torch.Tensor:
    x.relu_()
    return torch.cond(x.sum() > 0, lambda a: a.clone(), lambda a: a * 2, (x,)) * 3


def turned_in_place(x: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 4, 36)
    x.transpose_(2, 3)
    rows.mul_(2)
    columns = x[:, :, :1].squeeze_(2).unsqueeze_(2)
    return columns * rows.swapaxes_(1, 2).flatten(1)[:, None, None, :6] + x.flatten(2)[:, :, None, :6]


@pytest.mark.parametrize("function", [rounded, branching, turned_in_place])
def test_what_must_be_traced_again(
    monkeypatch: pytest.MonkeyPatch, run_onnx: Callable[..., np.ndarray], function: Callable[..., Any]
) -> None:
    calls = count_calls(monkeypatch)
    torch.manual_seed(0)
    check(Network(function), run_onnx)
    assert len(calls) == 1


def test_operators_of_one_name_take_the_same() -> None:
    aten, found = torch.ops.aten, set()
    for name in (name for name in dir(aten) if name.endswith("_") and not name.startswith("__")):
        for overload in getattr(aten, name).overloads():
            target = getattr(getattr(aten, name), overload)
            if target._schema.is_mutable and (function := writes_in_place.out_of_place(target)) is not None:
                arguments = zip(target._schema.arguments, function._schema.arguments, strict=True)
                assert all((a.name, str(a.type)) == (b.name, str(b.type)) for a, b in arguments), name
                found.add(name)
    assert {"relu_", "add_", "mul_", "clamp_", "hardtanh_", "hardswish_", "silu_"} <= found
    assert len(found) > 100


class Changed(nn.Module):
    """Changes its input, as `nn.ReLU(inplace=True)` in front does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_() * 2 + x


class Returned(nn.Module):
    """Returns a tensor that is changed after it was computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.relu_()
        return y


@pytest.mark.parametrize("make", [Changed, Returned])
def test_inputs_and_outputs(run_onnx: Callable[..., np.ndarray], make: Callable[[], nn.Module]) -> None:
    check(make(), run_onnx)
