"""Models on the host's cores: NumPy and numba."""

import os

from engine.backend.cpu.environment import check_environment

check_environment(os.environ)

from engine.backend.cpu.backend import CpuBackend  # noqa: E402  # imports numba

__all__ = ["CpuBackend"]
