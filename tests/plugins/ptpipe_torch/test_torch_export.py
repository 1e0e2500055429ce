"""What torch.export prints, and where operators of a network come from."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

from ptpipe_torch.torch_export import export_program, module_path, source_line


class Printing(nn.Module):
    def __init__(self, is_branching: bool) -> None:
        super().__init__()
        self.is_branching = is_branching

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("by the network", file=sys.stderr)
        y = x.exp()
        return x if self.is_branching and y.sum() > 0 else y


def test_a_failure_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="data-dependent") as raised:
        export_program(Printing(True), [torch.zeros(2)], ({},))
    assert "torch.ops.aten.exp" in raised.value.partial_fx_graph, "which torch prints"
    out, err = capfd.readouterr()
    assert (out, err.splitlines()[0]) == ("", "by the network")
    assert "torch.ops" not in err


def test_what_the_network_prints_stays(capfd: pytest.CaptureFixture[str]) -> None:
    export_program(Printing(False), [torch.zeros(2)], ({},))
    assert capfd.readouterr() == ("", "by the network\n")


def test_lines_are_those_of_the_network_and_not_of_torch() -> None:
    network = nn.Sequential(nn.Sequential(Printing(False)), nn.ReLU())
    graph = export_program(network, [torch.zeros(2)], ({},)).graph
    exp, relu = (node for node in graph.nodes if node.op == "call_function")
    assert (module_path(exp), module_path(relu)) == ("0.0", "1")
    assert re.fullmatch(rf"{re.escape(__file__)}:[0-9]+: `y = x\.exp\(\)`", source_line(exp))
    assert source_line(relu) == ""


class AnyNumber(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(inputs, 1)


class OneAtLeast(nn.Module):
    def forward(self, first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.cat([first, *rest], 1)


@pytest.mark.parametrize("network", [AnyNumber(), OneAtLeast()])
def test_a_network_of_any_number_of_inputs(network: nn.Module) -> None:
    size = {0: torch.export.Dim("batch")}
    program = export_program(network, [torch.zeros(2, 3), torch.zeros(2, 4)], (size, size))
    inputs = torch.ones(5, 3), torch.zeros(5, 4)
    torch.testing.assert_close(program.module()(*inputs), torch.cat(inputs, 1))


class Masked(nn.Module):
    """`nn.Transformer` looks whether a mask is the causal one: a branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)

    def forward(self, x_BLD: torch.Tensor, mask_LL: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.transformer(x_BLD, x_BLD, tgt_mask=mask_LL)
        return states


def test_masks_of_transformers_are_used_without_a_look() -> None:
    network, x_BLD = Masked().eval(), torch.randn(2, 5, 8)
    causal_LL = nn.Transformer.generate_square_subsequent_mask(5)
    program = export_program(network, [x_BLD, causal_LL], ({}, {})).module()
    for mask_LL in (causal_LL, causal_LL.T.contiguous()):
        torch.testing.assert_close(program(x_BLD, mask_LL), network(x_BLD, mask_LL))
