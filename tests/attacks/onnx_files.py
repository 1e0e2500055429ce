"""ONNX files: tensors that are in other files, sizes and depths that lie, graphs that fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .attack import Attack


def external(location: str = "weights.bin", **more: str) -> Any:
    from onnx import TensorProto

    tensor = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[5, 12])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": "240", **more}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def weights() -> Any:
    import numpy as np
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ones((5, 12), np.float32), "weights")


def proto(nodes: list[Any] | None = None, *initializers: Any, ops: int = 17) -> Any:
    """A linear layer, unless `nodes` are given."""
    from onnx import TensorProto, helper

    linear = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weights"], ["logits"], transB=1),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("images", ["N", 3, 2, 2]), ("logits", ["N", 5]))
    ]
    graph = helper.make_graph(nodes or linear, "g", ends[:1], ends[1:], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", ops)], ir_version=8)


def sound() -> Any:
    return proto(None, weights())


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    from onnx import helper

    return helper.make_node(op, inputs, outputs, **attributes)


SIGNATURE = {
    "inputs": [{"name": "images", "dtype": "float32", "shape": ["batch", 3, 2, 2]}],
    "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 5]}],
}


def write(folder: Path, make: Callable[[], Any]) -> None:
    made = make()
    (folder / "model.onnx").write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    (folder / "weights.bin").write_bytes(bytes(240))
    (folder / "copy").mkdir()
    info = {"signature": SIGNATURE, "precision": "float32", "parity": {}}
    (folder / "info.json").write_text(json.dumps(info))


def in_constant() -> Any:
    return proto([node("Constant", [], ["weights"], value=external()), *proto().graph.node])


def in_subgraph() -> Any:
    from onnx import TensorProto, helper

    out = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    branch = helper.make_graph([node("Identity", ["weights"], ["inner"])], "branch", [], out, [external()])
    chosen = node("If", ["yes"], ["outer"], then_branch=branch, else_branch=branch)
    return proto([node("Constant", [], ["yes"], value=helper.make_tensor("t", TensorProto.BOOL, [], [1])), chosen])


def in_function() -> Any:
    from onnx import helper

    model = proto(None, weights())
    body = [node("Constant", [], ["c"], value=external())]
    model.functions.append(helper.make_function("own", "F", [], ["c"], body, [helper.make_opsetid("", 17)]))
    return model


def in_function_default() -> Any:
    from onnx import helper

    model = in_function()
    del model.functions[0].node[:]
    model.functions[0].attribute_proto.append(helper.make_attribute("a", external()))
    return model


def in_training() -> Any:
    model = proto(None, weights())
    model.training_info.add().initialization.initializer.append(external())
    return model


def in_sparse() -> Any:
    from onnx import SparseTensorProto

    model = proto()
    model.graph.sparse_initializer.append(SparseTensorProto(values=external(), indices=external(), dims=[5, 12]))
    return model


def in_list() -> Any:
    from onnx import AttributeProto

    model = proto(None, weights())
    model.graph.node[0].attribute.add(name="x", type=AttributeProto.TENSORS).tensors.append(external())
    return model


def without_data() -> Any:
    tensor = external()
    tensor.ClearField("external_data")
    return proto(None, tensor)


def padded_tag() -> bytes:
    """The same file, the numbers of its fields written in more bytes than they need."""
    tensor = external().SerializeToString().replace(b"\x70\x01", b"\xf0\x00\x01")
    model = proto()
    graph = model.graph.SerializeToString() + b"\x2a" + length(tensor) + tensor
    model.ClearField("graph")
    return model.SerializeToString() + b"\xba\x00" + length(graph) + graph


def length(content: bytes) -> bytes:
    value, found = len(content), b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def nested(depth: int) -> bytes:
    """A graph in an attribute in a node of a graph, and so on."""
    content = b""
    for _ in range(depth):
        content = b"\x32" + length(content) + content
        content = b"\x2a" + length(content) + content
        content = b"\x0a" + length(content) + content
    return b"\x3a" + length(content) + content


def absurd(dims: list[int]) -> Any:
    tensor = weights()
    tensor.dims[:] = dims
    return proto(None, tensor)


def constant_of_shape(size: int) -> Any:
    import numpy as np
    from onnx import numpy_helper

    nodes = [node("ConstantOfShape", ["size"], ["c"]), node("ReduceMax", ["c"], ["logits"], keepdims=0)]
    return proto(nodes, numpy_helper.from_array(np.array([size], np.int64), "size"))


def reshaped() -> Any:
    import numpy as np
    from onnx import numpy_helper

    nodes = [node("Reshape", ["images", "size"], ["logits"])]
    return proto(nodes, numpy_helper.from_array(np.array([7, 5], np.int64), "size"))


def named(name: str) -> Any:
    model = reshaped()
    model.graph.node[0].name = name
    return model


def unknown_op() -> Any:
    return proto([node("\x1b]0;PWNED\x07\n" * 99, ["images"], ["logits"])])


def pipe(folder: Path) -> None:
    write(folder, sound)
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")


def info(folder: Path, text: str) -> None:
    write(folder, sound)
    (folder / "info.json").write_text(text)


def linked(folder: Path, make: Callable[[], Any]) -> None:
    """The file that the tensors are in is a link to one outside."""
    write(folder, make)
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").symlink_to("/etc/passwd")


def pipe_of_weights(folder: Path) -> None:
    write(folder, lambda: proto(None, external()))
    (folder / "weights.bin").unlink()
    os.mkfifo(folder / "weights.bin")


def large(folder: Path, make: Callable[[], Any]) -> None:
    write(folder, make)
    os.truncate(folder / "weights.bin", 1 << 32)


def many() -> Any:
    """The same megabytes, thousands of times."""
    return proto(None, *(external(length=str(1 << 20)) for _ in range(3000)))


OTHER_FILES = "model.onnx keeps tensors in other files"
CANNOT_RUN = r"StageError: ONNX Runtime can't run model\.onnx: ."
EXTERNAL: dict[str, Callable[[], Any]] = {
    "an initializer": lambda: proto(None, external()),
    "an initializer, ../": lambda: proto(None, external("../../etc/passwd")),
    "an initializer, /etc/passwd": lambda: proto(None, external("/etc/passwd")),
    "memory": lambda: proto(None, external("*/_ORT_MEM_ADDR_/*", offset="4096")),
    "a constant": in_constant,
    "a subgraph": in_subgraph,
    "a function": in_function,
    "a function's default": in_function_default,
    "training": in_training,
    "a sparse tensor": in_sparse,
    "a list of tensors": in_list,
    "a tensor without a place": without_data,
    "padded numbers": padded_tag,
}
NOT_READ: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"linked, {name}": (partial(linked, make=make), "a symbolic link is on its path")
        for name, make in EXTERNAL.items()
        if name not in ("an initializer, ../", "an initializer, /etc/passwd", "memory", "a tensor without a place")
    },
    "../": (partial(write, make=EXTERNAL["an initializer, ../"]), "it leads out of the folder"),
    "/etc/passwd": (partial(write, make=EXTERNAL["an initializer, /etc/passwd"]), "it leads out of the folder"),
    "memory": (partial(write, make=EXTERNAL["memory"]), "No such file"),
    "without a place": (partial(write, make=without_data), "it names no file"),
    "a name of escapes": (partial(write, make=lambda: proto(None, external("\x1b[31m\n\u202e" * 500))), "not read"),
    "a pipe": (pipe_of_weights, "not a regular file"),
    "beyond the end": (partial(write, make=lambda: proto(None, external(offset="16"))), "it has 240 bytes"),
    "a negative offset": (partial(write, make=lambda: proto(None, external(offset="-16"))), "is no number of bytes"),
    "10^6 digits": (partial(write, make=lambda: proto(None, external(length="9" * 10**6))), "is no number of bytes"),
    "4 GiB": (partial(large, make=lambda: proto(None, external(length=str(1 << 32)))), "more than 2 GiB"),
    "3 GiB of the same": (partial(large, make=many), "more than 2 GiB"),
}
FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: b"", CANNOT_RUN),
    "cut short": (lambda: proto(None, weights()).SerializeToString()[:-99], CANNOT_RUN),
    "10,000 graphs deep": (lambda: nested(10_000), CANNOT_RUN + ".*nested too deeply"),
    "90 graphs deep": (lambda: nested(30), CANNOT_RUN),
    "dims of 2^60": (lambda: absurd([5, 1 << 60]), CANNOT_RUN),
    "dims of 2^33": (lambda: absurd([1 << 33, 12]), CANNOT_RUN),
    "negative dims": (lambda: absurd([-5, -12]), CANNOT_RUN),
    "a constant of 2^40": (lambda: constant_of_shape(1 << 40), CANNOT_RUN),
    "a constant of 2^62": (lambda: constant_of_shape(1 << 62), CANNOT_RUN),
    "one logit": (lambda: constant_of_shape(9), r"StageError: .*something other than logits"),
    "a shape that fits nothing": (reshaped, CANNOT_RUN),
    "a name of escapes": (lambda: named("\x1b[31m\n\u202e" * 500), CANNOT_RUN),
    "an unknown operator": (unknown_op, CANNOT_RUN),
    "opset 99": (lambda: proto(None, weights(), ops=99), CANNOT_RUN),
    "a pickle": (lambda: b"cos\nsystem\n(S'touch canary'\ntR.", CANNOT_RUN),
}
INFOS = {
    "nested": "[" * 100_000,
    "a number of 10^6 digits": '{"signature": {"inputs": ' + "9" * 1_000_000 + "}}",
    "no shape": '{"signature": {"inputs": [{"name": "images", "dtype": "float32", "shape": [NaN]}], "outputs": []}}',
    "more members": json.dumps({"signature": SIGNATURE, "path": "/etc/passwd"}),
}

ATTACKS = [
    *(
        Attack(f"ONNX, other files: {name}, {load}", partial(write, make=make), load, f"{error}: .*{OTHER_FILES}")
        for name, make in EXTERNAL.items()
        for load, error in (("onnx", "StageError"), ("stored_onnx", "IntegrityError"), ("saved_onnx", "StageError"))
    ),
    *(
        Attack(f"ONNX, external data: {name}, {load}", make, load, f"StageError: .*{reason}")
        for name, (make, reason) in NOT_READ.items()
        for load in ("foreign_onnx", "foreign_onnx_key")
    ),
    *(Attack(f"ONNX, {name}", partial(write, make=make), "onnx", expect) for name, (make, expect) in FAILING.items()),
    *(
        Attack(
            f"ONNX, info {name}", partial(info, text=text), "stored_onnx", r"IntegrityError: info\.json can't be read"
        )
        for name, text in INFOS.items()
    ),
    *(
        Attack(f"ONNX, a pipe, {load}", pipe, load, "Error: .*not a regular file")
        for load in ("onnx", "stored_onnx", "saved_onnx")
    ),
    *(
        Attack(f"ONNX, external data in its folder: {name}", partial(write, make=EXTERNAL[name]), "foreign_onnx", None)
        for name in ("an initializer", "a function's default", "training", "a sparse tensor", "padded numbers")
    ),
    Attack("ONNX, a sound file", partial(write, make=sound), "onnx", None),
]
