"""The classic attacks on readers of YAML; a fuzzer of manifests is elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .attack import Attack

TEXTS = {
    "a tag of Python": "version: 1\nname: !!python/object/apply:os.system ['touch canary']\n",
    "a tag of a class": "version: 1\nname: !!python/name:os.system\n",
    "an alias bomb": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
    "nested 100,000 deep": "stages: " + "[" * 100_000,
    "a number of 10^6 digits": "version: " + "9" * 1_000_000 + "\n",
    "nothing": "",
    "a binary": "version: 1\nname: \0\x1b[2J\n",
}


def write(folder: Path, text: str) -> None:
    (folder / "m.yaml").write_text(text)


ATTACKS = [
    Attack(f"manifest, {name}", partial(write, text=text), "manifest", "ManifestError: .")
    for name, text in TEXTS.items()
]
