"""Multiply-accumulates of torch networks against published figures and sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptpipe_eval.graph.torch_graph import count_network
from ptpipe_torch import quantized_engine, torchvision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


CASES = {
    "linear": (nn.Linear(3, 4), (2, 5, 3), 2 * 5 * 3 * 4),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 8, 8), 6 * 6 * 6 * 2 * 9),
    "depthwise 1d": (nn.Conv1d(4, 4, 3, groups=4), (1, 4, 9), 4 * 7 * 3),
    "dilated 3d": (nn.Conv3d(1, 2, 2, dilation=2), (1, 1, 4, 4, 4), 2 * 2 * 2 * 2 * 8),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (1, 4, 5, 5), 4 * 25 * 6 * 9),
    "lstm": (nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True), (2, 3, 5), 6 * 2 * 24 * ((5 + 6) + (12 + 6))),
    "gru": (nn.GRU(5, 6, batch_first=True), (1, 3, 5), 3 * 18 * (5 + 6)),
    "attention": (Attention(), (1, 2, 7, 8), 2 * 7 * 7 * (8 + 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (1, 3, 8), 3 * (4 * 64 + 2 * 128) + 2 * 9 * 8),
    "none": (nn.Sequential(nn.ReLU(), nn.LayerNorm(4), nn.Upsample(scale_factor=2, mode="linear")), (1, 2, 4), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_known_layers(name):
    network, shape, expected = CASES[name]
    found = count_network(network.eval(), [torch.zeros(shape)])
    assert (sum(found.macs.values()), found.uncounted) == (expected, [])


def test_a_published_figure():
    network = torchvision().models.resnet18(weights=None).eval()
    found = count_network(network, [torch.zeros(1, 3, 224, 224)])
    assert found.macs == {"float32": 1_814_073_344}
    assert found.operators["aten.convolution"] == 20
    # All of it is read once, but for the counters of batches.
    sizes = [tensor.nbytes for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")]
    assert found.weights_read_bytes == sum(sizes)


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
def test_int8_layers(engine):
    with quantized_engine(engine):
        convolution = torch.ao.nn.quantized.Conv2d(4, 6, 3, groups=2)
        linear = torch.ao.nn.quantized.dynamic.Linear(5, 3)
        recurrent = torch.ao.nn.quantized.dynamic.LSTM(5, 6, batch_first=True)
        image = torch.quantize_per_tensor(torch.zeros(1, 4, 8, 8), 1.0, 0, torch.quint8)
        first = count_network(convolution, [image])
        second = count_network(nn.Sequential(linear, nn.Softmax(-1)), [torch.zeros(2, 5)])
        third = count_network(recurrent, [torch.zeros(1, 3, 5)])
    assert (first.macs, first.weights_read_bytes, first.float_operators) == ({"int8": 6 * 6 * 6 * 18}, 6 * 18, [])
    assert (second.macs, second.weights_read_bytes, second.float_operators) == ({"int8": 30}, 15, ["1 (_softmax)"])
    assert (third.macs, third.weights_read_bytes) == ({"int8": 3 * 24 * 11}, 24 * 11)


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
def test_int8_transposed_convolutions(engine):
    with quantized_engine(engine):
        layers = torch.ao.nn.quantized.ConvTranspose2d(4, 6, 3, 2), torch.ao.nn.quantized.ConvTranspose1d(4, 6, 3)
        found = [
            count_network(layer, [torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, torch.quint8)])
            for layer, shape in zip(layers, [(1, 4, 5, 5), (1, 4, 5)], strict=True)
        ]
    assert [each.macs for each in found] == [{"int8": 4 * 25 * 6 * 9}, {"int8": 4 * 5 * 6 * 3}]
    assert [each.uncounted for each in found] == [[], []]


class Product(nn.Module):
    def forward(self, x):
        return torch.ops.quantized.matmul(x, x.transpose(-2, -1), 1.0, 0)


def test_a_product_of_int8_activations():
    found = count_network(Product(), [torch.quantize_per_tensor(torch.zeros(2, 3, 5), 1.0, 0, torch.quint8)])
    assert (found.macs, found.uncounted) == ({"int8": 2 * 3 * 3 * 5}, [])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.ao.nn.quantized.dynamic.LSTM(5, 6)

    def forward(self, x):
        return self.layer(nn.utils.rnn.pack_sequence([x[:3], x[:2]]))[0].data


def test_packed_sequences_are_not_guessed():
    with quantized_engine("fbgemm"):
        found = count_network(Packed(), [torch.zeros(4, 5)])
    assert found.uncounted and "int8" not in found.macs


def test_embeddings_are_read_by_the_row():
    table = nn.Embedding(1000, 4)
    found = count_network(table, [torch.zeros(1, 3, dtype=torch.int64)])
    assert (found.macs, found.weights_read_bytes) == ({}, 3 * 4 * 4)


def test_what_is_not_known_is_not_guessed():
    found = count_network(nn.Sequential(nn.Flatten(), Distances()), [torch.zeros(2, 3)])
    assert (found.macs, found.uncounted) == ({}, ["1 (aten._cdist_forward)"])


class Distances(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, x)
