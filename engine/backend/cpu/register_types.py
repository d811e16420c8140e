"""What vector registers are to numba and LLVM: their types, and what operations on them are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.core.cgutils
import numba.core.types
import numba.extending
from llvmlite import ir
from numba.core.registry import cpu_target
from numba.extending import models, register_model

__all__ = [
    "BYTE",
    "BYTES",
    "FLOAT",
    "FLOATS",
    "FLOAT_REGISTER",
    "INDEX",
    "LANES",
    "LOADED",
    "SHORT",
    "SHORTS",
    "WIDE",
    "WORD",
    "WORDS",
    "WORD_REGISTER",
    "Register",
    "call",
    "cgutils",
    "constant",
    "fused",
    "has_feature",
    "intrinsic",
    "pointer_to",
    "read",
    "shuffle",
    "types",
    "write",
]

# numba annotates some of these in part, and an intrinsic as the function that types it.
intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic
cgutils: Any = numba.core.cgutils
types: Any = numba.core.types

LANES = 16
"""Elements of a register."""


class Register(numba.core.types.Type):
    """16 elements, float32 or uint32."""

    def __init__(self, element: str) -> None:
        super().__init__(name=f"Register({element})")
        self.element = element


BYTE, SHORT, WORD, INDEX = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
BYTES, SHORTS = ir.VectorType(BYTE, LANES), ir.VectorType(SHORT, LANES)
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)

FLOAT_REGISTER, WORD_REGISTER = Register("float32"), Register("uint32")

LOADED = {
    types.float32: (FLOAT_REGISTER, FLOATS),
    types.uint32: (WORD_REGISTER, WORDS),
    types.uint16: (FLOAT_REGISTER, SHORTS),
    types.uint8: (FLOAT_REGISTER, BYTES),
}
"""What a load of an array's elements gives, and the vector that is read for it."""


@register_model(Register)
class _RegisterModel(models.PrimitiveModel):
    def __init__(self, manager: Any, register: Register) -> None:
        vector = FLOATS if register.element == "float32" else WORDS
        super().__init__(manager, register, vector)  # type: ignore[no-untyped-call]


def has_feature(context: Any, feature: str) -> bool:
    """Whether the machine that is compiled for has `feature`."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


WIDE = has_feature(cpu_target.target_context, "avx512f")
"""The machine has 32 registers of 16 elements of its own. Elsewhere kernels keep fewer sums at a time."""


def constant(value: float, vector: ir.VectorType = WORDS) -> ir.Constant:
    """`value` in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's intrinsic functions, by its whole name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, in one operation where the machine has it."""
    return call(builder, "llvm.fmuladd.v16f32", FLOATS, a, b, c)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """A register of lanes of `a`, and of `b` from where those end."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to an array's element, counted from its first one in memory."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def read(builder: Any, pointer: Any, vector: ir.VectorType) -> Any:
    """A vector from memory, however it is aligned."""
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)


def write(builder: Any, value: Any, pointer: Any) -> None:
    """A vector to memory, however it is aligned."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=1)
