"""The flight recorder: a ring of records in a memory-mapped file, which outlives the process that writes it.

One process writes (any of its threads, the garbage collector's calls included); any number of processes read
(`FlightRecorderReader`). No lock is taken: a record's place is claimed in one atomic step, and each claimed
place has one writer. A reader tells a record that is being written from a whole one by its checksum.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from time import monotonic_ns, time_ns
from typing import Self
from zlib import crc32

from engine.memory.errors import TraceFileError, Why
from engine.memory.reader import FlightRecorderReader
from engine.memory.record import (
    ASKED_AT,
    ASKED_CRC_AT,
    ASKED_STRUCT,
    CLOSED_AT,
    COUNTER_STRUCT,
    CRC_STRUCT,
    FREE_IS_READ,
    HAS_TEXT,
    HEADER_BYTES,
    MAGIC,
    NAMES_BYTES,
    OUTCOME_AT,
    OUTCOME_CRC_AT,
    OUTCOME_STRUCT,
    RECORD_BYTES,
    TEXT_AT,
    WHY_CODES,
    WRITTEN_AT,
    TraceHeader,
    encode_names,
    encode_text,
)

__all__ = ["FlightRecorder"]

_MOST_NAMES = 8192

# Looked up once: these run with every allocation.
_pack_asked = ASKED_STRUCT.pack
_pack_outcome = OUTCOME_STRUCT.pack
_put_crc = CRC_STRUCT.pack_into
_put_counter = COUNTER_STRUCT.pack_into
_get_counter = COUNTER_STRUCT.unpack_from


class FlightRecorder:
    """Writer of a trace.

    `begin` writes what is asked and returns the record's index; `end` writes what came of it. Both are cheap
    (about a microsecond) and never raise for want of room: the ring overwrites its oldest record. After
    `close` both do nothing, so that buffers may be freed later than the recorder.
    """

    def __init__(self, ring: mmap.mmap, header: TraceHeader, path: Path | None, lock: int | None) -> None:
        """Use `create` or `in_memory`."""
        self.header = header
        self.path = path
        self._ring = ring
        self._lock = lock
        self._capacity = header.capacity
        self._claim = itertools.count(1).__next__  # one bytecode: atomic, also against a destructor
        self._names: dict[tuple[str, str, tuple[str, ...]], tuple[bytes, int]] = {}

    @classmethod
    def create(cls, path: Path | str, header: TraceHeader) -> Self:
        """A recorder on a new file at `path`. A trace already there is kept beside it as ``<path>.previous``.

        The whole file is reserved now, so that a full disk shows here and not as a signal later.

        Raises
        ------
        TraceFileError
            The file cannot be made (one line with the system's reason), `path` holds something that is not a
            trace, or another process is writing it.
        """
        path = Path(path)
        header = _stamped(header)
        length = HEADER_BYTES + header.capacity * RECORD_BYTES
        _refuse_to_replace(path)
        # Made aside and renamed: readers of the old file keep it, and nobody ever sees half a header.
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        file = None
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _reserve(file, length)
            ring = mmap.mmap(file, length)
            ring[:HEADER_BYTES] = header.to_bytes()
            if path.exists() and path.stat().st_size:
                os.replace(path, path.with_name(path.name + ".previous"))
            os.replace(fresh, path)
        except OSError as error:
            if file is not None:
                os.close(file)
                with suppress(OSError):
                    fresh.unlink()
            raise TraceFileError(
                f"{path}: cannot create the flight recorder's file of {length} bytes: {error.strerror}"
            ) from error
        return cls(ring, header, path, file)

    @classmethod
    def in_memory(cls, header: TraceHeader) -> Self:
        """A recorder in the process's own memory: the same record, gone with the process."""
        header = _stamped(header)
        ring = mmap.mmap(-1, HEADER_BYTES + header.capacity * RECORD_BYTES)
        ring[:HEADER_BYTES] = header.to_bytes()
        return cls(ring, header, None, None)

    def reader(self) -> FlightRecorderReader:
        """A reader of this recorder, in this process."""
        if self.path is not None:
            return FlightRecorderReader(self.path)
        return FlightRecorderReader.of_ring(self._ring)

    def begin(
        self,
        kind: int,
        sequence: int,
        size: int,
        pointer: int,
        stream: int,
        api: bytes,
        tag: str,
        site: str,
        requests: tuple[str, ...],
    ) -> int:
        """Write a record's first half: what is about to be asked. Returns its index, 0 after `close`."""
        key = (tag, site, requests)
        known = self._names.get(key)
        if known is None:
            known = self._encode(key)
        names, names_crc = known
        index = self._claim()
        at = HEADER_BYTES + (index - 1) % self._capacity * RECORD_BYTES
        asked = _pack_asked(
            index,
            sequence,
            size,
            pointer,
            stream,
            get_ident(),
            monotonic_ns(),
            time_ns(),
            api,
            kind,
            len(requests),
        )
        ring = self._ring
        try:
            ring[at : at + NAMES_BYTES] = names
            ring[at + ASKED_AT : at + ASKED_CRC_AT] = asked
            _put_crc(ring, at + ASKED_CRC_AT, crc32(asked, names_crc))
            # A hint that spares readers a search. Threads may overtake each other here; readers look further.
            _put_counter(ring, WRITTEN_AT, index)
        except ValueError:  # closed
            return 0
        return index

    def end(
        self,
        index: int,
        state: int,
        pointer: int,
        live: int,
        free: int,
        free_is_read: bool,
        pool_used: int = -1,
        pool_reserved: int = -1,
        retries: int = 0,
        error_code: int = 0,
        why: Why | None = None,
        text: str = "",
    ) -> bool:
        """Write the second half of record `index`: its outcome.

        Returns False if the ring has lapped the record meanwhile, so that the outcome has no place.
        """
        at = HEADER_BYTES + (index - 1) % self._capacity * RECORD_BYTES
        ring = self._ring
        flags = FREE_IS_READ if free_is_read else 0
        if text:
            flags |= HAS_TEXT
        outcome = _pack_outcome(
            index,
            pointer,
            live,
            free,
            pool_used,
            pool_reserved,
            monotonic_ns(),
            error_code,
            retries & 0xFFFF,
            state,
            WHY_CODES[why] if why is not None else 0,
            flags,
        )
        crc = crc32(outcome)
        try:
            if _get_counter(ring, at + ASKED_AT)[0] != index:
                return False
            if text:
                data = encode_text(text).ljust(RECORD_BYTES - TEXT_AT, b"\0")
                ring[at + TEXT_AT : at + RECORD_BYTES] = data
                crc = crc32(data, crc)
            ring[at + OUTCOME_AT : at + OUTCOME_CRC_AT] = outcome
            _put_crc(ring, at + OUTCOME_CRC_AT, crc)
        except ValueError:  # closed
            pass
        return True

    @property
    def closed(self) -> bool:
        """Whether `close` was called: nothing more is recorded."""
        return self._ring.closed

    def close(self) -> None:
        """Mark the trace as cleanly closed and let go of the file. Idempotent."""
        if self._ring.closed:
            return
        _put_counter(self._ring, CLOSED_AT, time_ns())
        self._ring.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _encode(self, key: tuple[str, str, tuple[str, ...]]) -> tuple[bytes, int]:
        names = encode_names(*key)
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        known = self._names[key] = (names, crc32(names))
        return known


def _stamped(header: TraceHeader) -> TraceHeader:
    return replace(header, pid=os.getpid(), created_wall_ns=time_ns(), created_monotonic_ns=monotonic_ns())


def _refuse_to_replace(path: Path) -> None:
    """Raise TraceFileError if `path` holds anything but a trace that nobody writes."""
    try:
        status = path.stat()
    except OSError:
        return  # nothing there, or creating will say what is wrong
    if not stat.S_ISREG(status.st_mode):
        raise TraceFileError(f"{path}: expected a file for the flight recorder, this is something else")
    if not status.st_size:
        return
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be replaced by a new trace: {error.strerror}") from error
    try:
        if os.pread(file, len(MAGIC), 0) != MAGIC:
            raise TraceFileError(f"{path}: holds something that is not a trace; choose another file")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TraceFileError(f"{path}: another process is writing this trace; choose another file") from None
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be replaced by a new trace: {error.strerror}") from error
    finally:
        os.close(file)


def _reserve(file: int, length: int) -> None:
    """Give the file its blocks. A sparse one would kill the engine by SIGBUS when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, length)
        return
    block = bytes(1 << 20)
    for at in range(0, length, len(block)):
        os.pwrite(file, block[: length - at], at)
