"""The two halves of records as they lie in the ring, each true only if its checksum says so."""

from __future__ import annotations

import zlib

import numpy as np

from engine.memory.record import (
    ASKED_CRC_AT,
    HAS_TEXT,
    OUTCOME_AT,
    OUTCOME_CRC_AT,
    RECORD_BYTES,
    TEXT_AT,
    EventState,
)

__all__ = ["has_outcome", "make_good", "whole"]

_UNKNOWN_OUTCOME = {
    "live": 0,
    "free": -1,
    "pool_used": -1,
    "pool_reserved": -1,
    "finished_ns": 0,
    "error_code": 0,
    "retries": 0,
    "why": 0,
    "flags": 0,
}


def has_outcome(records: np.ndarray) -> np.ndarray:
    """Which records, made good, have an outcome."""
    state = records["state"]
    return np.asarray((state == EventState.OK) | (state == EventState.FAILED))


def whole(slots: np.ndarray) -> np.ndarray:
    """Which slots hold a first half with the right checksum."""
    data = slots.view(np.uint8).data
    crc = zlib.crc32
    computed = [crc(data[at : at + ASKED_CRC_AT]) for at in range(0, len(data), RECORD_BYTES)]
    return np.asarray(slots["asked_crc"] == np.array(computed, np.uint32))


def make_good(records: np.ndarray) -> None:
    """Set `state` to INTENT or TORN where the outcome is missing or damaged; clear what is another's."""
    data = records.view(np.uint8).data
    crc = zlib.crc32
    states: list[int] = records["state"].tolist()
    mine = (records["outcome_index"] == records["index"]).tolist()
    texts = ((records["flags"] & HAS_TEXT) != 0).tolist()
    for place, expected in enumerate(records["outcome_crc"].tolist()):
        at = place * RECORD_BYTES
        outcome = data[at + OUTCOME_AT : at + OUTCOME_CRC_AT]
        computed = crc(outcome)
        if texts[place]:
            computed = crc(data[at + TEXT_AT : at + RECORD_BYTES], computed)
        if computed != expected:
            # A slot used for the first time is all zeros here.
            states[place] = EventState.TORN if any(outcome) else EventState.INTENT
        elif not mine[place]:
            states[place] = EventState.INTENT
        elif states[place] not in (EventState.OK, EventState.FAILED):
            states[place] = EventState.TORN
    records["state"] = states
    asked_only = ~has_outcome(records)
    for name, unknown in _UNKNOWN_OUTCOME.items():
        records[name][asked_only] = unknown
    records["pointer"][asked_only] = records["asked_pointer"][asked_only]
    records["text"][(records["flags"] & HAS_TEXT) == 0] = b""
