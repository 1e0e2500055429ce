"""Models: recipes that name what they may not, or build more than is stored; tensor files that lie."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from .attack import Attack

CNN = "ptpipe_zoo.nets:small_cnn"
MLP = "ptpipe_zoo.nets:mlp"
ARGUMENTS: dict[str, Any] = {"shape_CHW": [1, 8, 8], "num_classes": 3, "width": 4}


IMAGES = {"name": "images", "dtype": "float32", "shape": ["batch", 1, 8, 8]}
SIGNATURE = {"inputs": [IMAGES], "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 3]}]}


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


def recipe(address: str = CNN, arguments: Any = None, **changes: Any) -> str:
    content = {
        "builder": {"address": address, "arguments": {**ARGUMENTS, **(arguments or {})}},
        "signature": SIGNATURE,
        "prepare": [],
        "convert": [],
        "backend": None,
    }
    return json.dumps(content | changes)


def safetensors(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def model(folder: Path, text: str | None = None, tensors: bytes | None = None) -> None:
    """A stored model, sound but for the recipe or the tensors given."""
    (folder / "recipe.json").write_text(recipe() if text is None else text)
    if tensors is not None:
        (folder / "tensors.safetensors").write_bytes(tensors)
        return
    from safetensors.torch import save_file

    from ptpipe_zoo.nets import small_cnn

    save_file(small_cnn(**ARGUMENTS).state_dict(), folder / "tensors.safetensors")


def file(folder: Path, address: str, code: str) -> None:
    """A stored model that says it was built by a function in a file, and two files in the folder's neighbourhood."""
    from ptpipe import source_code

    for name, text in (("evil.py", EVIL), ("named.py", NAMED)):
        (folder / name).write_text(text)
    source = {"source": source_code(folder / code).digest if code.endswith(".py") else code} if code else {}
    content = json.loads(recipe(address))
    content["builder"] |= source
    model(folder, text=json.dumps(content))


def pipe(folder: Path, name: str) -> None:
    model(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)


def entry(shape: list[int], start: int = 0, end: int = 0, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def torch_file() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Payload()))
        file.writestr("archive/version", "3\n")
    return content.getvalue()


REFUSED = "IntegrityError: .* is not (a builder|the address of a builder)"
UNLOADED = "IntegrityError: .*its plugin is not loaded"
TOO_MANY = r"IntegrityError: the recipe builds a network of over \d+ values, far more than are stored"
ADDRESSES = {
    "os:system": REFUSED,
    "builtins:eval": REFUSED,
    "subprocess:Popen": REFUSED,
    "torch.hub:load": REFUSED,
    "torch:load": REFUSED,
    "importlib:import_module": REFUSED,
    "ptpipe_torch:__getattr__": REFUSED,
    "ptpipe_torch:SharedMemory": REFUSED,
    "torch:_inductor": REFUSED,
    "ptpipe_zoo.nets:small_cnn.__globals__": REFUSED,
    "ptpipe_zoo.nets:small_cnn:__call__": REFUSED,
    "ptpipe_zoo.nets:build_seeded": REFUSED,
    "ptpipe_zoo.nets:__builtins__": REFUSED,
    "ptpipe_torch.\0:x": REFUSED,
    "ptpipe_torch.../../evil:x": REFUSED,
    "/tmp/evil.py:x": REFUSED,
    "\x1b]0;PWNED\x07:x": REFUSED,
    "ptpipe_zoo." + "a" * 100_000 + ":x": REFUSED,
    ".:x": REFUSED,
    "": REFUSED,
    "antigravity:x": UNLOADED,
    "idlelib.idle:main": UNLOADED,
    "ptpipe.__main__:main": UNLOADED,
    "ptpipe_zoo.cellar:x": "IntegrityError: .*No module named",
}
BUILDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a width of 8,000": (CNN, {"width": 8000}, TOO_MANY),
    "a width of 10^6": (
        CNN,
        {"width": 10**6},
        "(StageError: .*can't be applied|IntegrityError: .*far more than are stored)",
    ),
    "a width of 10^18": (CNN, {"width": 10**18}, "StageError: .*can't be applied"),
    "a width of 10^3000": (CNN, {"width": 10**3000}, "StageError: .*can't be applied"),
    "a negative width": (CNN, {"width": -4}, "StageError: .*can't be applied"),
    "10^7 classes": (CNN, {"num_classes": 10**7}, TOO_MANY),
    "30,000 layers": (MLP, {"hidden": [1] * 30_000, "dropout": 0}, TOO_MANY),
    "a list for a number": (CNN, {"width": [[]]}, "StageError: .*can't be applied"),
    "an argument too many": (CNN, {"__class__": 1}, "IntegrityError: .*can't be applied as the recipe says"),
    "a transform for a builder": ("ptpipe_quant.transforms:fuse", {}, REFUSED + "|No module|not a builder"),
    "another shape": (CNN, {"width": 5}, "IntegrityError: the tensors don't fit"),
}
BUILDS["30,000 layers"][1].update(width=None)
RECIPES = {
    "nested 100,000 deep": '{"builder": ' + "[" * 100_000,
    "a number of 10^6 digits": recipe().replace('"batch", 3', '"batch", ' + "9" * 1_000_000, 1),
    "NaN for a shape": recipe(signature={**SIGNATURE, "inputs": [{**IMAGES, "shape": ["batch", 1, float("nan"), 8]}]}),
    "a shape of words": recipe(signature={**SIGNATURE, "inputs": [{**IMAGES, "shape": ["1", "8", "8"]}]}),
    "a signature of no tensors": recipe(signature={"inputs": [], "outputs": []}),
    "a tensor named by a path": recipe(signature={**SIGNATURE, "inputs": [{**IMAGES, "name": "../../etc/passwd"}]}),
    "a tensor of objects": recipe(signature={**SIGNATURE, "inputs": [{**IMAGES, "dtype": "object"}]}),
    "a list": "[]",
    "nothing": "",
    "a transform that is text": recipe(convert=["os:system"]),
}
FILES = {
    "that the manifest does not name": (
        "evil.py:touch",
        "evil.py",
        "StageError: .*no option above names this function",
    ),
    "of another folder": ("../evil.py:touch", "evil.py", "IntegrityError: .*is not the address of a builder in a file"),
    "of any folder": ("/tmp/evil.py:touch", "evil.py", "IntegrityError: .*is not the address of a builder in a file"),
    "as a module": ("evil:touch", "", "IntegrityError: .*its plugin is not loaded"),
    "with the code of another": ("named.py:make_net", "evil.py", "StageError: .*is another one"),
    "as a function that the manifest does not name": ("named.py:touch", "named.py", "StageError: .*no option above"),
    "as a function that it imports": ("named.py:system", "named.py", "StageError: .*no option above"),
    "and its code by a path": ("named.py:make_net", "/etc/passwd", "StageError: .*is another one"),
}
"""What the recipe names, the file whose digest it has, what comes of it. A manifest names `named.py:make_net`."""
EVIL = "import os\nfrom os import system\nos.system('touch canary')\ndef touch(**_): os.system('touch canary')\n"
NAMED = "from os import system\ndef touch(**_): system('touch canary')\ndef make_net(**_): raise ValueError\n"
HEADERS = {
    "a header of 2^63 bytes": safetensors({}, length=2**63),
    "a header beyond the file": safetensors({}, length=10**7),
    "a header of 99 MB": safetensors({}, length=99 * 10**6),
    "values beyond the file": safetensors({"0.weight": entry([1 << 40], 0, 1 << 42)}),
    "a shape of 2^124": safetensors({"0.weight": entry([1 << 62, 1 << 62], 0, 4)}, bytes(4)),
    "a shape of many zeros": safetensors({"0.weight": entry([0, 1 << 62], 0, 0)}),
    "a negative shape": safetensors({"0.weight": entry([-1], 0, 4)}, bytes(4)),
    "overlapping values": safetensors({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
    "an unknown type": safetensors({"a": entry([1], 0, 4, "PICKLE")}, bytes(4)),
    "nested 100,000 deep": safetensors(b"[" * 100_000),
    "names of paths": safetensors({"../../evil": entry([1], 0, 4)}, bytes(4)),
    "a name of escapes": safetensors({"\x1b]0;PWNED\x07\n": entry([1], 0, 4)}, bytes(4)),
    "no text": safetensors(b"\xff\xfe{}"),
    "a pickle": pickle.dumps(Payload()),
    "a file of torch.save": torch_file(),
    "nothing": b"",
}

ATTACKS = [
    *(
        Attack(f"recipe of {address[:40]!r}", partial(model, text=recipe(address)), "model", expect)
        for address, expect in ADDRESSES.items()
    ),
    *(
        Attack(
            f"recipe with {name}",
            lambda folder, address=address, changes=changes: build(folder, address, changes),
            "model",
            expect,
        )
        for name, (address, changes, expect) in BUILDS.items()
    ),
    *(
        Attack(f"recipe of a file {name}", partial(file, address=address, code=code), "model_of_a_file", expect)
        for name, (address, code, expect) in FILES.items()
    ),
    *(
        Attack(f"recipe, {name}", partial(model, text=text), "model", "IntegrityError: not a model recipe")
        for name, text in RECIPES.items()
    ),
    *(
        Attack(
            f"tensors, {name}", partial(model, tensors=content), "model", "IntegrityError: .*(can't be read|don't fit)"
        )
        for name, content in HEADERS.items()
    ),
    Attack(
        "tensors, 20,000 empty ones",
        lambda folder: model(folder, tensors=safetensors({f"{number}": entry([0]) for number in range(20_000)})),
        "model",
        "IntegrityError: the tensors don't fit",
        peak_mb=400,
    ),
    Attack("tensors, a pipe", partial(pipe, name="tensors.safetensors"), "model", "IntegrityError: .*regular"),
    Attack("recipe, a pipe", partial(pipe, name="recipe.json"), "model", "IntegrityError: .*regular"),
    Attack("a sound model", model, "model", None),
]


def build(folder: Path, address: str, changes: dict[str, Any]) -> None:
    text = json.loads(recipe(address))
    text["builder"]["arguments"] = {name: value for name, value in (ARGUMENTS | changes).items() if value is not None}
    model(folder, text=json.dumps(text))
