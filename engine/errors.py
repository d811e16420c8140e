"""The exception tree of vtserve.

::

    VtserveError
    ├── AllocationError             engine.memory.errors: a request to a memory resource failed
    │   ├── OutOfMemoryError        the bytes are not there; the device is still usable
    │   └── StickyDeviceError       the CUDA context is lost; only a new process goes on
    ├── TraceFileError              engine.memory.errors: a flight recorder's file cannot be read
    ├── ConfigurationError          engine.memory.errors: a flag, variable or field has an unusable value
    ├── CheckpointError             a checkpoint's file or tensor is missing, damaged or contradicts itself
    │   └── UnsupportedModelError   sound, but of an architecture or quantisation that is not served
    ├── RequestError                a request cannot be served as asked; only that request fails
    └── EngineError
        ├── DeviceError             a call of the device's failed: a launch, a copy, a compilation
        │   └── DeviceLostError     so did the context; only a new process goes on
        ├── EngineLostError         the engine's process ended or hung without saying why
        └── EngineDeadError         the engine stopped; nothing more can be asked of it

Every message is one line that names the file, field or flag and what was expected.
"""

from __future__ import annotations

from engine.memory.errors import ConfigurationError, VtserveError

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DeviceError",
    "DeviceLostError",
    "EngineDeadError",
    "EngineError",
    "EngineLostError",
    "RequestError",
    "UnsupportedModelError",
    "VtserveError",
]


class CheckpointError(VtserveError):
    """A checkpoint's file or tensor is missing, damaged, or contradicts config.json."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its architecture or quantisation is not served."""


class RequestError(VtserveError):
    """One request cannot be served as asked. The engine goes on.

    Attributes
    ----------
    field : str
        The request field that is at fault, in the spelling of `SamplingParams`, or ``"prompt"``.
    """

    def __init__(self, message: str, *, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class EngineError(VtserveError):
    """The engine could not do what was asked."""


class DeviceError(EngineError):
    """The device could not do what was asked: a launch, a copy, a wait. Not a request for memory.

    Attributes
    ----------
    code : int
        The driver's error number.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DeviceLostError(DeviceError):
    """The CUDA context is lost: an earlier kernel's error comes out of whatever is called next.

    What `StickyDeviceError` is to a request for memory. No further CUDA call is made; only a new process goes
    on.
    """


class EngineLostError(EngineError):
    """The engine's process ended, or hung and was killed, without a word."""


class EngineDeadError(EngineError):
    """The engine stopped, or did not start; nothing more can be asked of it. The cause is its ``__cause__``.

    Attributes
    ----------
    failure_id : str or None
        The failure record that tells more, and that ``engine-fatal`` on stderr told of already.
    """

    def __init__(self, message: str, *, failure_id: str | None = None) -> None:
        super().__init__(message)
        self.failure_id = failure_id
