"""An ONNX file as an artifact, run by ONNX Runtime on the CPU."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, JsonValue

from ptpipe import JSON, IntegrityError, StageError, host
from ptpipe_torch.data.raw_form import NORMALIZED, InputForm
from ptpipe_torch.model.deployable import Deployable, Predictor, check_output
from ptpipe_torch.model.exact_session import exact_session, saturates_unlike_target
from ptpipe_torch.model.fixed_batches import run_in_pieces
from ptpipe_torch.model.onnx_bytes import is_self_contained
from ptpipe_torch.model.signature import Signature, TensorSpec
from ptpipe_torch.runtime import released_memory

if TYPE_CHECKING:
    import numpy.typing as npt

_MODEL, _VECTORS, _INFO = "model.onnx", "model.vectors.npz", "info.json"
_FATAL = 4


@dataclass(frozen=True)
class FileInterface:
    """What a file takes and returns that has preprocessing or postprocessing inside."""

    input_form: InputForm
    signature: Signature
    """The file's own: raw inputs, and further outputs after the model's."""

    def to_json(self) -> dict[str, JSON]:
        """Return the fields."""
        return {"input_form": self.input_form, "signature": self.signature.to_json()}


class OnnxFile(Deployable):
    """One self-contained `.onnx` file. Immutable.

    One exported for a single batch size predicts other batches in pieces of that size, the last one filled up.

    `signature`: of the model in it; other inputs or outputs are an error. `interface`: of a file that takes raw inputs
    or has further outputs; predictors take the former, and leave the latter out. `precision`: `float32` (`float16` and
    others where most weights are), `int8` or `int8 dynamic`. `parity`: how its outputs compared with the torch model's
    when it was written. `test_vectors`: a file with inputs and outputs, for `ptpipe check`, that is shipped beside it;
    None if there is none.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        precision: str = "float32",
        parity: Mapping[str, JSON] = MappingProxyType({}),
        test_vectors: Path | None = None,
        interface: FileInterface | None = None,
    ) -> None:
        self.path = path
        self._signature = signature
        self.precision = precision
        self.parity = parity
        self.test_vectors = test_vectors
        self.interface = interface
        self._exact_sums = False

    def with_exact_sums(self) -> OnnxFile:
        """Return the same file with predictors that compute what the file says on every processor.

        On x86 processors without VNNI, ONNX Runtime's usual kernels add products in 16 bits, which can saturate. A
        float file is returned as it is.
        """
        if "float" in self.precision:
            return self
        exact = copy.copy(self)
        exact._exact_sums = True
        return exact

    def as_on_target(self) -> OnnxFile:
        """Return the file with predictors that compute what the processors do that it was exported for.

        A file for qnnpack has exact sums, also where usual kernels saturate. Any other is returned as it is: it runs as
        an application here would run it.
        """
        if self.precision != "float32" and saturates_unlike_target(self.path):
            return self.with_exact_sums()
        return self

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def input_form(self) -> InputForm:
        return NORMALIZED if self.interface is None else self.interface.input_form

    @property
    def own_signature(self) -> Signature:
        """Of the file, with its preprocessing and postprocessing."""
        return self._signature if self.interface is None else self.interface.signature

    @property
    def format(self) -> str:
        return f"onnx {self.precision}"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def predictor(self, num_threads: int | None = None) -> Iterator[Predictor]:
        with released_memory():
            sessions = [_session(self.path, num_threads or host.num_threads(), exact_sums=self._exact_sums)]
            signature = self.signature
            _check_names(self.path, "inputs", sessions[0].get_inputs(), self.own_signature.inputs)
            _check_names(self.path, "outputs", sessions[0].get_outputs(), self.own_signature.outputs)
            names = [spec.name for spec in signature.outputs]
            fixed = _fixed_batch_size(sessions[0].get_inputs())

            def predict(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
                with one_line_errors(self.path):
                    feed = {spec.name: inputs[spec.name] for spec in signature.inputs}
                    outputs = run_in_pieces(lambda piece: sessions[0].run(names, dict(piece)), feed, fixed)
                num_samples = len(inputs[signature.inputs[0].name])
                for spec, output in zip(signature.outputs, outputs, strict=True):
                    check_output(self.path.name, spec, output, num_samples)
                return dict(zip(names, outputs, strict=True))

            try:
                yield predict
            finally:
                sessions.clear()  # the caller may keep `predict`, which would keep the weights

    def save(self, folder: Path) -> None:
        """Copy the file. Raises StageError where it refers to others, which would be missing beside the copy."""
        _check_self_contained(self.path)
        shutil.copyfile(self.path, folder / _MODEL)
        if self.test_vectors is not None:
            shutil.copyfile(self.test_vectors, folder / _VECTORS)
        info = {
            "signature": self.signature.to_json(),
            "precision": self.precision,
            "parity": dict(self.parity),
            "interface": None if self.interface is None else self.interface.to_json(),
        }
        (folder / _INFO).write_text(json.dumps(info, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read back what `save` wrote. Raises IntegrityError where `info.json` is damaged or `model.onnx` altered."""
        try:
            info = _Info.model_validate_json((folder / _INFO).read_bytes())
            signature = Signature.from_json(info.signature)
            interface = None if info.interface is None else info.interface.read()
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{_INFO} can't be read: {' '.join(str(error).split())[:300]}") from error
        try:
            _check_self_contained(folder / _MODEL)
        except StageError as error:
            raise IntegrityError(str(error)) from error
        vectors = folder / _VECTORS
        stored_vectors = vectors if vectors.is_file() else None
        return cls(folder / _MODEL, signature, info.precision, info.parity, stored_vectors, interface)

    @classmethod
    def deliverables(cls, folder: Path) -> tuple[str, ...]:
        return tuple(name for name in (_MODEL, _VECTORS) if (folder / name).is_file())

    def summary(self) -> dict[str, JSON]:
        return {"format": self.format, "size_bytes": self.size_bytes, "parity": dict(self.parity)}


class _Interface(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input_form: InputForm
    signature: dict[str, JsonValue]

    def read(self) -> FileInterface:
        return FileInterface(self.input_form, Signature.from_json(self.signature))


class _Info(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    signature: dict[str, JsonValue]
    precision: str = "float32"
    parity: dict[str, JsonValue] = {}
    interface: _Interface | None = None


def session_options(num_threads: int) -> Any:
    """Return the options of every session: nothing is logged to the terminal, since all errors are raised."""
    from ptpipe_torch.ort import ort

    ort.set_default_logger_severity(_FATAL)  # its allocators log there, whatever the session's options are
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL
    return options


@contextmanager
def open_session(path: Path, num_threads: int, *, exact_sums: bool = False) -> Iterator[Any]:
    """Yield a session of a self-contained file. Raises StageError, in one line, for one that can't be loaded or run.

    `exact_sums`: see `exact_session`.
    """
    with one_line_errors(path):
        yield _session(path, num_threads, exact_sums=exact_sums)


def _session(path: Path, num_threads: int, *, exact_sums: bool) -> Any:
    from ptpipe_torch.ort import ort

    _check_self_contained(path)
    options = session_options(num_threads)
    with one_line_errors(path), redirect_stdout(None):  # for some files it prints that it tries again
        if exact_sums:
            return exact_session(path, options)
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _fixed_batch_size(inputs: Sequence[Any]) -> int | None:
    """Return the only batch size that a session's inputs can have; None where they take any."""
    sizes = {value.shape[0] for value in inputs if value.shape and isinstance(value.shape[0], int)}
    return min(sizes) if sizes else None


def _check_names(path: Path, side: str, values: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    found, expected = ({value.name for value in tensors} for tensors in (values, specs))
    if found != expected:
        raise StageError(f"{path.name} has the {side} {', '.join(sorted(found))}, not {', '.join(sorted(expected))}")


def _check_self_contained(path: Path) -> None:
    with one_line_errors(path):
        if is_self_contained(path):
            return
    raise StageError(
        f"{path.name} keeps tensors in other files, which are not read: write them into it "
        "(onnx.save_model(onnx.load(PATH), PATH))"
    )


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Raise StageError with one line in the place of whatever ONNX Runtime raises for this file inside the `with`."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        # The file decides what an error quotes: names with newlines, escapes, of any length.
        reason = "".join(char if char.isprintable() else " " for char in str(error))
        raise StageError(f"ONNX Runtime can't run {path.name}: {' '.join(reason.split())[:500]}") from error
