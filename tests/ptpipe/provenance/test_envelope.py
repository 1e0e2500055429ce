"""Signatures: DSSE envelopes, readable by others, checked against the key that the user names."""

from __future__ import annotations

import base64
import json
import sys

import pytest

from ptpipe.errors import IntegrityError, UsageError
from ptpipe.execution.statement import statement_path
from ptpipe.provenance.envelope import check_envelope, deliverable_of, envelope_path, is_stale, sign_statement

pytest.importorskip("cryptography", reason="cryptography is not installed (extra `signing`)")


def make_key(folder, name, make=None):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = make() if make else Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def file(tmp_path):
    """A deliverable with something for a statement."""
    path = tmp_path / "model.bin"
    path.write_text("weights")
    statement_path(path).write_text('{"_type": "x"}')
    return path


def test_what_is_signed_is_the_encoding_that_dsse_prescribes(file, tmp_path):
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    private, public = make_key(tmp_path, "mine")
    path = sign_statement(file, private)
    envelope = json.loads(path.read_text())
    assert (path.name, envelope["payloadType"]) == ("model.bin.dsse.json", "application/vnd.in-toto+json")
    payload = statement_path(file).read_bytes()
    assert base64.b64decode(envelope["payload"]) == payload
    (signature,) = envelope["signatures"]
    encoded = b"DSSEv1 28 application/vnd.in-toto+json 14 " + payload
    load_pem_public_key(public.read_bytes()).verify(base64.b64decode(signature["sig"]), encoded)
    assert check_envelope(file, public)
    assert check_envelope(file, None)


def test_a_statement_and_an_envelope_name_their_deliverable(file):
    assert [deliverable_of(path) for path in (file, statement_path(file), envelope_path(file))] == [file] * 3
    statement_path(envelope_path(file)).write_text("{}")
    assert deliverable_of(envelope_path(file)) == envelope_path(file), "it has a statement of its own"


def test_several_may_sign(file, tmp_path):
    keys = [make_key(tmp_path, name) for name in ("mine", "yours", "theirs")]
    for private, _ in (keys[0], keys[1], keys[0]):
        sign_statement(file, private)
    assert len(json.loads(envelope_path(file).read_text())["signatures"]) == 2
    assert all(check_envelope(file, public) for _, public in keys[:2])
    with pytest.raises(IntegrityError, match=r"no signature is valid and by .*theirs\.pub"):
        check_envelope(file, keys[2][1])


def test_no_bit_of_statement_or_signature_can_change(file, tmp_path):
    private, public = make_key(tmp_path, "mine")
    sign_statement(file, private)
    payload = statement_path(file).read_bytes()
    statement_path(file).write_bytes(payload.replace(b"x", b"y"))
    for key in (public, None):
        with pytest.raises(IntegrityError, match=r"another statement than .*; delete it if it is of an earlier file"):
            check_envelope(file, key)
    assert is_stale(file)
    envelope = json.loads(envelope_path(file).read_text())
    envelope["payload"] = base64.b64encode(statement_path(file).read_bytes()).decode()
    envelope_path(file).write_text(json.dumps(envelope))
    with pytest.raises(IntegrityError, match="no signature is valid"):
        check_envelope(file, public)


def test_a_missing_signature_is_missing_only_where_a_key_is_named(file, tmp_path):
    assert not check_envelope(file, None)
    with pytest.raises(FileNotFoundError, match="not signed"):
        check_envelope(file, make_key(tmp_path, "mine")[1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"payload": 1}',
        "[" * 10**5,
        '{"payloadType": "application/vnd.in-toto+json", "payload": "e30=", "signatures": [1]}',
    ],
)
def test_what_is_no_envelope_is_named(file, tmp_path, text):
    envelope_path(file).write_text(text)
    for key in (None, make_key(tmp_path, "mine")[1]):
        with pytest.raises(IntegrityError, match=r"no DSSE envelope|another statement"):
            check_envelope(file, key)


@pytest.mark.parametrize("signatures", [[], [{"keyid": "", "sig": "?"}], [{"keyid": "", "sig": "AAAA"}]])
def test_a_signature_that_is_none_is_not_valid(file, tmp_path, signatures):
    private, public = make_key(tmp_path, "mine")
    envelope = json.loads(sign_statement(file, private).read_text())
    envelope_path(file).write_text(json.dumps(envelope | {"signatures": signatures}))
    with pytest.raises(IntegrityError, match="no signature is valid"):
        check_envelope(file, public)


def test_keys_that_cannot_be_used_are_the_users_mistake(file, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    elliptic = make_key(tmp_path, "elliptic", lambda: generate_private_key(SECP256R1()))
    encrypted, text = tmp_path / "encrypted.pem", tmp_path / "text.pem"
    key = Ed25519PrivateKey.generate()
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    text.write_text("no key")
    for private in (elliptic[0], encrypted, text, tmp_path / "absent", elliptic[1]):
        with pytest.raises(UsageError):
            sign_statement(file, private)
    with pytest.raises(UsageError, match=r"^cannot read .*absent: No such file"):
        sign_statement(file, tmp_path / "absent")
    with pytest.raises(UsageError, match=r"^cannot read .*absent: No such file"):
        check_envelope(file, tmp_path / "absent")
    sign_statement(file, make_key(tmp_path, "mine")[0])
    for public in (elliptic[1], text, tmp_path / "absent", tmp_path / "mine.pem"):
        with pytest.raises(UsageError):
            check_envelope(file, public)


def test_without_the_extra_the_command_that_installs_it_is_named(file, tmp_path, monkeypatch):
    private, public = make_key(tmp_path, "mine")
    sign_statement(file, private)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for call in (lambda: sign_statement(file, private), lambda: check_envelope(file, public)):
        with pytest.raises(UsageError, match=r"pip install 'ptpipe\[signing\]'"):
            call()
    assert check_envelope(file, None), "what needs no key needs no extra"
