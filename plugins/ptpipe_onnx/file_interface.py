"""What a file takes and returns beyond the tensors of its model: raw inputs, probabilities and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ptpipe import StageError
from ptpipe_onnx import graph
from ptpipe_onnx.latency_passes import merge_axes_behind_softmax
from ptpipe_onnx.postprocessing import AddedOutputs, add_postprocessing
from ptpipe_onnx.preprocessing import add_preprocessing
from ptpipe_onnx.resizing import described, of_any_size
from ptpipe_torch import Data, FileInterface, InputForm, OnnxFile, RawForm, Signature, TensorSpec

_IMAGE_AXES = 4


def raw_forms(data: Data, form: InputForm, inputs: Sequence[TensorSpec], *, resize: bool = False) -> dict[str, RawForm]:
    """Return the raw form of each input column. `inputs`: of the network. `resize`: of images of any size.

    Raises StageError where no column is normalized, or none can be resized.
    """
    forms = {name: info.raw_form(name, form) for name, info in data.info.inputs.items()}
    if not any(of.scale_C for of in forms.values()):
        raise StageError(
            f"preprocessing: {form}: {data.info.name} has no inputs that are normalized ({', '.join(forms)}): leave "
            "preprocessing out"
        )
    if resize:
        if any(len(spec.shape) == _IMAGE_AXES and spec.symbols for spec in inputs):
            raise StageError("resize: the network takes images of any size (model.dynamic_shapes): leave resize out")
        return of_any_size(data, forms)
    return {spec.name: _with_axes_of(spec, replace(forms[spec.name], resizing=None)) for spec in inputs}


def _with_axes_of(spec: TensorSpec, form: RawForm) -> RawForm:
    """Return a raw form whose axes have the sizes, and the symbols, of the normalized input."""
    if not form.scale_C or len(spec.shape) != len(form.spec.shape):
        return form
    order = form.transpose or range(len(spec.shape))
    sizes = dict(zip(order, spec.shape, strict=True))
    return replace(form, spec=replace(form.spec, shape=tuple(sizes[axis] for axis in range(len(sizes)))))


def with_interface(
    network: OnnxFile, path: Path, form: InputForm, forms: Mapping[str, RawForm], added: Sequence[AddedOutputs]
) -> OnnxFile:
    """Write a file around the network of another one, whose outputs it keeps.

    `forms`: of the inputs, by name; empty: they stay normalized. `added`: further outputs.
    """
    content, former = ir.load(network.path), _without_normalization(network.signature, forms)
    if forms:
        add_preprocessing(content.graph, forms)
    add_postprocessing(content.graph, added)
    merge_axes_behind_softmax(content.graph)
    inputs = [forms[spec.name].spec if forms else spec for spec in former.inputs]
    meanings = dict(former.meanings)
    for own in added:
        meanings |= {spec.name: former.meanings.get(own.scores.name, ()) for spec in own.specs}
    outputs = (*former.outputs, *(spec for own in added for spec in own.specs))
    signature = Signature(tuple(inputs), outputs, {name: words for name, words in meanings.items() if words})
    graph.set_shapes(content.graph, signature)
    content.metadata_props["signature"] = str(signature)
    content.metadata_props["meanings"] = json.dumps(signature.to_json()["meanings"])
    content.metadata_props["preprocessing"] = form if forms else "none"
    content.metadata_props["resize"] = described(former, forms) or "none"
    content.metadata_props["postprocessing"] = ", ".join(own.function for own in added) or "none"
    graph.write(content, path)
    return OnnxFile(path, former, network.precision, interface=FileInterface(form, signature))


def _without_normalization(signature: Signature, forms: Mapping[str, RawForm]) -> Signature:
    """Return the signature with the meaning of raw values where the file normalizes them itself."""
    raw = {name: form.meaning for name, form in forms.items() if form.meaning is not None}
    meanings = {name: raw.get(name, words) for name, words in signature.meanings.items()}
    return replace(signature, meanings={name: words for name, words in meanings.items() if words})


def whole(file: OnnxFile) -> OnnxFile:
    """Return a file as one whose predictors return the further outputs too."""
    return OnnxFile(file.path, file.own_signature, file.precision)
