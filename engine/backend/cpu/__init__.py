"""Models on the host's cores: NumPy and numba."""

from engine.backend.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
