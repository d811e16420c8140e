"""What all simulated allocators share: a device of so many bytes, and who holds what of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from engine.memory.errors import AllocationRequest, OutOfMemoryError, UnknownPointerError, Why

__all__ = ["ALIGNMENT", "SimulatedAllocator", "round_up"]

ALIGNMENT = 512
"""bytes: what addresses inside of a step are multiples of, as cudaMalloc's are"""
_FIRST_ADDRESS = 1 << 44


def round_up(size: int, step: int) -> int:
    """`size`, or the next multiple of `step`."""
    return -(-size // step) * step


class SimulatedAllocator(ABC):
    """An allocator over a device of `capacity` bytes, which it takes in steps of `granularity`.

    Attributes
    ----------
    requested : int
        Bytes that live blocks were asked for.
    used : int
        The same as the allocator rounds them.
    reserved : int
        Bytes taken from the device. What is reserved and not used is free only inside the allocator.

    Raises
    ------
    ValueError
        On construction: `granularity` is no multiple of 512 bytes, or `capacity` is negative.
    """

    name: ClassVar[str]
    standard_granularity: ClassVar[int]

    def __init__(self, capacity: int, granularity: int | None = None) -> None:
        step = self.standard_granularity if granularity is None else granularity
        if step < ALIGNMENT or step % ALIGNMENT:
            raise ValueError(f"a granularity of {step} bytes is no multiple of {ALIGNMENT}")
        if capacity < 0:
            raise ValueError(f"a capacity of {capacity} bytes is less than none")
        self.capacity = capacity
        self.granularity = step
        self.requested = 0
        self.used = 0
        self.reserved = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """requested and used bytes of live blocks, by address"""
        self._next_address = _FIRST_ADDRESS

    def allocate(self, size: int) -> int:
        """Address of a block of `size` bytes. A block of none costs nothing.

        Raises
        ------
        OutOfMemoryError
            ``why=full``: fewer than `size` bytes are free on the device and in the allocator together;
            ``why=fragmentation``: they are, but not in one piece.
        """
        if not size:
            address = self._new_addresses(ALIGNMENT)
            self._sizes[address] = (0, 0)
            return address
        found = self._place(size)
        if found is None:
            raise self._failure(size)
        address, cost = found
        self._sizes[address] = (size, cost)
        self.requested += size
        self.used += cost
        return address

    def free(self, address: int) -> None:
        """Give a block back. Raises `UnknownPointerError` if `address` is no live block's."""
        size, cost = self._sizes.pop(address, (0, -1))
        if cost < 0:
            raise UnknownPointerError(address, 0)
        self.requested -= size
        self.used -= cost
        if cost:
            self._remove(address, cost)

    @property
    def free_bytes(self) -> int:
        """Bytes that no block holds, on the device and in the allocator."""
        return self.capacity - self.used

    @property
    @abstractmethod
    def largest_free(self) -> int:
        """The largest request that would succeed now."""

    @abstractmethod
    def _place(self, size: int) -> tuple[int, int] | None:
        """Address and rounded bytes of a new block; None if there is no room."""

    @abstractmethod
    def _remove(self, address: int, cost: int) -> None:
        """Take a block of `cost` rounded bytes away."""

    def _reserve(self, size: int) -> bool:
        """Take `size` bytes, whole steps, from the device, if it has them."""
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    @property
    def _unreserved(self) -> int:
        """Bytes of whole steps that the device still has."""
        return (self.capacity - self.reserved) // self.granularity * self.granularity

    def _new_addresses(self, size: int) -> int:
        """The first of `size` addresses that were never used, with a gap before the next."""
        address = self._next_address
        self._next_address += round_up(size, self.granularity) + self.granularity
        return address

    def _failure(self, size: int) -> OutOfMemoryError:
        why = Why.FULL if size > self.free_bytes else Why.FRAGMENTATION
        return OutOfMemoryError(
            AllocationRequest(
                size, api=self.name, why=why, error="out of memory", free=self.free_bytes, live=self.requested
            )
        )
