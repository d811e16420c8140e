"""Typed messages between the engine's process and the one that watches it, over a socket pair.

A frame is the length of its payload (4 bytes, little-endian) and the payload: one message in MessagePack.
Into the engine go `StartEngine` once, then what `engine.messages` calls `EngineMessage`. Out of it come::

    LoadProgress*  (EngineReady | LoadRefused | FailureReport EngineFailed)
    (StepOutputs | MemoryReport | FailureReport)*  [EngineFailed]
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from engine.config import EngineConfig, EngineLimits
from engine.failure_record import FailureRecord
from engine.memory.settings import TraceSettings
from engine.messages import Abort, AddRequest, EngineFailed, Shutdown, StepOutputs

__all__ = [
    "EngineReady",
    "FailureReport",
    "FrameDecoder",
    "IntoEngine",
    "LoadProgress",
    "LoadRefused",
    "MemoryReport",
    "OutOfEngine",
    "StartEngine",
    "WireSocket",
    "encode_frame",
    "from_engine",
    "to_engine",
]

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 18
_MOST_BYTES: Final = 1 << 28
"""of one message; what claims to be longer is no message of ours"""


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """The first message: what the engine is to be."""

    config: EngineConfig
    trace: TraceSettings
    log_level: int
    """as `logging` counts them"""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the load is."""

    label: str
    done: int
    """bytes"""
    total: int
    """bytes"""


class MemoryReport(msgspec.Struct, frozen=True, tag="memory"):
    """The memory house's figures, as `Ledger.to_dict` and `MemoryHouse.statistics_dict` have them."""

    ledger: dict[str, Any]
    statistics: dict[str, Any] | None


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests from now on."""

    limits: EngineLimits
    summary: str
    """what was decided about the KV cache, in a line"""


class LoadRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A flag or the checkpoint cannot be used. Trying again would not help."""

    text: str
    is_usage: bool
    """it is a flag or variable, not a file"""


class FailureReport(msgspec.Struct, frozen=True, tag="failure"):
    """A failure record was made, of the engine or of one request."""

    record: FailureRecord


IntoEngine = StartEngine | AddRequest | Abort | Shutdown
OutOfEngine = (
    LoadProgress | EngineReady | LoadRefused | StepOutputs | MemoryReport | FailureReport | EngineFailed
)

T = TypeVar("T")


def _encode_other(value: object) -> object:
    if isinstance(value, Path):
        return os.fsencode(value)  # it need not be text
    raise NotImplementedError(f"{type(value).__name__} is not sent")


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(os.fsdecode(value))
    raise NotImplementedError(f"{kind.__name__} is not received")


def encode_frame(message: msgspec.Struct) -> bytes:
    """`message` as it goes over the socket."""
    payload = _ENCODER.encode(message)
    return _LENGTH.pack(len(payload)) + payload


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)


class FrameDecoder(Generic[T]):
    """Cuts what arrives into messages of one direction."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(messages, dec_hook=_decode_other)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that `data` completes.

        Raises
        ------
        msgspec.DecodeError
            The other side speaks something else.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, at)
                if length > _MOST_BYTES:
                    raise msgspec.DecodeError(f"a message of {length} bytes: expected at most {_MOST_BYTES}")
                end = at + _LENGTH.size + length
                if end > len(buffer):
                    break
                payload = bytes(memoryview(buffer)[at + _LENGTH.size : end])
                at = end
                yield self._decoder.decode(payload)
        finally:
            del buffer[:at]


def to_engine() -> FrameDecoder[IntoEngine]:
    """A decoder for the engine's end."""
    return FrameDecoder(IntoEngine)


def from_engine() -> FrameDecoder[OutOfEngine]:
    """A decoder for the watching end."""
    return FrameDecoder(OutOfEngine)


class WireSocket:
    """The engine's end of the socket pair: blocking, one thread reads, any thread writes.

    A reader that falls behind fills the socket's buffer; `send` then waits, which holds the engine back.
    """

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    def send(self, message: OutOfEngine) -> None:
        """Send a message. Raises OSError when the other side is gone."""
        frame = encode_frame(message)
        with self._lock:
            self._inner.sendall(frame)

    def messages(self) -> Iterator[IntoEngine]:
        """Messages as they come, until the other side is gone."""
        decoder = to_engine()
        while data := self._inner.recv(_RECEIVE_BYTES):
            yield from decoder.feed(data)
