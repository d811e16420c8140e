"""CUDA C++ to machine code by NVRTC, and the cache of what was compiled.

Compiling needs no GPU and no driver: the continuous integration compiles all kernels for all architectures.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigurationError, EngineError

if TYPE_CHECKING:
    from cuda.core import ObjectCode

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).resolve().parent / "kernels"
MINIMUM_CAPABILITY = (8, 0)
"""bfloat16 tensor cores and asynchronous copies to shared memory"""


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of the target for a compute capability, with Hopper's own instructions where they exist.

    Raises
    ------
    ConfigurationError
        If the device is too old for the kernels.
    """
    if capability < MINIMUM_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, MINIMUM_CAPABILITY))
        raise ConfigurationError(
            f"--device cuda: the GPU has compute capability {found}, {needed} or newer is needed"
        )
    name = f"sm_{capability[0]}{capability[1]}"
    return name + "a" if capability == (9, 0) else name


@cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version.

    Raises
    ------
    ConfigurationError
        If there is no NVRTC.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            "--device cuda: NVRTC is needed to compile the kernels and was not found; "
            f"pip install 'vtserve[cuda]' ({error})"
        ) from error
    if int(status) != 0:
        raise ConfigurationError(f"--device cuda: NVRTC does not say its version (status {int(status)})")
    return int(major), int(minor)


class KernelCompiler:
    """Compiles sources for one architecture, each once: results are kept under `cache_dir`.

    An entry's name holds the hash of the source, of every header beside it, of the options, of the
    architecture and of the compiler's version. An entry is its own SHA-256 followed by the cubin, so that a
    damaged one is noticed and compiled again; it is written beside its place and renamed, so that other
    processes never see half of one.
    """

    def __init__(self, arch: str, cache_dir: Path | None) -> None:
        self.arch = arch
        self.cache_dir = cache_dir
        self.compiled = 0
        """sources that were not in the cache"""
        headers = hashlib.sha256()
        for path in sorted(KERNELS.glob("*.cuh")):
            headers.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        self._headers = headers.digest()

    def source(self, name: str) -> str:
        """Text of ``kernels/NAME.cu``."""
        return (KERNELS / f"{name}.cu").read_text()

    def module(self, name: str, source: str | None = None) -> ObjectCode:
        """Machine code of `source`, by default of ``kernels/NAME.cu``. Nothing is loaded on a device yet."""
        from cuda.core import ObjectCode

        return ObjectCode.from_cubin(self.cubin(name, source), name=name)

    def cubin(self, name: str, source: str | None = None) -> bytes:
        """The same as bytes.

        Raises
        ------
        EngineError
            If the compiler refuses the source; its log is logged.
        """
        text = self.source(name) if source is None else source
        entry = self._entry(name, text)
        if entry is not None:
            cached = _read_entry(entry)
            if cached is not None:
                return cached
        code = self._compile(name, text)
        self.compiled += 1
        if entry is not None:
            _write_entry(entry, code)
        return code

    def _entry(self, name: str, source: str) -> Path | None:
        if self.cache_dir is None:
            return None
        key = hashlib.sha256()
        for part in (
            source.encode(),
            self._headers,
            self.arch.encode(),
            repr(_OPTIONS).encode(),
            repr(compiler_version()).encode(),
        ):
            key.update(hashlib.sha256(part).digest())
        return self.cache_dir / f"{name}-{self.arch}-{key.hexdigest()[:32]}.cubin"

    def _compile(self, name: str, source: str) -> bytes:
        from cuda.core import Program, ProgramOptions

        compiler_version()
        options = ProgramOptions(name=f"{name}.cu", arch=self.arch, include_path=[str(KERNELS)], **_OPTIONS)
        try:
            code = Program(source, "c++", options).compile("cubin").code
        except Exception as error:  # the compiler's own exception types are private
            logger.error("NVRTC on %s.cu for %s:\n%s", name, self.arch, error)
            raise EngineError(
                f"NVRTC does not compile {name}.cu for {self.arch}; its log says where"
            ) from error
        assert isinstance(code, bytes)
        return code


_OPTIONS: dict[str, str | bool] = {"std": "c++17"}


def _read_entry(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    if hashlib.sha256(code).digest() == digest:
        return code
    logger.warning("%s is damaged; compiling again", path)
    return None


def _write_entry(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("compiled kernels cannot be cached: %s", error)
