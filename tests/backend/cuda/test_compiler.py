"""The kernels compile for every architecture that is served, and what was compiled is kept. Needs no GPU."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from engine.backend.cuda.compiler import KERNELS, KernelCompiler, architecture
from engine.backend.cuda.products import families_of, module_name
from engine.backend.cuda.products import source as product_source
from engine.backend.protocol import WeightFormat
from engine.errors import ConfigurationError, EngineError


def _missing() -> str:
    """The module that compiling lacks here, or nothing."""
    for module in ("cuda.bindings.nvrtc", "nvidia.cu13"):
        try:
            if importlib.util.find_spec(module) is None:
                return module
        except ModuleNotFoundError:
            return module
    return ""


needs_nvrtc = pytest.mark.skipif(
    bool(_missing()), reason=f"NVRTC is not installed ({_missing()}): vtserve[cuda]"
)

SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90a": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
"""shared memory that a block may have, by architecture (CUDA C++ Programming Guide, compute capabilities)"""
TINY = 'extern "C" __global__ void tiny(int* out) { *out = VALUE; }'


@needs_nvrtc
@pytest.mark.parametrize("arch", list(SHARED_BYTES))
def test_kernels_compile(arch: str, request: pytest.FixtureRequest) -> None:
    # Kept by hash between runs: only what changed is compiled again.
    kept = getattr(request.config, "cache", None)
    compiler = KernelCompiler(arch, kept.mkdir("cuda-kernels") if kept else None)
    sources = {path.stem: compiler.source(path.stem) for path in sorted(KERNELS.glob("*.cu"))}
    assert len(sources) >= 7
    for format in WeightFormat:
        for family in families_of(format, 4096, hopper=arch == "sm_90a"):
            sources[module_name(family, format)] = product_source(family, format, SHARED_BYTES[arch])
    for name, source in sources.items():
        assert compiler.cubin(name, source).startswith(b"\x7fELF")


@needs_nvrtc
def test_a_second_compiler_finds_what_the_first_compiled(tmp_path: Path) -> None:
    source = TINY.replace("VALUE", "1")
    first = KernelCompiler("sm_90a", tmp_path)
    code = first.cubin("tiny", source)
    second = KernelCompiler("sm_90a", tmp_path)
    assert second.cubin("tiny", source) == code
    assert (first.compiled, second.compiled) == (1, 0)
    assert len(list(tmp_path.iterdir())) == 1


@needs_nvrtc
def test_another_source_or_architecture_is_another_entry(tmp_path: Path) -> None:
    for arch, value in (("sm_90a", "1"), ("sm_90a", "2"), ("sm_80", "1")):
        KernelCompiler(arch, tmp_path).cubin("tiny", TINY.replace("VALUE", value))
    assert len(list(tmp_path.iterdir())) == 3


@needs_nvrtc
@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied"])
def test_a_damaged_entry_is_compiled_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = TINY.replace("VALUE", "1")
    code = KernelCompiler("sm_90a", tmp_path).cubin("tiny", source)
    (entry,) = tmp_path.iterdir()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes({"truncated": data[:-5], "changed": data, "emptied": b""}[damage])
    compiler = KernelCompiler("sm_90a", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert compiler.cubin("tiny", source) == code
    assert compiler.compiled == 1
    assert "damaged" in caplog.text
    assert KernelCompiler("sm_90a", tmp_path).cubin("tiny", source) == code


@needs_nvrtc
def test_a_cache_that_cannot_be_written_does_not_stop_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert KernelCompiler("sm_90a", blocked / "cache").cubin("tiny", TINY.replace("VALUE", "1"))
    assert "cannot be cached" in caplog.text


@needs_nvrtc
def test_a_source_that_does_not_compile_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match=r"wrong\.cu for sm_80"):
        KernelCompiler("sm_80", None).cubin("wrong", "int x = ;")
    assert "error" in caplog.text


def test_architectures() -> None:
    assert architecture((8, 0)) == "sm_80"
    assert architecture((9, 0)) == "sm_90a"
    assert architecture((12, 0)) == "sm_120"
    with pytest.raises(ConfigurationError, match=r"compute capability 7\.5, 8\.0 or newer is needed"):
        architecture((7, 5))
