"""Signatures of statements: DSSE envelopes with Ed25519 keys (extra `signing`)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptpipe.errors import IntegrityError, UsageError
from ptpipe.execution.statement import SUFFIX as STATEMENT_SUFFIX
from ptpipe.execution.statement import statement_path
from ptpipe.store.files import strict_json, write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SUFFIX = ".dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MAX_BYTES = 100_000_000


def envelope_path(deliverable: Path) -> Path:
    """Return the place of the signatures of a deliverable's statement: beside it."""
    return deliverable.parent / f"{deliverable.name}{SUFFIX}"


def deliverable_of(path: Path) -> Path:
    """Return the deliverable that a path names: itself, or that of its statement or envelope (`path`)."""
    for suffix in (STATEMENT_SUFFIX, SUFFIX):
        if path.name.endswith(suffix) and not statement_path(path).exists():
            return path.with_name(path.name.removesuffix(suffix))
    return path


def is_stale(deliverable: Path) -> bool:
    """Return whether the envelope beside a deliverable (`deliverable`) is of another statement than that beside it."""
    try:
        check_envelope(deliverable, None)
    except IntegrityError:
        return True
    return False


def sign_statement(deliverable: Path, key: Path) -> Path:
    """Sign the statement beside a deliverable, and return the envelope's path; other keys' signatures are kept.

    `key`: a file with an unencrypted Ed25519 private key in PEM. Raises UsageError where it is none.
    """
    private = _private_key(key)
    payload = statement_path(deliverable).read_bytes()
    path = envelope_path(deliverable)
    signatures = {each["keyid"]: each for each in (_signatures(path, payload) if path.exists() else ())}
    key_id = _key_id(private.public_key())
    signature = base64.b64encode(private.sign(_pre_authentication_encoding(payload))).decode()
    signatures[key_id] = {"keyid": key_id, "sig": signature}
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": list(signatures.values()),
    }
    write_atomically(path, strict_json(envelope).encode())
    return path


def check_envelope(deliverable: Path, key: Path | None) -> bool:
    """Return whether a deliverable's statement is signed.

    `key`: a file with an Ed25519 public key in PEM, which it must be signed with; without one, signatures are not
    verified. Raises IntegrityError where the envelope holds another statement or no valid signature by that key,
    FileNotFoundError where `key` is given and there is no envelope, UsageError where `key` is no such file.
    """
    public = None if key is None else _public_key(key)
    path = envelope_path(deliverable)
    if public is None and not path.exists():
        return False
    if not path.exists():
        raise FileNotFoundError("the statement is not signed")
    payload = statement_path(deliverable).read_bytes()
    signatures = _signatures(path, payload)
    if public is not None and not any(_is_valid(public, each["sig"], payload) for each in signatures):
        raise IntegrityError(f"no signature is valid and by {key}")
    return True


def _signatures(path: Path, payload: bytes) -> list[dict[str, str]]:
    """Read an envelope's signatures. Raises IntegrityError where it is none of this statement."""
    if path.stat().st_size > _MAX_BYTES:
        raise IntegrityError(f"{path} is no envelope: larger than {_MAX_BYTES // 10**6} MB")
    try:
        envelope: dict[str, Any] = json.loads(path.read_bytes())
        signed = base64.b64decode(envelope["payload"], validate=True)
        signatures = [{"keyid": str(each["keyid"]), "sig": str(each["sig"])} for each in envelope["signatures"]]
        is_in_toto = envelope["payloadType"] == PAYLOAD_TYPE
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise IntegrityError(f"it is no DSSE envelope: {error!r}") from error
    if not is_in_toto or signed != payload:
        raise IntegrityError("it holds another statement than the one beside it; delete it if it is of an earlier file")
    return signatures


def _pre_authentication_encoding(payload: bytes) -> bytes:
    # DSSE v1, protocol.md: what is signed.
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _is_valid(key: Ed25519PublicKey, signature: str, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), _pre_authentication_encoding(payload))
    except (InvalidSignature, binascii.Error, ValueError):
        return False
    return True


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def _private_key(path: Path) -> Ed25519PrivateKey:
    _require_extra()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read(path)
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise UsageError(f"{path} is no unencrypted private key in PEM: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no Ed25519 key; `openssl genpkey -algorithm ed25519` makes one")
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    _require_extra()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content = _read(path)
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no public key in PEM; `openssl pkey -pubout` extracts one") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no Ed25519 key")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _require_extra() -> None:
    try:
        import_module("cryptography")
    except ImportError as error:
        raise UsageError(f"keys need the extra `signing`: pip install 'ptpipe[signing]' ({error})") from error
