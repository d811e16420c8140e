"""A model's headers: those of a directory, or of a Hugging Face id by requests for ranges of its files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model.checkpoint import INDEX, SINGLE
from engine.model.files import read_json
from engine.model.headers import spots
from engine.model.hub import hub_reason, is_hub_id, resolve_model
from engine.model.safetensors_file import list_tensors

__all__ = ["header_directory"]

_JSON = ["config.json", "generation_config.json", "hf_quant_config.json", INDEX]
_FIRST = 128 << 10
"""bytes that are asked for at first: most headers end before"""
_LONGEST = 100 << 20
"""of a header, as the safetensors library has it"""
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@contextmanager
def header_directory(model: str) -> Iterator[Path]:
    """A directory with the JSON files and the headers of `model`, for `CheckpointHeaders.open`.

    A directory is itself. Of a Hugging Face id that is not in the cache, the small JSON files are fetched,
    and of each shard the header: what follows it is a hole in a temporary file.

    Raises
    ------
    CheckpointError
        It is neither, or cannot be fetched.
    """
    if not is_hub_id(model):
        yield resolve_model(model)
        return
    with tempfile.TemporaryDirectory(prefix="vtserve-headers-") as directory:
        try:
            found = _fetch(model, Path(directory))
        except CheckpointError:
            raise
        except Exception as error:  # the hub's, its HTTP client's and the file system's: one line for each
            raise CheckpointError(f"{model}: no such directory, and {hub_reason(error)}") from error
        yield found


def _fetch(model: str, target: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # but documented

    class Quiet(tqdm):
        """No bar: it is a matter of moments."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    cached = Path(snapshot_download(model, allow_patterns=_JSON, tqdm_class=Quiet))
    shards = _shards(cached)
    if all((cached / shard).is_file() for shard in shards):
        return cached
    for name in _JSON:
        if (cached / name).is_file():
            (target / name).write_bytes((cached / name).read_bytes())
    for shard in shards:
        # The cache's directory is named after the commit.
        _fetch_header(_RemoteFile(model, shard, cached.name), target / shard)
    return target


def _shards(directory: Path) -> list[str]:
    index = directory / INDEX
    if not index.is_file():
        return [SINGLE]
    names = read_json(index).get("weight_map")
    names = list(names.values()) if isinstance(names, dict) else []
    # What an index may say is for `Checkpoint.open` to check; nothing is fetched by a name that it refuses.
    return sorted({name for name in names if isinstance(name, str) and Path(name).name == name})


def _fetch_header(remote: _RemoteFile, file: Path) -> None:
    data, size = remote.read(0, _FIRST)
    length = 8 + int.from_bytes(data[:8], "little")
    if not 8 < length <= min(size, _LONGEST):
        raise CheckpointError(f"{remote}: not a sound safetensors file: the header has {length - 8} bytes")
    if length > len(data):
        data += remote.read(len(data), length)[0]
    with file.open("wb") as opened:
        opened.write(data[:length])
        opened.truncate(size)
    tensors = list_tensors(file)
    # Whether the output table is the embedding again, only their contents tell.
    tables = [tensors[name] for name in _TABLES if name in tensors]
    if len({(table.dtype, table.shape) for table in tables}) == 1:
        with file.open("r+b") as opened:
            for table in tables:
                for begin, end in spots(table):
                    opened.seek(begin)
                    opened.write(remote.read(begin, end)[0])


class _RemoteFile:
    """A file on the hub, read by ranges."""

    def __init__(self, model: str, name: str, revision: str) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # but documented

        self._name = f"{model}/{name}"
        self._url = hf_hub_url(model, name, revision=revision)
        self._headers = build_hf_headers()

    def __str__(self) -> str:
        return self._name

    def read(self, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes `begin` to `end`, fewer where the file ends before, and the size of the file."""
        from huggingface_hub import get_session, hf_raise_for_status

        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        response: Any = get_session().get(self._url, headers=headers, follow_redirects=True)
        hf_raise_for_status(response)
        size = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status_code != 206 or not size.isdigit():
            raise CheckpointError(f"{self}: the hub does not serve ranges of it")
        return bytes(response.content), int(size)
