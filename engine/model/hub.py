"""From what a user calls a model to a directory: a path, or an id of the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from engine.errors import CheckpointError
from engine.model.files import text_shown

__all__ = ["hub_reason", "is_hub_id", "resolve_model"]

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = [
    "*/*",  # other formats of the same weights: original/, onnx/, gguf/
    "consolidated*",  # Mistral's second copy of the weights, in its own naming
]


def resolve_model(model: str, *, download: Callable[[str], str] | None = None) -> Path:
    """The directory of `model`: a directory as it is, a Hugging Face id fetched into the hub's cache.

    A progress bar is shown while files are fetched, if standard error is a terminal.

    Parameters
    ----------
    download
        Fetches an id and returns its directory; the hub's own when it is None.

    Raises
    ------
    CheckpointError
        It is neither, or cannot be fetched: unknown, gated, no network, a full disk.
    """
    try:
        path = Path(model).expanduser()
        is_directory, is_there = path.is_dir(), path.exists()
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name that is too long, a directory that bars the way, no home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{text_shown(model)}: {reason}") from None
    if is_directory:
        return path
    if is_there:
        made = "; vtserve quantize makes one of a GGUF file" if path.suffix == ".gguf" else ""
        raise CheckpointError(f"{text_shown(model)}: expected a model directory, found a file{made}")
    if not is_hub_id(model):
        raise CheckpointError(
            f"{text_shown(model)}: no such directory, and not a Hugging Face id (OWNER/NAME)"
        )
    try:
        return Path((download or _download)(model))
    except Exception as error:  # the hub's, its HTTP client's and the file system's: one line for each
        reason = _unkept(error) or hub_reason(error)
        raise CheckpointError(f"{model}: no such directory, and {reason}") from error


def is_hub_id(model: str) -> bool:
    """Whether `model` is no path that is there, but may be an id of the hub: OWNER/NAME."""
    looks_so = bool(_HUB_ID.fullmatch(model)) and not model.startswith((".", "-"))
    return looks_so and not Path(model).expanduser().exists()


def _download(model: str) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))


def _unkept(error: Exception) -> str | None:
    """Why the hub's cache cannot hold what was fetched; None if that was not it. Some of the hub is in Rust,
    whose errors have the number in their text.
    """
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return None
    from huggingface_hub import constants

    return (
        f"the Hugging Face hub's cache {constants.HF_HUB_CACHE} cannot keep it: {os.strerror(number)}; "
        "HF_HOME=DIR puts it elsewhere"
    )


def hub_reason(error: Exception) -> str:
    """What to do about it, by the hub's own classes of errors."""
    from huggingface_hub import constants, errors

    # A gated model is a kind of a missing one, and being offline hides behind a missing cache entry.
    if isinstance(error, errors.GatedRepoError):
        return "gated on the Hugging Face hub: accept its terms there and log in (`hf auth login`)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "not found on the Hugging Face hub (or private: log in with `hf auth login`)"
    is_missing = isinstance(error, errors.LocalEntryNotFoundError)
    if isinstance(error, errors.OfflineModeIsEnabled) or (is_missing and constants.HF_HUB_OFFLINE):
        return "not in the hub's cache, and HF_HUB_OFFLINE forbids fetching it"
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's
        return "no home directory to fetch it to from the Hugging Face hub; set HF_HOME to a folder"
    if is_missing:
        return "not in the hub's cache, and the Hugging Face hub cannot be reached"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"not fetched from the Hugging Face hub: {text_shown(lines[0] if lines else type(error).__name__)}"
