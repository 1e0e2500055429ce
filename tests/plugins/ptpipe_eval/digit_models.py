"""Linear classifiers as a third party's plugin in one file may bring them; the processes that time them load it too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from torch import nn

from ptpipe import Check, hookimpl
from ptpipe_torch import BATCH, Deployable, Predictor, Signature, TensorSpec, builder


@hookimpl
def ptpipe_doctor() -> Iterable[Check]:
    return []


@builder
def linear_net(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


class LinearModel(Deployable):
    """A format of its own, as a third party's plugin may bring one: weights in numpy."""

    def __init__(
        self, weights_KD: np.ndarray, biases_K: np.ndarray, shape_CHW: tuple[int, int, int] = (1, 8, 8)
    ) -> None:
        self.weights_KD, self.biases_K, self._shape = weights_KD, biases_K, shape_CHW
        self.opened_with: list[int | None] = []

    format = "numpy float32"
    size_bytes = property(lambda self: self.weights_KD.nbytes + self.biases_K.nbytes)
    signature = property(lambda self: _classifier(self._shape, len(self.biases_K)))

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        self.opened_with.append(num_threads)
        yield lambda inputs: {"logits": self.predict(inputs["images"])}

    def predict(self, images_NCHW: np.ndarray) -> np.ndarray:
        assert images_NCHW.flags.c_contiguous and images_NCHW.dtype == np.float32
        return images_NCHW.reshape(len(images_NCHW), -1) @ self.weights_KD.T + self.biases_K

    def save(self, folder: Path) -> None:
        np.save(folder / "weights.npy", self.weights_KD)
        np.save(folder / "biases.npy", self.biases_K)
        np.save(folder / "shape.npy", self._shape)

    @classmethod
    def load(cls, folder: Path) -> Self:
        weights_KD, biases_K, shape = (np.load(folder / f"{name}.npy") for name in ("weights", "biases", "shape"))
        return cls(weights_KD, biases_K, tuple(shape.tolist()))


def _classifier(shape_CHW: tuple[int, int, int], num_classes: int) -> Signature:
    images = TensorSpec("images", "float32", (BATCH, *shape_CHW))
    return Signature((images,), (TensorSpec("logits", "float32", (BATCH, num_classes)),))


class Misbehaving(LinearModel):
    """Does what `mood` says when it predicts."""

    mood = ""

    def predict(self, images_NCHW: np.ndarray) -> np.ndarray:
        if self.mood == "raise":
            raise ValueError("not today")
        if self.mood == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood == "exit":
            os._exit(9)
        if self.mood == "print":
            print("a banner")
            os.write(1, b"another one\n")
        if self.mood == "hang":
            time.sleep(3600)
        return super().predict(images_NCHW)

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "mood.txt").write_text(self.mood)

    @classmethod
    def load(cls, folder: Path) -> Self:
        model = super().load(folder)
        model.mood = (folder / "mood.txt").read_text()
        return model


class Repeated(LinearModel):
    """Computes the same several times over."""

    num_times = 1

    def predict(self, images_NCHW: np.ndarray) -> np.ndarray:
        for _ in range(self.num_times):
            logits = super().predict(images_NCHW)
        return logits

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "times.txt").write_text(str(self.num_times))

    @classmethod
    def load(cls, folder: Path) -> Self:
        model = super().load(folder)
        model.num_times = int((folder / "times.txt").read_text())
        return model
