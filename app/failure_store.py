"""The failure records of this server, newest first. They outlive the engines that they are of."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.failure_record import FailureRecord

__all__ = ["FailureStore"]

_MOST = 256


class FailureStore:
    """Keeps the newest records in memory: a full disk does not hide them."""

    def __init__(self, capacity: int = _MOST) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, FailureRecord] = OrderedDict()
        self._whys: Counter[str] = Counter()

    def add(self, record: FailureRecord) -> None:
        """Keep `record`; the oldest goes if there are too many."""
        self._records[record.id] = record
        if record.allocation is not None and (why := record.allocation.get("why")):
            self._whys[why] += 1
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    @property
    def last(self) -> FailureRecord | None:
        """The newest."""
        return next(reversed(self._records.values()), None)

    def list(self) -> list[dict[str, Any]]:
        """What each is about, newest first: id, time, fatal, doing, what, why, requests."""
        return [
            {
                "id": record.id,
                "time": record.time,
                "fatal": record.fatal,
                "doing": record.doing,
                "what": record.what,
                "why": None if record.allocation is None else record.allocation.get("why"),
                "requests": [request.request_id for request in record.requests],
            }
            for record in reversed(self._records.values())
        ]

    def get(self, failure_id: str) -> bytes | None:
        """The record as JSON."""
        record = self._records.get(failure_id)
        return None if record is None else msgspec.json.encode(record)

    def counts_by_why(self) -> Mapping[str, int]:
        """Requests for memory that ended in a record, by their classification."""
        return dict(self._whys)
