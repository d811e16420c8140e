"""A checkpoint on disk: its JSON files, and its tensors as mapped views that nothing copies."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.files import read_json, read_optional_json, shown, text_shown
from engine.model.hub import resolve_model
from engine.model.quantization.declaration import Declaration
from engine.model.quantization.read_declaration import read_declaration
from engine.model.read_config import read_model_config
from engine.model.safetensors_file import MappedFile, StoredTensor, list_tensors

__all__ = ["INDEX", "SINGLE", "Checkpoint", "StoredTensor", "resolve_model"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ROWS = 1024
"""of a matrix that are compared at a time: most that differ do so in the first"""


class Checkpoint:
    """config.json and the tensors of one model directory. Build it with `open`.

    Attributes
    ----------
    path : Path
    config : ModelConfig
    raw_config : dict
        config.json as it is written.
    declaration : Declaration
        What the configuration says of quantisation. The tensors decide.
    tensors : dict[str, StoredTensor]
        Every tensor of every shard; no data has been read.
    log : logging.Logger
        Where it is said what is odd about the checkpoint.
    """

    has_data = True
    """Whether tensors can be read; else only what headers say is known."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        raw_config: dict[str, Any],
        declaration: Declaration,
        tensors: dict[str, StoredTensor],
    ) -> None:
        self.path = path
        self.config = config
        self.raw_config = raw_config
        self.declaration = declaration
        self.tensors = tensors
        self.log = logging.getLogger("vtserve")
        self._files: dict[Path, MappedFile] = {}
        self._below: dict[str, list[str]] = {}
        for name in tensors:
            self._below.setdefault(name.rpartition(".")[0], []).append(name)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read the JSON files and the headers of all shards.

        Raises
        ------
        CheckpointError
            A file is missing or damaged, or says what cannot be: one line names it and the field or tensor.
        UnsupportedModelError
            The architecture, its rotary embedding or the quantisation is not served.
        """
        path = Path(path)
        raw = read_json(path / "config.json")
        config = read_model_config(
            raw, read_optional_json(path / "generation_config.json"), source=str(path / "config.json")
        )
        return cls(path, config, raw, read_declaration(path, raw), _tensors(path))

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
        """Whether the checkpoint asks for an FP8 KV cache."""
        return self.declaration.fp8_kv_cache

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def below(self, module: str) -> list[str]:
        """The names of the tensors right below `module`."""
        return self._below.get(module, [])

    def stored(self, name: str) -> StoredTensor:
        """Where `name` lies. Raises CheckpointError if it is missing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {text_shown(name)} is missing") from None

    def tensor(self, name: str) -> np.ndarray:
        """Read-only view of the mapped file in the element type's NumPy carrier.

        Raises
        ------
        CheckpointError
            It is missing, or (UnsupportedModelError) of an element type that is not read.
        """
        stored = self.stored(name)
        return self._mapped(stored.file).view(name, stored)

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two matrices of one element type and shape hold the same, element by element."""
        first, second = self.tensor(name), self.tensor(other)
        return all(
            np.array_equal(first[row : row + _ROWS], second[row : row + _ROWS], equal_nan=False)
            for row in range(0, len(first), _ROWS)
        )

    def release(self, name: str) -> None:
        """Let the system drop the pages of `name`: what was copied to the device need not stay resident."""
        stored = self.stored(name)
        self._mapped(stored.file).release(stored)

    def close(self) -> None:
        """Forget the mapped files; each is unmapped when the last view of it is gone. Idempotent."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _mapped(self, file: Path) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile(file)
        return self._files[file]


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Those of the single file, or of the shards that an index names."""
    index = path / INDEX
    if index.exists():
        return _sharded_tensors(index)
    single = path / SINGLE
    if not single.is_file():
        raise CheckpointError(f"{single}: no such file, nor {INDEX}")
    return list_tensors(single)


def _sharded_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map: expected an object of tensor and file names, found {shown(weight_map)}"
        )
    shards: dict[str, dict[str, StoredTensor]] = {}
    for tensor, name in weight_map.items():
        # An index comes from a file that we did not write: it may name nothing outside its directory.
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise CheckpointError(
                f"{index}: weight_map: {text_shown(tensor)}: expected the name of a file beside it, "
                f"found {shown(name)}"
            )
        if name not in shards:
            file = index.parent / name
            if not file.is_file():
                raise CheckpointError(
                    f"{index.parent}: shard {text_shown(name)} is missing: {INDEX} names it"
                )
            shards[name] = list_tensors(file)
        if tensor not in shards[name]:
            raise CheckpointError(
                f"{index.parent / name}: tensor {text_shown(tensor)} is missing, but {INDEX} places it here"
            )
    tensors: dict[str, StoredTensor] = {}
    for name, held in shards.items():
        for tensor, stored in held.items():
            # Where several shards hold a tensor, the index decides; one that it does not name is still there.
            if weight_map.get(tensor, name) == name:
                tensors.setdefault(tensor, stored)
    return tensors
