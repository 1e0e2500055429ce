"""Files that rank values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from onnx import GraphProto, TensorProto, helper
from torch import nn

from ptpipe.events import Notice
from ptpipe_onnx import quantize_onnx
from ptpipe_onnx.quantization.ranked import ranked_nodes, ranks_values
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile, Recipe, builder

from ....signatures import classifier
from ..conftest import RecordedEvents
from .test_post_training import Run


def graph_of(*nodes: tuple[str, list[str], list[str]]) -> GraphProto:
    """Return a graph of operators, inputs and outputs; a node is called as its first output is."""
    made = [helper.make_node(op_type, inputs, outputs, outputs[0]) for op_type, inputs, outputs in nodes]
    return helper.make_graph(made, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)], [])


def test_the_head_of_a_detector_stays_float() -> None:
    graph = graph_of(
        ("Conv", ["x", "w"], ["stem"]),
        ("Relu", ["stem"], ["features"]),
        ("Conv", ["features", "w"], ["boxes"]),
        ("Conv", ["features", "w"], ["scores"]),
        ("TopK", ["scores", "k"], ["best", "places"]),
        ("GatherElements", ["boxes", "places"], ["chosen"]),
        ("Concat", ["chosen", "best"], ["y"]),
    )
    assert ranked_nodes(graph) == ["boxes", "scores", "best", "chosen", "y"]


def test_layers_that_read_what_was_chosen_are_quantized() -> None:
    """As decoders of queries that an encoder's scores choose."""
    graph = graph_of(
        ("MatMul", ["x", "w"], ["encoded"]),
        ("MatMul", ["encoded", "w"], ["scores"]),
        ("ReduceMax", ["scores"], ["highest"]),
        ("TopK", ["highest", "k"], ["best", "places"]),
        ("GatherElements", ["encoded", "places"], ["queries"]),
        ("MatMul", ["queries", "w"], ["decoded"]),
        ("Relu", ["decoded"], ["active"]),
        ("MatMul", ["active", "w"], ["y"]),
    )
    assert ranked_nodes(graph) == ["scores", "highest", "best", "y"]


def test_places_are_not_followed() -> None:
    graph = graph_of(
        ("Conv", ["x", "w"], ["stem"]),
        ("ArgMax", ["stem"], ["places"]),
        ("Gather", ["x", "places"], ["chosen"]),
        ("TopK", ["chosen", "k"], ["best", "order"]),
        ("Conv", ["best", "w"], ["y"]),
    )
    assert ranked_nodes(graph) == ["chosen", "best", "y"]


def test_nothing_is_ranked() -> None:
    graph = graph_of(("Conv", ["x", "w"], ["y"]))
    assert ranked_nodes(graph) == [] and not ranks_values(graph)


@builder
def best_boxes() -> nn.Module:
    """The two boxes of the highest scores; their class as a float."""

    class BestBoxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.boxes, self.scores = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x).relu()
            boxes, scores = 100 * self.boxes(y).flatten(2), self.scores(y).flatten(2).sigmoid()
            highest, places = scores.max(1)[0].topk(2)
            classes = scores.argmax(1).gather(1, places).float()
            chosen = boxes.gather(2, places[:, None].expand(-1, 3, -1))
            return torch.cat([chosen, highest[:, None], classes[:, None]], 1).flatten(1)

    torch.manual_seed(0)
    return BestBoxes()


@pytest.mark.parametrize("optimize", [True, False])
def test_boxes_beside_scores_and_classes(
    optimize: bool, run_export: Callable[..., OnnxFile], digits: Data, run_stage: Run, events: RecordedEvents
) -> None:
    model = Model.from_module(Recipe(FunctionRef.to(best_boxes), classifier((1, 16, 16), 10)), best_boxes())
    file = run_stage(quantize_onnx, run_export(model), digits, optimize=optimize)
    (batch,) = digits.batches("test", batch_size=50, order_N=np.arange(50))
    with file.predictor() as predict:
        found = predict(batch.input_arrays())["logits"].reshape(-1, 5, 2)
    assert np.isin(found[:, 4], (0, 1, 2, 3)).all() == optimize
    assert (len(np.unique(found[:, 3])) > 2) == optimize
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert any("row by row, as the file ranks values (TopK): judge it by a metric" in text for text in texts)
