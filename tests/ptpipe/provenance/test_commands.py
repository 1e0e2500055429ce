"""`ptpipe verify`, `sign` and `reproduce` as a user calls them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from ptpipe import ExitCode
from ptpipe.execution.statement import statement_path
from ptpipe.store.documents import read_document, write_document


def test_verify_says_what_it_compared_and_what_is_wrong(shop, run_cli):
    nowhere = run_cli("verify", alone=True)
    assert (nowhere.code, nowhere.err) == (2, f"ptpipe: there is no artifacts folder at {shop.artifacts}\n")
    result = shop.run()
    whole = run_cli("verify", alone=True)
    assert (whole.code, whole.err) == (0, "")
    assert whole.out == "verified 1 run, 4 results, 4 objects, 3 deliverables, 0.0 MB in all: no fault\n"
    (result.folder / "manifest.yaml").write_text("")
    altered = run_cli("verify", "last", alone=True)
    assert altered.code == ExitCode.INTEGRITY
    assert altered.out.splitlines()[1].startswith(
        f"altered  runs/{result.run_id}/manifest.yaml  it is not the manifest"
    )
    assert altered.out.endswith(" in all: 1 fault\n")
    as_json = run_cli("verify", "--json", alone=True)
    assert as_json.code == ExitCode.INTEGRITY
    assert set(as_json.json["faults"][0]) == {"state", "subject", "detail"}
    assert as_json.json["checked"]["runs"] == 1
    assert as_json.json["checked"]["signatures"] == 0


@pytest.mark.parametrize("target", ["zebra", "x" * 5000, "no\nsuch", ".", "dev/null"])
def test_verify_of_what_is_not_there(shop, run_cli, target):
    shop.run()
    wrong = run_cli("verify", target, alone=True)
    assert (wrong.code, wrong.err.startswith("ptpipe: there is no run ")) == (ExitCode.USAGE, True)


def test_a_lost_deliverable_is_missing_not_unknown(shop, run_cli):
    shop.run()
    assert run_cli("get", "last", "sum", "out", alone=True).code == 0
    (shop.folder / "out" / "number.json").unlink()
    lost = run_cli("verify", "out/number.json", alone=True)
    assert (lost.code, lost.out.splitlines()[1].split()[0]) == (ExitCode.INTEGRITY, "missing")


def test_get_refuses_an_altered_statement(shop, run_cli):
    (path,) = shop.run().stages["sum"].deliverables
    statement_path(path).write_bytes(statement_path(path).read_bytes().replace(b"toy.add", b"toy.sub"))
    altered = run_cli("get", "last", "sum", "out", alone=True)
    assert altered.code == ExitCode.INTEGRITY
    assert "number.json.intoto.json was altered" in altered.err
    statement_path(path).unlink()
    assert run_cli("get", "last", "sum", "out", alone=True).code == ExitCode.INTEGRITY
    assert not (shop.folder / "out").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_signing_with_keys_of_openssl(shop, run_cli, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography is not installed (extra `signing`)")
    for name in ("mine", "other"):
        openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem")
        openssl("pkey", "-in", tmp_path / f"{name}.pem", "-pubout", "-out", tmp_path / f"{name}.pub")
    (path,) = shop.run().stages["sum"].deliverables
    signed = run_cli("sign", path, "--key", "mine.pem", alone=True)
    assert (signed.code, signed.out) == (0, f"wrote {path}.dsse.json\n")
    assert run_cli("get", "last", "sum", "out", alone=True).out.endswith("wrote out/number.json.dsse.json\n")
    assert "1 signature, " in run_cli("verify", "out/number.json", "--key", "mine.pub", alone=True).out
    assert "1 unverified signature, " in run_cli("verify", "out/number.json", alone=True).out
    wrong = run_cli("verify", "out/number.json", "--key", "other.pub", alone=True)
    assert (wrong.code, "no signature is valid and by other.pub" in wrong.out) == (ExitCode.INTEGRITY, True)
    private = run_cli("verify", "out/number.json", "--key", "mine.pem", alone=True)
    assert (private.code, "is no public key" in private.err) == (ExitCode.USAGE, True)
    unsigned = run_cli("verify", "last", "--key", "mine.pub", alone=True)
    assert unsigned.out.count("the statement is not signed") == 2, "the other two deliverables"
    (tmp_path / "out" / "number.json").write_text("7.0")
    altered = run_cli("sign", "out/number.json", "--key", "mine.pem", alone=True)
    assert altered.code == ExitCode.INTEGRITY
    assert altered.err.endswith("its bytes are not those of its statement; it is not signed\n")
    assert run_cli("sign", f"{path}.dsse.json", "--key", "other.pem", alone=True).out == f"wrote {path}.dsse.json\n"
    assert run_cli("verify", f"{path}.dsse.json", alone=True).code == 0
    absent = run_cli("sign", "absent", "--key", "mine.pem", alone=True)
    assert (absent.code, absent.err.startswith("ptpipe: there is no file absent")) == (ExitCode.USAGE, True)


def test_get_deletes_the_signatures_of_the_file_that_it_replaces(shop, run_cli, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography is not installed (extra `signing`)")
    from .test_envelope import make_key

    make_key(tmp_path, "mine")
    first = shop.run().run_id
    run_cli("get", first, "sum", "out", alone=True)
    assert run_cli("sign", "out/number.json", "--key", "mine.pem", alone=True).code == 0
    assert "removed" not in run_cli("get", first, "sum", "out", "--force", alone=True).out, "they sign that very file"
    assert run_cli("verify", "out/number.json", "--key", "mine.pub", alone=True).code == 0
    second = shop.run({"one.value": 4}).run_id
    (tmp_path / "out" / "number.json").unlink()
    (tmp_path / "out" / "number.json.intoto.json").unlink()
    refused = run_cli("get", second, "sum", "out", alone=True)
    assert (refused.code, "out/number.json.dsse.json exists (--force" in refused.err) == (ExitCode.USAGE, True)
    replaced = run_cli("get", second, "sum", "out", "--force", alone=True)
    removed = "removed out/number.json.dsse.json: it signed another file\n"
    assert replaced.out.endswith(removed)
    assert run_cli("verify", "out/number.json", alone=True).code == 0
    assert run_cli("sign", "out/number.json", "--key", "mine.pem", alone=True).code == 0
    as_json = run_cli("get", first, "sum", "out", "--force", "--json", alone=True)
    assert (as_json.json, as_json.err) == (["out/number.json"], removed)


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_reproduce(shop, run_cli, tmp_path):
    shop.run({"one.value": 4})
    same = run_cli("reproduce", "last", alone=True)
    assert same.code == 0
    assert same.out.splitlines()[0].split() == ["stage", "kind", "result"]
    assert same.out.count("bit-equal") == 4
    assert same.out.splitlines()[-1].endswith(" was reproduced")
    assert re.search(r"^/\S+ was temporary and is deleted; --work FOLDER keeps what is run again$", same.err, re.M)
    shop.edit("return Number(a.value + b.value)", "return Number(a.value + b.value + 1)")
    other = run_cli("reproduce", "last", "--work", "kept", "--json", alone=True)
    assert other.code == ExitCode.FAILED
    assert (other.json["reproduced"], other.json["first_cause"]) == (False, "sum")
    assert [stage["status"] for stage in other.json["stages"]] == ["bit-equal", "bit-equal", "different", "different"]
    assert (tmp_path / "kept" / "index").is_dir() and "temporary" not in other.err
    again = run_cli("reproduce", "last", "--work", "kept", alone=True)
    assert (again.code, "is not empty" in again.err) == (ExitCode.USAGE, True)
    assert run_cli("reproduce", "zebra", alone=True).code == ExitCode.USAGE


def test_reproduce_finds_plugins_in_a_folder_that_is_named(shop, run_cli, tmp_path):
    shop.run()
    (tmp_path / "moved").mkdir()
    shop.plugin.rename(tmp_path / "moved" / "toy.py")
    assert run_cli("reproduce", "last", alone=True).code == ExitCode.PLUGIN
    assert run_cli("reproduce", "last", "--folder", "moved", alone=True).code == 0
    file = next(shop.artifacts.glob("runs/*/sum/number.json"))
    assert run_cli("reproduce", file, "--folder", "moved", "--artifacts", "none", alone=True).code == 0


def test_an_interrupted_reproduction_says_so(shop, run_cli):
    shop.run()
    shop.edit("return Number(config.value)", "import signal; signal.raise_signal(signal.SIGINT)")
    assert run_cli("reproduce", "last", alone=True).code == ExitCode.INTERRUPTED


def test_what_a_stranger_wrote_reaches_the_terminal_escaped(shop, run_cli, tmp_path):
    shop.run()
    file = next(shop.artifacts.glob("runs/*/sum/number.json"))
    content = read_document(statement_path(file))
    content["predicate"]["buildDefinition"]["internalParameters"]["stages"][2]["id"] = "\x1b]0;owned\x07"
    content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][2]["id"] = "\x1b]0;owned\x07"
    write_document(statement_path(file), json.dumps(content))
    for command in ("verify", "reproduce"):
        ended = run_cli(command, file, alone=True)
        assert ended.code == ExitCode.INTEGRITY
        assert "\x1b" not in ended.out + ended.err
    content = read_document(statement_path(shutil.copytree(file.parents[1] / "one", tmp_path / "x") / "number.json"))
    result = content["predicate"]["runDetails"]["metadata"]["ptpipe_results"][0]
    result["environment"]["python"] = "\x1b]0;owned\x07"
    write_document(tmp_path / "x" / "number.json.intoto.json", json.dumps(content))
    shop.edit("return Number(config.value)", "return Number(config.value + 1)")
    ended = run_cli("reproduce", "x/number.json", alone=True)
    assert (ended.code, "\x1b" in ended.out, "x1b]0;owned" in ended.out) == (ExitCode.FAILED, False, True)
