"""A checkpoint on disk: its JSON files, and its tensors as mapped views that nothing copies."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.read_config import read_model_config

__all__ = ["Checkpoint", "StoredTensor", "resolve_model"]

_CARRIERS: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
"""NumPy carriers of safetensors' element types; 16- and 8-bit floats travel as unsigned integers."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """safetensors' name: ``BF16``, ``F8_E4M3``, ``U8`` …"""
    shape: tuple[int, ...]
    start: int
    """byte offset in the file"""
    nbytes: int


class Checkpoint:
    """config.json and the tensors of one model directory.

    Attributes
    ----------
    path : Path
    config : ModelConfig
    raw_config : dict
        config.json as it is written.
    tensors : dict[str, StoredTensor]
        Every tensor of every shard; no data has been read.
    """

    def __init__(
        self, path: Path, config: ModelConfig, raw_config: dict[str, Any], tensors: dict[str, StoredTensor]
    ) -> None:
        self.path = path
        self.config = config
        self.raw_config = raw_config
        self.tensors = tensors
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read the JSON files and the headers of all shards.

        Raises
        ------
        CheckpointError
            A file is missing or damaged, or says what cannot be: one line that names it.
        """
        path = Path(path)
        raw = read_json(path / "config.json")
        generation = path / "generation_config.json"
        config = read_model_config(
            raw, read_json(generation) if generation.is_file() else {}, source=str(path / "config.json")
        )
        tensors: dict[str, StoredTensor] = {}
        for file in _shards(path):
            tensors.update(_read_header(file))
        return cls(path, config, raw, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest tensor."""
        return max((tensor.nbytes for tensor in self.tensors.values()), default=0)

    @property
    def has_fp8_kv_cache(self) -> bool:
        """Whether the checkpoint was calibrated for, or asks for, an FP8 KV cache."""
        scheme = (self.raw_config.get("quantization_config") or {}).get("kv_cache_scheme")
        if isinstance(scheme, dict):
            return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        other = self.path / "hf_quant_config.json"
        if "quantization_config" not in self.raw_config and other.is_file():
            quantization = read_json(other).get("quantization")
            return isinstance(quantization, dict) and quantization.get("kv_cache_quant_algo") == "FP8"
        return False

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def stored(self, name: str) -> StoredTensor:
        """Where `name` lies. Raises CheckpointError if it is missing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name} is missing") from None

    def tensor(self, name: str) -> np.ndarray:
        """Read-only view of the mapped file in the element type's NumPy carrier."""
        stored = self.stored(name)
        carrier = _CARRIERS.get(stored.dtype)
        if carrier is None:
            raise CheckpointError(f"{stored.file}: tensor {name}: element type {stored.dtype} is not served")
        count = stored.nbytes // np.dtype(carrier).itemsize
        return np.frombuffer(self._map(stored.file), carrier, count, stored.start).reshape(stored.shape)

    def release(self, name: str) -> None:
        """Let the system drop the pages of `name`: what was copied to the device need not stay resident."""
        stored = self.stored(name)
        start = -(-stored.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (stored.start + stored.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map(stored.file).madvise(mmap.MADV_DONTNEED, start, length)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def resolve_model(model: str) -> Path:
    """The directory of `model`: a directory as it is, a Hugging Face id fetched into the hub's cache.

    Raises
    ------
    CheckpointError
        It is neither, or cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model}: expected a model directory, found a file")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"{model}: no such directory, and not a Hugging Face id (OWNER/NAME)")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"])
        )
    except Exception as error:  # the hub's, the network's and the file system's errors: one line for each
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{model}: no such directory, and not fetched from the Hugging Face hub: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _shards(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.is_file():
        single = path / _SINGLE
        if not single.is_file():
            raise CheckpointError(f"{single}: no such file, nor {_INDEX}")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor and file names")
    shards = []
    for name in sorted(set(weight_map.values())):
        # An index comes from a file that we did not write: it may name nothing outside its directory.
        if Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map: {name!r} is not a file name")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: no such file, but {_INDEX} names it")
        shards.append(path / name)
    return shards


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one file, after the safetensors library has found its header sound."""
    try:
        with safe_open(file, framework="np"):
            pass
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file}: not a sound safetensors file: {error}") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        tensors[name] = StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start
        )
    return tensors
