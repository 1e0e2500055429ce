"""Downloads, from servers on the loopback device that respond correctly, wrongly or not at all."""

from __future__ import annotations

import gzip
import hashlib
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import ptpipe_data as front
from ptpipe import Context, StageError
from ptpipe_data import catalog
from ptpipe_data import download as download_module
from ptpipe_data.catalog import CatalogEntry, RemoteFile
from ptpipe_data.download import TimeLimits, download

SHORT = TimeLimits(stall_s=0.8, socket_s=0.3)
PATIENT = TimeLimits(stall_s=20, socket_s=10)
"""For servers that answer: on a busy machine, even one on loopback may take longer than the short limits."""
CONTENT = {"one.gz": b"1" * 300_000, "two.gz": b"2" * 10}


def describe(*mirrors: str, contents: dict[str, bytes] = CONTENT) -> CatalogEntry:
    files = [RemoteFile(name, len(content), hashlib.md5(content).hexdigest()) for name, content in contents.items()]
    return replace(catalog.MNIST, mirrors=mirrors, files=tuple(files))


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer(self)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, content: bytes, announced: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) if announced is None else announced))
    handler.end_headers()
    handler.wfile.write(content)


def honest(handler: BaseHTTPRequestHandler) -> None:
    send(handler, CONTENT[handler.path[1:]])


@contextmanager
def silence() -> Iterator[str]:
    """Accepts connections and never sends a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@contextmanager
def refusing() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}/"


@pytest.fixture(autouse=True)
def no_partial_file_or_thread_remains(tmp_path: Path) -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("download"):
            thread.join(5)  # it may be at its last wait for a socket
    assert [*tmp_path.rglob(".*"), *tmp_path.rglob("tmp*")] == [], "partial files"
    assert [thread for thread in threading.enumerate() if thread.name.startswith("download")] == []


def test_files_arrive_whole(tmp_path: Path) -> None:
    with serving(honest) as url:
        download(describe(url), tmp_path / "cache" / "x", PATIENT)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache" / "x").iterdir()} == CONTENT


def test_existing_files_are_not_downloaded_again(tmp_path: Path) -> None:
    requested = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requested.append(handler.path)
        honest(handler)

    (tmp_path / "one.gz").write_bytes(CONTENT["one.gz"])
    (tmp_path / "two.gz").write_bytes(b"broken")
    with serving(answer) as url:
        download(describe(url), tmp_path, PATIENT)
    assert requested == ["/two.gz"] and (tmp_path / "two.gz").read_bytes() == CONTENT["two.gz"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda handler: handler.send_error(404), "HTTP 404"),
        (
            lambda handler: send(handler, b"<html>log in first</html>"),
            r"not the published file \(received 25 of 300000 bytes\)",
        ),
        (lambda handler: send(handler, b"1" * 300_001), r"not the published file \(received 300001 of 300000 bytes\)"),
        (
            lambda handler: send(handler, b"1" * 1000, announced=300_000),
            r"not the published file \(received 1000 of 300000",
        ),
        (lambda handler: handler.wfile.write(b"\xff nonsense\r\n\r\n"), "nonsense"),
    ],
)
def test_bad_answers(tmp_path: Path, answer: Answer, reason: str) -> None:
    with serving(answer) as bad, pytest.raises(StageError, match=f"could not be downloaded: .*{reason}"):
        download(describe(bad), tmp_path, PATIENT)
    assert list(tmp_path.iterdir()) == []
    with serving(answer) as bad, serving(honest) as good:
        download(describe(bad, good), tmp_path, PATIENT)
    assert {path.name for path in tmp_path.iterdir()} == set(CONTENT)


def test_silent_mirror_is_skipped(tmp_path: Path) -> None:
    with silence() as bad, serving(honest) as good:
        start = time.monotonic()
        download(describe(bad, good), tmp_path, replace(SHORT, stall_s=5))
    assert {path.name for path in tmp_path.iterdir()} == set(CONTENT)
    assert time.monotonic() - start < 2 * SHORT.socket_s  # and only once


@pytest.mark.parametrize("mirror", [silence, refusing])
def test_no_network(tmp_path: Path, mirror: Callable) -> None:
    start = time.monotonic()
    with (
        mirror() as one,
        mirror() as two,
        mirror() as three,
        pytest.raises(StageError, match="could not be downloaded"),
    ):
        download(describe(one, two, three, one, two, three), tmp_path, SHORT)
    assert time.monotonic() - start < SHORT.stall_s + SHORT.socket_s + 1
    assert list(tmp_path.iterdir()) == []


def test_trickle_is_no_network(tmp_path: Path) -> None:
    stop = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.05):
            handler.wfile.write(b"1")

    start = time.monotonic()
    try:
        with serving(trickle) as url, pytest.raises(StageError, match=r"no response for 0\.8 s"):
            try:
                download(describe(url), tmp_path, SHORT)
            finally:
                stop.set()
    finally:
        stop.set()
    assert time.monotonic() - start < 3


def test_slow_but_steady_arrives(tmp_path: Path) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        content = CONTENT[handler.path[1:]]
        handler.send_response(200)
        handler.end_headers()
        for start in range(0, len(content), 70_000):
            handler.wfile.write(content[start : start + 70_000])
            time.sleep(0.25)

    with serving(slowly) as url:
        download(describe(url), tmp_path, replace(SHORT, socket_s=5))  # takes longer than the stall that ends it
    assert (tmp_path / "one.gz").read_bytes() == CONTENT["one.gz"]


def test_hang_in_the_middle(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        send(handler, CONTENT["one.gz"][:100_000], announced=300_000)
        release.wait(10)

    with serving(hang) as url:
        try:
            with pytest.raises(StageError, match="could not be downloaded"):
                download(describe(url, url, url, url), tmp_path, SHORT)
        finally:
            release.set()
    assert list(tmp_path.iterdir()) == []


def test_name_lookup_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def lookup(*arguments: object, **keywords: object) -> list[object]:
        release.wait(20)
        raise socket.gaierror("released")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    start = time.monotonic()
    with pytest.raises(StageError, match=r"no response for 0\.8 s"):
        download(describe("http://nowhere.invalid/"), tmp_path, SHORT)
    assert time.monotonic() - start < 2
    release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("download")]:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_default_limits_end_within_ten_seconds() -> None:
    limits = TimeLimits()
    assert limits.stall_s + limits.socket_s <= 9.5


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with serving(honest) as url, pytest.raises(StageError, match=r"could not be stored in .*/file/x: Not a directory"):
        download(describe(url), tmp_path / "file" / "x", PATIENT)


def test_downloads_write_nothing_to_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.gz").write_bytes(b"of another version")
    with serving(honest) as url:
        download(describe(url), tmp_path, PATIENT)
    assert capfd.readouterr() == ("", "")


def test_two_processes_at_once(tmp_path: Path) -> None:
    both_started = threading.Barrier(2)

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/one.gz":
            both_started.wait(60)
        honest(handler)

    code = """
import sys
from pathlib import Path
from dataclasses import replace
from ptpipe_data import catalog, download
files = tuple(catalog.RemoteFile(name, int(size), md5) for name, size, md5 in zip(*[iter(sys.argv[3:])] * 3))
entry = replace(catalog.MNIST, mirrors=(sys.argv[1],), files=files)
download.download(entry, Path(sys.argv[2]), download.TimeLimits(60, 60))
"""
    with serving(slowly) as url:
        files = [text for f in describe(url).files for text in (f.name, str(f.size_bytes), f.md5)]
        command = [sys.executable, "-c", code, url, str(tmp_path / "new"), *files]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert [(process.communicate(timeout=60)[1], process.returncode) for process in processes] == [("", 0)] * 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == CONTENT


@pytest.mark.slow
def test_stage_without_network_gives_up_in_time_and_falls_back_to_digits(
    ctx: Context, events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silence() as one, silence() as two:
        monkeypatch.setattr(catalog, "MNIST", replace(catalog.MNIST, mirrors=(one, two)))
        start = time.monotonic()
        assert list(front.load_mnist.preflight(front.MnistConfig(fallback="digits"))) == []
        assert time.monotonic() - start < 10
    assert "bundled digits instead" in str(
        front.load_mnist(front.MnistConfig(fallback="digits"), ctx) and events.notices
    )


def test_preflight_fetches_and_the_stage_reads(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx_set: Callable
) -> None:
    write_idx_set(tmp_path / "server")
    files = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    config = front.MnistConfig(fallback="digits", val_size=10, calibration_size=5)
    with serving(lambda handler: send(handler, files[handler.path[1:]])) as url:
        described = describe(url, contents={file.name: files[file.name] for file in catalog.MNIST.files})
        monkeypatch.setattr(catalog, "MNIST", described)
        assert list(front.load_mnist.fingerprint(config)) == ["digits"]
        assert list(front.load_mnist.preflight(config)) == []
    assert front.load_mnist.fingerprint(config) == {file.name: file.md5 for file in described.files}
    monkeypatch.setattr(download_module, "download", None)
    monkeypatch.setattr(socket, "socket", None)  # the stage itself uses no network
    data = front.load_mnist(config, ctx)
    expected = np.frombuffer(gzip.decompress(files["t10k-images-idx3-ubyte.gz"]), np.uint8, offset=16)
    np.testing.assert_array_equal(data.splits["test"].inputs["images"].take(np.arange(20)).ravel(), expected)
    assert stat.S_IMODE((tmp_path / "cache" / "ptpipe" / "mnist" / "t10k-images-idx3-ubyte.gz").stat().st_mode) & 0o400


def test_preflight_gives_the_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing() as url:
        monkeypatch.setattr(catalog, "CIFAR10", replace(catalog.CIFAR10, mirrors=(url,)))
        (line,) = front.load_cifar10.preflight(front.CatalogConfig())
    assert line.startswith("CIFAR-10 not found: searched ") and "Connection refused" in line and "\n" not in line
