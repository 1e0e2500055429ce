"""Folders as transformers saves them: `config.json`, `tokenizer.json`, safetensors files. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ptpipe import JSON, StageError
from ptpipe_torch import Data, TokensInfo
from ptpipe_torch.files import file_digest

_TOKENIZER = "tokenizer.json"


def digests(folder: Path) -> dict[str, JSON]:
    """Return the SHA-256 of each file of a folder that a network is made of."""
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    return {path.name: file_digest(path) for path in sorted(files) if path.is_file()}


def missing(folder: Path) -> str | None:
    """Return what is wrong with a folder; None where it has a network."""
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json: name a folder that transformers saved"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no .safetensors file; others are not loaded, they may contain code"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises StageError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StageError(f"can't read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StageError(f"{path} is not a JSON object")
    return content


def check_vocabulary(folder: Path, config: dict[str, Any], tokens: TokensInfo, data: Data) -> None:
    """Raise StageError where the network of a folder was trained with other token ids than the data set's."""
    size = config.get("vocab_size")
    if not isinstance(size, int):
        raise StageError(f"{folder / 'config.json'} has no vocab_size to compare the data's token ids with")
    advice = f"give data.text the tokenizer of the network (tokenizer: {folder / _TOKENIZER})"
    ours = data.assets.get(_TOKENIZER)
    if (folder / _TOKENIZER).is_file() and ours is not None:
        theirs, own = _ids(read_json(folder / _TOKENIZER)), _ids(json.loads(ours))
        if different := sorted(token for token, number in own.items() if theirs.get(token) != number):
            raise StageError(
                f"the network in {folder} has another tokenizer than the data: {len(different)} of {len(own)} tokens "
                f"have other numbers, {different[0]!r} for one; {advice}"
            )
    elif size != tokens.vocabulary_size:
        raise StageError(
            f"the network in {folder} has a vocabulary of {size}, the data's tokenizer one of "
            f"{tokens.vocabulary_size}: {advice}"
        )


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the number of each token of a `tokenizer.json`."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # unigram: pairs of a token and its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}}
