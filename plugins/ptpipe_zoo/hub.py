"""Published weights on the Hugging Face Hub: `model.safetensors` in the Hub's cache, verified and downloaded.

Imports neither torch nor numpy.
"""

from __future__ import annotations

import re
from pathlib import Path

from ptpipe import StageError
from ptpipe_torch.errors import first_line
from ptpipe_torch.files import file_digest

_FILE = "model.safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 10.0


def cached_file(repository: str) -> Path | None:
    """Return the weights of a repository in the Hub's cache; None where they are not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, _FILE)
    return Path(found) if isinstance(found, str) else None


def verify(path: Path) -> None:
    """Raise StageError unless a file of the cache has the digest that the cache names it by."""
    name = path.resolve().name
    if _SHA256.fullmatch(name) and file_digest(path) != name:
        raise StageError(f"{path} is not the file that was published: its SHA-256 is not {name[:12]}...; delete it")


def fetch(repository: str) -> None:
    """Download the weights of a repository into the Hub's cache, unless they are there; verify them in either case.

    Raises StageError if the download fails or the file is not the published one.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    path = cached_file(repository)
    if path is None:
        disable_progress_bars()  # they would be drawn over ptpipe's
        try:
            path = Path(hf_hub_download(repository, _FILE, etag_timeout=_TIMEOUT_S))
        except Exception as error:  # its client may raise anything
            reason = first_line(error)
            message = f"can't download {_FILE} of {repository} ({reason}): specify a local file with weights_file"
            raise StageError(message) from error
    verify(path)
