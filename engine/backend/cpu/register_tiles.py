"""Tuples of vector registers, to and from memory."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from engine.backend.cpu.register_types import (
    FLOAT_REGISTER,
    FLOATS,
    INDEX,
    intrinsic,
    pointer_to,
    read,
    write,
)

__all__ = ["load_tile", "scale_tile", "store_tile"]


def _places(builder: Any, pointer: Any, stride: Any, count: int) -> list[Any]:
    distances = (builder.mul(ir.Constant(INDEX, t), stride) for t in range(count))
    return [builder.gep(pointer, [distance]) for distance in distances]


@intrinsic
def load_tile(typing: Any, array: Any, index: Any, stride: Any, tile: Any) -> Any:
    """Registers from ``index + t * stride`` on, as many as `tile` has elements; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, stride, _ = arguments
        pointer = pointer_to(context, builder, signature.args[0], array, index)
        registers = [read(builder, place, FLOATS) for place in _places(builder, pointer, stride, len(tile))]
        return context.make_tuple(builder, signature.return_type, registers)

    registers: Any = types.UniTuple(FLOAT_REGISTER, len(tile))  # type: ignore[no-untyped-call]
    return registers(array, types.intp, types.intp, tile), generate


@intrinsic
def store_tile(typing: Any, array: Any, index: Any, stride: Any, registers: Any) -> Any:
    """Each of `registers` to ``index + t * stride``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, stride, values = arguments
        pointer = pointer_to(context, builder, signature.args[0], array, index)
        for t, place in enumerate(_places(builder, pointer, stride, len(registers))):
            write(builder, builder.extract_value(values, t), place)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, registers), generate


@intrinsic
def scale_tile(typing: Any, registers: Any, factor: Any) -> Any:
    """Each of `registers` times the register `factor`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, factor = arguments
        scaled = [
            builder.fmul(builder.extract_value(values, t), factor) for t in range(len(signature.args[0]))
        ]
        return context.make_tuple(builder, signature.return_type, scaled)

    return registers(registers, factor), generate
