"""Files that also return tensors of their own graph, to look at what they compute on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

from ptpipe import StageError, host
from ptpipe_torch import OnnxFile
from ptpipe_torch.model.deployable import Predictor, check_output
from ptpipe_torch.model.onnx_file import open_session
from ptpipe_torch.parity.rankings import RankedTensors

_RANKS = (
    "The network ranks values (topk, sort), and nearly equal ones come in another order in every runtime: return what "
    "is ranked, and rank it outside of the network"
)
_DISTANCES = (
    ". torch.cdist computes distances of more than 25 vectors by products, which are inexact near 0, as a point's to "
    'itself; the file is exact: call it with compute_mode="donot_use_mm_for_euclid_dist"'
)


def write_probe(path: Path, names: Sequence[str], probe: Path) -> None:
    """Write a copy of a file that returns these tensors after its outputs.

    A message of protobuf behind another one is merged with it: outputs are added to a file by appending them.
    """
    outputs = [onnx.ValueInfoProto(name=name) for name in names]  # ONNX Runtime infers their types
    shutil.copyfile(path, probe)
    with probe.open("ab") as file:
        file.write(onnx.ModelProto(graph=onnx.GraphProto(output=outputs)).SerializeToString())


def rankings_of(path: Path) -> list[RankedTensors]:
    """Return the tensors that tell what a file ranks, in the order in which it does."""
    nodes = [node for node in _nodes_of(path) if node.op_type == "TopK"]
    axes = [next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -1) for node in nodes]
    return [RankedTensors(node.output[0], node.output[1], axis) for node, axis in zip(nodes, axes, strict=True)]


@contextmanager
def rankings_named(path: Path) -> Iterator[None]:
    """Add to the StageError of a comparison that the file ranks values, where it does."""
    try:
        yield
    except StageError as error:
        if rankings_of(path):
            has_distances = any(node.op_type == "Sqrt" and "cdist" in node.name for node in _nodes_of(path))
            raise StageError(f"{error}. {_RANKS}{_DISTANCES if has_distances else ''}") from error
        raise


def _nodes_of(path: Path) -> list[onnx.NodeProto]:
    return [*onnx.load(path, load_external_data=False).graph.node]


class RankedFile(OnnxFile):
    """A file whose predictors also return what it ranks."""

    @classmethod
    def of(cls, file: OnnxFile, rankings: Sequence[RankedTensors], probe: Path) -> RankedFile:
        """Write the file to `probe`, with these tensors as outputs."""
        returned = {spec.name for spec in file.own_signature.outputs}
        names = dict.fromkeys(name for ranking in rankings for name in (ranking.values, ranking.positions))
        write_probe(file.path, [name for name in names if name not in returned], probe)
        return cls(probe, file.own_signature, file.precision)

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        with open_session(self.path, num_threads or host.num_threads(), exact_sums=True) as session:
            names = [output.name for output in session.get_outputs()]

            def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
                outputs = dict(zip(names, session.run(names, dict(inputs)), strict=True))
                for spec in self.signature.outputs:
                    check_output(self.path.name, spec, outputs[spec.name], len(next(iter(inputs.values()))))
                return outputs

            yield predict
