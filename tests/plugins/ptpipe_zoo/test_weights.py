from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ptpipe import StageError
from ptpipe.events import Notice
from ptpipe_torch.runtime import warnings_silenced
from ptpipe_torch.torchvision_compat import torchvision
from ptpipe_zoo import TorchvisionConfig, names, published, torchvision_models, weights
from ptpipe_zoo import torchvision as torchvision_stage

NAME = "shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def published_net():
    """A network as torchvision publishes it: RGB, 1000 classes; its batch norm moved away from the start."""
    torch.manual_seed(5)
    network = torchvision().models.get_model(NAME, num_classes=1000)
    with torch.no_grad():
        network(torch.rand(4, 3, 32, 32))
    return network.eval()


@pytest.fixture
def make(make_data, ctx):
    def make_(state, path, *, channels=3, num_classes=5, entry=None):
        if path.suffix == ".safetensors":
            save_file(state, path)
        else:
            torch.save(state, path)
        config = TorchvisionConfig(name=NAME, weights_file=str(path), weights_entry=entry)
        return torchvision_stage(config, ctx, make_data((channels, 32, 32), num_classes))

    return make_


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_for_the_same_classes_and_channels_is_taken_as_it_is(make, published_net, tmp_path, events, suffix):
    model = make(published_net.state_dict(), tmp_path / f"w{suffix}", num_classes=1000)
    images_NCHW = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.build()(images_NCHW), published_net(images_NCHW))
    assert notices(events) == []


def test_the_last_layer_is_reinitialized_for_other_classes(make, published_net, tmp_path, events, make_data, ctx):
    model = make(published_net.state_dict(), tmp_path / "w.pth")
    fresh = torchvision_stage(TorchvisionConfig(name=NAME), ctx, make_data((3, 32, 32), 5))
    for name, tensor in model.tensors.items():
        expected = fresh.tensors[name] if name.startswith("fc.") else published_net.state_dict()[name]
        assert torch.equal(tensor, expected), name
    assert notices(events) == ["the weights' last layer (fc) has 1000 classes: reinitialized for 5"]


def test_a_grey_image_gives_what_the_same_image_in_rgb_gave(make, published_net, tmp_path, events):
    model = make(published_net.state_dict(), tmp_path / "w.pth", channels=1, num_classes=1000)
    grey_NCHW = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(model.build()(grey_NCHW), published_net(grey_NCHW.expand(2, 3, 32, 32)))
    assert notices(events) == ["the weights' first layer has 3 input channels: adapted to 1"]


@pytest.mark.parametrize("channels", [2, 6])
def test_further_channels_repeat_the_three_at_their_share(make, published_net, tmp_path, channels):
    model = make(published_net.state_dict(), tmp_path / "w.pth", channels=channels, num_classes=1000)
    given_OIhw = published_net.state_dict()["conv1.0.weight"]
    for channel in range(channels):
        expected = given_OIhw[:, channel % 3] * 3 / channels
        torch.testing.assert_close(model.tensors["conv1.0.weight"][:, channel], expected)


def test_a_file_of_dataparallel_and_one_without_counters_are_understood(make, published_net, tmp_path):
    state = {
        f"module.{name}": tensor for name, tensor in published_net.state_dict().items() if "num_batches" not in name
    }
    model = make(state, tmp_path / "w.pth", num_classes=1000)
    assert torch.equal(model.tensors["fc.weight"], state["module.fc.weight"])
    assert model.tensors["conv1.1.num_batches_tracked"] == 0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "model._orig_mod.", "module.net.model."])
def test_what_wraps_a_network_is_taken_from_its_names(make, published_net, tmp_path, events, prefix):
    """Weights that Lightning or another training class saves have those of a loss beside them."""
    state = {f"{prefix}{name}": tensor for name, tensor in published_net.state_dict().items()}
    kept = prefix.replace("_orig_mod.", "")
    others = {"loss.weight": torch.ones(5)} if kept else {}
    path = tmp_path / "w.ckpt"
    model = make({"epoch": 3, "state_dict": {**state, **others}}, path, num_classes=1000)
    assert torch.equal(model.tensors["fc.weight"], published_net.state_dict()["fc.weight"])
    assert notices(events) == [
        f"the weights are those of the entry 'state_dict' of {path}",
        *(f"not loaded from {path}, being outside of {kept!r}: {name}" for name in others),
    ]


def test_weights_that_fit_twice_are_refused(published_net):
    own = published_net.state_dict()
    both = {f"{name}.{key}": tensor for name in ("student", "teacher") for key, tensor in own.items()}
    with pytest.raises(StageError, match=r"w.ckpt has the network more than once: 'student.' and 'teacher.'"):
        weights.load_state(published_net, both, "w.ckpt")


def test_names_that_fit_as_they_are_stay(published_net):
    own = published_net.state_dict()
    wrapped = torch.nn.DataParallel(published_net).state_dict()
    assert weights.unwrapped(own, own, "w.pt") == (own, [])
    assert weights.unwrapped(wrapped, wrapped, "w.pt") == (wrapped, [])


def test_a_torchscript_file_is_refused_without_a_warning(published_net, tmp_path):
    with warnings_silenced():  # torch.jit is deprecated
        torch.jit.trace(published_net, torch.rand(1, 3, 32, 32)).save(tmp_path / "script.pt")
    with pytest.raises(StageError, match=r"script.pt is not a file of plain tensors: .* A whole model can be loaded"):
        weights.read_weights(tmp_path / "script.pt", print)


def test_densenets_published_names_are_understood():
    network = torchvision().models.densenet121(num_classes=5)
    old = {}
    for name, tensor in network.state_dict().items():
        head, _, tail = name.rpartition("denselayer")
        number, _, rest = tail.partition(".")
        rest = (
            rest.replace("norm1", "norm.1")
            .replace("norm2", "norm.2")
            .replace("conv1", "conv.1")
            .replace("conv2", "conv.2")
        )
        old[f"{head}denselayer{number}.{rest}" if head else name] = torch.full_like(tensor, 3)
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    weights.load_weights(network, old, stems=["features.conv0"], heads=["classifier"], source="w.pth")
    assert all((tensor == 3).all() for tensor in network.state_dict().values())


def test_auxiliary_branches_in_a_file_are_left_out():
    theirs = torchvision().models.googlenet(num_classes=5, init_weights=False)
    ours = torchvision_models.classifier(name="googlenet", shape_CHW=(3, 32, 32), num_classes=5)
    assert weights.load_weights(ours, theirs.state_dict(), stems=["conv1.conv"], heads=["fc"], source="w.pth") == []
    assert torch.equal(ours.fc.weight, theirs.fc.weight)


def test_a_file_that_does_not_fit_is_described_in_one_line(make, published_net, tmp_path):
    state = published_net.state_dict()
    for name in ("conv5.0.weight", "conv5.1.weight", "conv5.1.bias", "conv5.1.running_mean"):
        del state[name]
    state["extra"] = torch.zeros(1)
    state["conv1.1.weight"] = torch.zeros(3)
    with pytest.raises(StageError) as caught:
        make(state, tmp_path / "w.pth")
    assert str(caught.value) == (
        f"{tmp_path / 'w.pth'} doesn't match the network: "
        "4 missing: conv5.0.weight, conv5.1.weight, conv5.1.bias, ...; 1 unexpected: extra; "
        "1 of another shape: conv1.1.weight is (3,), not (24,)"
    )


class Payload:
    """What an attacker would put in a file: unpickling it would run a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_options_and_scores_beside_the_weights_are_left_out(tmp_path):
    """As scripts save them: argparse's options, a path in them, the best accuracy of NumPy's."""
    state = {"fc.weight": torch.ones(2)}
    args = argparse.Namespace(width=12, output=tmp_path, nested=argparse.Namespace(a=[1]))
    checkpoint = {"epoch": 3, "model": state, "args": args, "best": np.float64(0.9)}
    for is_zip in (True, False):
        torch.save(checkpoint, tmp_path / "best.pt", _use_new_zipfile_serialization=is_zip)
        lines = []
        assert torch.equal(weights.read_weights(tmp_path / "best.pt", lines.append)["fc.weight"], state["fc.weight"])
        assert lines == [f"the weights are those of the entry 'model' of {tmp_path / 'best.pt'}"]


def test_paths_of_python_3_13_are_left_out_by_others(tmp_path):
    """It calls their module `pathlib._local`."""
    content = {"model": {"fc.weight": torch.ones(2)}, "where": tmp_path}
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(
        content.replace(b"cpathlib._local\n", b"cpathlib\n").replace(b"cpathlib\n", b"cpathlib._local\n")
    )
    assert weights.read_weights(tmp_path / "w.pt", print).keys() == {"fc.weight"}


def test_what_stands_for_options_is_no_tensor(tmp_path):
    torch.save({"fc.weight": torch.ones(2), "args": argparse.Namespace(width=12)}, tmp_path / "w.pt")
    with pytest.raises(StageError, match="is not a state dict; it contains a dict"):
        weights.read_weights(tmp_path / "w.pt", print)


def test_threads_can_read_at_once(tmp_path):
    """torch's list of classes that may be read is the process's."""
    torch.save({"model": {"fc.weight": torch.ones(2)}, "args": argparse.Namespace(width=12)}, tmp_path / "w.pt")
    with ThreadPoolExecutor(3) as pool:
        read = [*pool.map(lambda _: weights.read_weights(tmp_path / "w.pt", str), range(150))]
    assert all(state.keys() == {"fc.weight"} for state in read)


def test_a_class_that_is_refused_is_named(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(2)}, "loader": argparse.FileType()}, tmp_path / "w.pt")
    with pytest.raises(StageError, match=r"is not a file of plain tensors \(it holds argparse.FileType\): save"):
        weights.read_weights(tmp_path / "w.pt", print)


def test_code_in_a_weights_file_is_not_run(make, tmp_path):
    with pytest.raises(StageError, match="is not a file of plain tensors"):
        make({"fc.weight": Payload(tmp_path / "attacked")}, tmp_path / "w.pth")
    with pytest.raises(StageError, match="is not a file of plain tensors"):
        make(argparse.Namespace(own=Payload(tmp_path / "attacked")), tmp_path / "w.pth")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"epoch": 3, "model": {"fc.weight": torch.zeros(1)}, "model_ema": {"fc.weight": torch.zeros(1)}},
            "is not a state dict; its entries 'model' and 'model_ema' are: choose one by `weights_entry`",
        ),
        ({"epoch": 3}, "is not a state dict; it contains a dict"),
        ({}, "is not a state dict; it contains a dict"),
        (torch.zeros(3), "is not a state dict; it contains a Tensor"),
        (argparse.Namespace(width=12), "is not a state dict; it contains an object of another class"),
    ],
)
def test_a_file_of_something_else_is_refused(make, tmp_path, content, message):
    with pytest.raises(StageError, match=message):
        make(content, tmp_path / "w.pth")


@pytest.mark.parametrize("entry", ["model", "model_ema"])
def test_one_of_several_state_dicts_is_chosen(make, published_net, tmp_path, events, entry):
    state = published_net.state_dict()
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    content = {"epoch": 3, "model": other, "model_ema": other} | {entry: state}
    model = make(content, tmp_path / "w.pth", num_classes=1000, entry=entry)
    assert all(torch.equal(model.tensors[name], tensor) for name, tensor in state.items()) and not notices(events)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"fc.weight": torch.zeros(1)}, "ema": {"fc.weight": torch.zeros(1)}, "net": 1},
            "has no state dict 'net': it has 'model' and 'ema'",
        ),
        ({"fc.weight": torch.zeros(1)}, "has no state dict 'net': it is one itself: leave `weights_entry` out"),
        (torch.zeros(3), "has no state dict 'net': it contains a Tensor"),
    ],
)
def test_a_state_dict_that_is_not_there_is_refused(make, tmp_path, content, message):
    with pytest.raises(StageError, match=message):
        make(content, tmp_path / "w.pth", entry="net")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not tensors at all", b"\x80\x02", b"PK\x03\x04"])
def test_a_damaged_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=f"{name} is not a file of plain tensors"):
        weights.read_weights(tmp_path / name, print)


@pytest.mark.filterwarnings("ignore")  # torch warns of odd pickles before it refuses them
@given(st.binary(max_size=60))
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzzed.pth"
    file.write_bytes(b"\x80\x02" + content)
    with pytest.raises(StageError):
        weights.read_weights(file, print)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_truncated_file_is_refused(published_net, tmp_path, suffix):
    file = tmp_path / f"w{suffix}"
    if suffix == ".pth":
        torch.save(published_net.state_dict(), file)
    else:
        save_file(published_net.state_dict(), file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StageError, match="is not a file of plain tensors"):
        weights.read_weights(file, print)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.safetensors", tmp_path / "none.pth"):
        with pytest.raises(StageError, match="can't read"):
            weights.read_weights(path, print)


# Downloads


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture
def server(tmp_path):
    """A server on this machine, of the files in `tmp_path / "served"`; yields its address and the folder."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()
        thread.join()


@pytest.fixture
def publish(monkeypatch):
    """Pretend that torchvision publishes a file of this content; returns its URL."""

    def publish_(content: bytes, address: str = "http://127.0.0.1:1") -> str:
        url = f"{address}/net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
        for module in (names, torchvision_models):
            monkeypatch.setattr(module, "weight_urls", lambda name: {"DEFAULT": url})
        return url

    return publish_


DEFAULT = TorchvisionConfig(name=NAME, weights="DEFAULT")


def test_published_weights_are_taken_from_torchs_cache(published_net, cache, make_data, ctx, publish):
    content = io.BytesIO()
    torch.save(published_net.state_dict(), content)
    url = publish(content.getvalue())
    data = make_data((3, 32, 32), 1000)
    with pytest.raises(StageError, match=r"net-.*pth was not found: a run downloads it before its first stage"):
        torchvision_stage(DEFAULT, ctx, data)
    cache.mkdir(parents=True)
    file = cache / url.rpartition("/")[2]
    file.write_bytes(content.getvalue())
    model = torchvision_stage(DEFAULT, ctx, data)
    assert torch.equal(model.tensors["fc.weight"], published_net.state_dict()["fc.weight"])
    assert list(torchvision_stage.preflight(DEFAULT)) == []


def test_a_file_of_the_right_name_is_refused(published_net, cache, make_data, ctx):
    """As somebody else may have put it there."""
    url = torchvision_models.weight_urls(NAME)["DEFAULT"]
    cache.mkdir(parents=True)
    file = cache / url.rpartition("/")[2]
    torch.save(published_net.state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    message = f"{file} is not the file published as {url}: its SHA-256 begins with {digest[:10]}; delete it"
    with pytest.raises(StageError) as caught:
        torchvision_stage(DEFAULT, ctx, make_data((3, 32, 32), 1000))
    assert str(caught.value) == message
    assert list(torchvision_stage.preflight(DEFAULT)) == [message]
    assert torchvision_stage.fingerprint(DEFAULT) == {file.name: digest}


def test_the_preflight_downloads_and_the_content_enters_the_key(server, cache, publish):
    address, folder = server
    url = publish(b"weights", address)
    name = url.rpartition("/")[2]
    (folder / name).write_bytes(b"weights")
    assert torchvision_stage.fingerprint(DEFAULT) == {name: None}
    assert list(torchvision_stage.preflight(DEFAULT)) == []
    assert torchvision_stage.fingerprint(DEFAULT) == {name: hashlib.sha256(b"weights").hexdigest()}


def test_the_preflight_reports_what_it_cannot_download(cache, publish):
    publish(b"weights")
    (line,) = torchvision_stage.preflight(DEFAULT)
    assert re.fullmatch(r"can't download http.*: specify a local file with weights_file", line)


def test_weights_that_the_source_does_not_name_are_refused(monkeypatch):
    monkeypatch.setattr(names, "weight_urls", lambda name: {})
    (line,) = torchvision_stage.preflight(DEFAULT)
    assert line.startswith("can't read from torchvision's source which file DEFAULT of shufflenet_v2_x0_5 is")


def test_a_download_is_checked_and_kept(server, cache, capfd):
    address, folder = server
    content = os.urandom(3 << 20)
    name = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content)
    published.fetch(f"{address}/{name}")
    file = cache / name
    assert file.read_bytes() == content
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, "others share torch's cache"
    assert capfd.readouterr() == ("", "")
    (folder / name).unlink()
    published.fetch(f"{address}/{name}")
    assert list(cache.iterdir()) == [file]


def test_a_download_of_other_bytes_is_discarded(server, cache):
    address, folder = server
    (folder / "net-0123abcd.pth").write_bytes(b"something else")
    with pytest.raises(StageError, match=r"net-0123abcd.pth was downloaded damaged, or is another file now; try again"):
        published.fetch(f"{address}/net-0123abcd.pth")
    assert list(cache.iterdir()) == []


def test_a_failed_download_suggests_a_local_file(server, cache):
    address, _ = server
    with pytest.raises(StageError, match=r"can't download .*404.*: specify a local file with weights_file"):
        published.fetch(f"{address}/none-0123abcd.pth")
    with pytest.raises(StageError, match="can't download"):
        published.fetch("http://127.0.0.1:1/none.pth")
    assert list(cache.iterdir()) == []


def test_a_name_that_somebody_may_guess_is_not_written_through(server, cache, tmp_path):
    """The temporary file has a random name, and is a new one."""
    address, folder = server
    content = b"weights"
    name = f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content)
    cache.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for guess in (f"{name}.part", f"{name}.{os.getpid()}.part", f".{name}.part"):
        (cache / guess).symlink_to(victim)
    published.fetch(f"{address}/{name}")
    assert victim.read_bytes() == b"precious"
    assert not (cache / name).is_symlink()


def test_the_cache_is_torchs(monkeypatch, tmp_path):
    def folder():
        return str(published.cached_file("http://x/y.pth").parent.parent)

    for name, value in (("TORCH_HOME", str(tmp_path)), ("TORCH_HOME", "~/t"), ("XDG_CACHE_HOME", str(tmp_path))):
        monkeypatch.delenv("TORCH_HOME", raising=False)
        monkeypatch.setenv(name, value)
        assert folder() == torch.hub.get_dir()


def test_the_source_names_the_weights_that_torchvision_has():
    for name in names.classifier_names():
        assert names.weight_urls(name) == torchvision_models.weight_urls(name), name
    assert names.weight_urls("none") == {}
