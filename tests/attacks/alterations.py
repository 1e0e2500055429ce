"""Sound files of each kind with a few bytes altered, at random but the same in each run."""

from __future__ import annotations

from functools import partial

from . import archives, images, models, onnx_files, stored, stored_texts
from .attack import Attack

LIBTIFF = r"([ -~]+\n)*"
"""It writes its errors to stderr itself; names in the file do not get into them."""
KINDS = {
    "images": (images.samples, "altered_images", LIBTIFF),
    "IDX": (archives.idx, "altered_idx", ""),
    "CIFAR": (archives.cifar, "altered_cifar", ""),
    "models": (models.model, "altered_model", ""),
    "stored data": (stored.data, "altered_data", ""),
    "stored texts": (stored_texts.texts, "altered_data", ""),
    "ONNX": (partial(onnx_files.write, make=onnx_files.sound), "altered_onnx", ""),
}

ATTACKS = [
    Attack(f"{number} {name}", make, load, None, peak_mb, limit_s, prints, is_thorough=number == "1,500 altered")
    for name, (make, load, prints) in KINDS.items()
    for number, peak_mb, limit_s in (("30 altered", 150, 20), ("1,500 altered", 400, 250))
]
