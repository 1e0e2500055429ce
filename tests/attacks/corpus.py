"""All attacks, by the kind of file."""

from __future__ import annotations

from . import alterations, archives, folders, images, manifests, models, onnx_files, shards, stored, stored_texts

ATTACKS = [
    *images.ATTACKS,
    *folders.ATTACKS,
    *archives.ATTACKS,
    *models.ATTACKS,
    *onnx_files.ATTACKS,
    *stored.ATTACKS,
    *shards.ATTACKS,
    *stored_texts.ATTACKS,
    *manifests.ATTACKS,
    *alterations.ATTACKS,
]
