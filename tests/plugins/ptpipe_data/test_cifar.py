from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data import catalog

NAMES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
RECORD = 3073


def batch(seed: int, num: int = 10) -> bytes:
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (num, RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(num) % 10
    return records.tobytes()


CONTENTS = {name: batch(seed) for seed, name in enumerate(NAMES)}


def archive(contents: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PTPIPE_DATA", str(tmp_path))
    packed = archive(CONTENTS)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(packed)
    (file,) = catalog.CIFAR10.files
    described = replace(file, md5=hashlib.md5(packed).hexdigest(), size_bytes=len(packed))
    monkeypatch.setattr(catalog, "CIFAR10", replace(catalog.CIFAR10, files=(described,), num_per_class=(5, 1)))
    return tmp_path / "cifar10"


def unpack(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    (root / "cifar-10-binary.tar.gz").unlink()
    return folder


def check(data: front.Data) -> None:
    """Each pixel against the definition of the format: red plane, green plane, blue plane, row by row."""
    content = CONTENTS["data_batch_3.bin"]
    record = content[4 * RECORD : 5 * RECORD]
    position = list(data.splits["train"].ids).index("train/00024")
    pixels_HWC = data.splits["train"].inputs["images"].take(np.array([position]))[0]
    for row, column, channel in ((0, 0, 0), (3, 17, 1), (31, 30, 2), (31, 31, 2)):
        assert pixels_HWC[row, column, channel] == record[1 + channel * 1024 + row * 32 + column]
    assert data.splits["train"].targets["labels"].values()[position] == record[0]
    assert data.info.task.class_names[3] == "cat" and data.info.inputs["images"].shape_CHW == (3, 32, 32)
    assert len(data.splits["test"]) == 10


def test_archive(root: Path, ctx: Context, events) -> None:
    check(front.load_cifar10(front.CatalogConfig(val_size=0), ctx))
    assert not events.notices
    assert front.load_cifar10.fingerprint(front.CatalogConfig()) == {
        "cifar-10-binary.tar.gz": catalog.CIFAR10.files[0].md5
    }


def test_folder(root: Path, ctx: Context, events) -> None:
    folder = unpack(root)
    check(front.load_cifar10(front.CatalogConfig(val_size=0), ctx))
    assert "no digest" in events.notices[0]
    before = front.load_cifar10.fingerprint(front.CatalogConfig())
    (folder / "data_batch_2.bin").write_bytes(batch(99))
    assert front.load_cifar10.fingerprint(front.CatalogConfig()) != before


def test_torchvisions_place(root: Path, ctx: Context) -> None:
    unpack(root).rename(root.parent / "cifar-10-batches-bin")
    check(front.load_cifar10(front.CatalogConfig(val_size=0), ctx))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-10], "truncated or altered: it is not the published CIFAR-10"),
        (lambda content: content[:500] + b"\0\0" + content[502:], "truncated or altered"),
    ],
)
def test_altered_archive(root: Path, ctx: Context, change, message: str) -> None:
    path = root / "cifar-10-binary.tar.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StageError, match=message):
        front.load_cifar10(front.CatalogConfig(), ctx)
    with pytest.raises(StageError, match=r"cifar-10-binary\.tar\.gz is damaged or truncated: "):
        front.load_cifar10(front.CatalogConfig(verify=False), ctx)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({name: CONTENTS[name] for name in NAMES[1:]}, "does not contain data_batch_1.bin"),
        (
            CONTENTS | {"data_batch_2.bin": CONTENTS["data_batch_2.bin"][:-1]},
            "data_batch_2.bin is truncated or altered",
        ),
        (CONTENTS | {"test_batch.bin": b""}, "test_batch.bin is truncated"),
    ],
)
def test_own_archive_that_does_not_fit(root: Path, ctx: Context, contents: dict[str, bytes], message: str) -> None:
    (root / "cifar-10-binary.tar.gz").write_bytes(archive(contents))
    with pytest.raises(StageError, match=message):
        front.load_cifar10(front.CatalogConfig(verify=False), ctx)


def test_folder_with_wrong_counts_or_a_batch_missing(root: Path, ctx: Context) -> None:
    folder = unpack(root)
    (folder / "data_batch_1.bin").write_bytes(CONTENTS["data_batch_1.bin"][:RECORD] * 10)
    with pytest.raises(StageError, match="altered: CIFAR-10 has 5 images of each class"):
        front.load_cifar10(front.CatalogConfig(), ctx)
    (folder / "data_batch_1.bin").unlink()
    with pytest.raises(StageError, match=r"cifar-10-batches-bin does not contain data_batch_1\.bin"):
        front.load_cifar10(front.CatalogConfig(), ctx)


def test_no_path_in_an_archive_is_written_to(root: Path, ctx: Context, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    evil = CONTENTS | {"../../../evil.bin": b"x"}
    (root / "cifar-10-binary.tar.gz").write_bytes(archive(evil))
    front.load_cifar10(front.CatalogConfig(verify=False), ctx)
    assert sorted(tmp_path.rglob("*")) == before
