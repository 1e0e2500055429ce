"""Downloads, from servers on the loopback device that behave, misbehave or say nothing."""

from __future__ import annotations

import gzip
import hashlib
import socket
import stat
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
from ptpipe_data import download as download_module
from ptpipe_data import published
from ptpipe_data.download import Patience, download
from ptpipe_data.published import Part, Published

HASTY = Patience(silence_s=0.8, socket_s=0.3)
CONTENT = {"one.gz": b"1" * 300_000, "two.gz": b"2" * 10}


def describe(*mirrors: str, contents: dict[str, bytes] = CONTENT) -> Published:
    parts = [
        Part(name, len(content), hashlib.md5(content).hexdigest(), name.removesuffix(".gz"))
        for name, content in contents.items()
    ]
    return replace(published.MNIST, mirrors=mirrors, parts=tuple(parts))


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
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@contextmanager
def nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}/"


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("download"):
            thread.join(5)  # it may be at its last wait for a socket
    assert list(tmp_path.rglob(".*")) == [], "half-written files"
    assert [thread for thread in threading.enumerate() if thread.name.startswith("download")] == []


def test_files_arrive_whole(tmp_path: Path) -> None:
    with serving(honest) as url:
        download(describe(url), tmp_path / "cache" / "x", HASTY)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache" / "x").iterdir()} == CONTENT


def test_what_is_there_already_is_not_asked_for(tmp_path: Path) -> None:
    asked = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        honest(handler)

    (tmp_path / "one.gz").write_bytes(CONTENT["one.gz"])
    (tmp_path / "two.gz").write_bytes(b"broken")
    with serving(answer) as url:
        download(describe(url), tmp_path, HASTY)
    assert asked == ["/two.gz"] and (tmp_path / "two.gz").read_bytes() == CONTENT["two.gz"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda handler: handler.send_error(404), "HTTP 404"),
        (lambda handler: send(handler, b"<html>log in first</html>"), r"not the published file \(25 of 300000 bytes\)"),
        (lambda handler: send(handler, b"1" * 300_001), "longer than the published 300000 bytes"),
        (lambda handler: send(handler, b"1" * 1000, announced=300_000), r"not the published file \(1000 of 300000"),
        (lambda handler: handler.wfile.write(b"\xff nonsense\r\n\r\n"), "nonsense"),
    ],
)
def test_bad_answers(tmp_path: Path, answer: Answer, reason: str) -> None:
    with serving(answer) as bad, pytest.raises(StageError, match=f"could not be downloaded: .*{reason}"):
        download(describe(bad), tmp_path, HASTY)
    assert list(tmp_path.iterdir()) == []
    with serving(answer) as bad, serving(honest) as good:
        download(describe(bad, good), tmp_path, HASTY)
    assert {path.name for path in tmp_path.iterdir()} == set(CONTENT)


def test_silent_mirror_is_passed_over(tmp_path: Path) -> None:
    with silence() as bad, serving(honest) as good:
        start = time.monotonic()
        download(describe(bad, good), tmp_path, replace(HASTY, silence_s=5))
    assert {path.name for path in tmp_path.iterdir()} == set(CONTENT)
    assert time.monotonic() - start < 2 * HASTY.socket_s  # and only once


@pytest.mark.parametrize("mirror", [silence, nobody])
def test_no_network(tmp_path: Path, mirror: Callable) -> None:
    start = time.monotonic()
    with (
        mirror() as one,
        mirror() as two,
        mirror() as three,
        pytest.raises(StageError, match="could not be downloaded"),
    ):
        download(describe(one, two, three, one, two, three), tmp_path, HASTY)
    assert time.monotonic() - start < HASTY.silence_s + HASTY.socket_s + 1
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
        with serving(trickle) as url, pytest.raises(StageError, match=r"no answer for 0\.8 s"):
            try:
                download(describe(url), tmp_path, HASTY)
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
        download(describe(url), tmp_path, HASTY)  # takes longer than the silence that ends it
    assert (tmp_path / "one.gz").read_bytes() == CONTENT["one.gz"]


def test_hang_in_the_middle(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        send(handler, CONTENT["one.gz"][:100_000], announced=300_000)
        release.wait(10)

    with serving(hang) as url:
        try:
            with pytest.raises(StageError, match="could not be downloaded"):
                download(describe(url, url, url, url), tmp_path, HASTY)
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
    with pytest.raises(StageError, match=r"no answer for 0\.8 s"):
        download(describe("http://nowhere.invalid/"), tmp_path, HASTY)
    assert time.monotonic() - start < 2
    release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("download")]:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_default_patience_ends_within_ten_seconds() -> None:
    patience = Patience()
    assert patience.silence_s + patience.socket_s <= 9.5


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with serving(honest) as url, pytest.raises(StageError, match=r"could not be kept in .*/file/x: Not a directory"):
        download(describe(url), tmp_path / "file" / "x", HASTY)


@pytest.mark.slow
def test_stage_without_network_gives_up_in_time_and_goes_on_with_digits(
    ctx: Context, told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silence() as one, silence() as two:
        monkeypatch.setattr(published, "MNIST", replace(published.MNIST, mirrors=(one, two)))
        start = time.monotonic()
        assert list(front.mnist.preflight(front.MnistConfig(offline="digits"))) == []
        assert time.monotonic() - start < 10
    assert "digits in its place" in str(front.mnist(front.MnistConfig(offline="digits"), ctx) and told.notices)


def test_preflight_fetches_and_the_stage_reads(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_idx_set: Callable
) -> None:
    write_idx_set(tmp_path / "server")
    files = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    config = front.MnistConfig(offline="digits", val_size=10, calibration_size=5)
    with serving(lambda handler: send(handler, files[handler.path[1:]])) as url:
        described = describe(url, contents={part.file: files[part.file] for part in published.MNIST.parts})
        monkeypatch.setattr(published, "MNIST", described)
        assert list(front.mnist.fingerprint(config)) == ["digits"]
        assert list(front.mnist.preflight(config)) == []
    assert front.mnist.fingerprint(config) == {part.file: part.md5 for part in described.parts}
    monkeypatch.setattr(download_module, "download", None)
    monkeypatch.setattr(socket, "socket", None)  # the stage itself uses no network
    data = front.mnist(config, ctx)
    expected = np.frombuffer(gzip.decompress(files["t10k-images-idx3-ubyte.gz"]), np.uint8, offset=16)
    np.testing.assert_array_equal(data.splits["test"].images.take(np.arange(20)).ravel(), expected)
    assert stat.S_IMODE((tmp_path / "cache" / "ptpipe" / "mnist" / "t10k-images-idx3-ubyte.gz").stat().st_mode) & 0o400


def test_preflight_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as url:
        monkeypatch.setattr(published, "CIFAR10", replace(published.CIFAR10, mirrors=(url,)))
        (line,) = front.cifar10.preflight(front.PublishedConfig())
    assert line.startswith("CIFAR-10 is not there: looked in ") and "Connection refused" in line and "\n" not in line
