"""Vector registers as values in compiled kernels.

numba's loops use vector registers where LLVM finds a way; a kernel that depends on it says so with these. A
register holds 16 float32 or uint32. LLVM turns what is done to it into the instructions that the machine has:
one register of 512 bits, or two, or four. Kernels hold what they accumulate in tuples of registers, whose
length is known when they are compiled, so that none of it goes through memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.backend.cpu.register_types import (
    BYTE,
    BYTES,
    FLOAT,
    FLOAT_REGISTER,
    FLOATS,
    INDEX,
    LANES,
    LOADED,
    SHORTS,
    WIDE,
    WORD,
    WORD_REGISTER,
    WORDS,
    call,
    cgutils,
    constant,
    fused,
    has_feature,
    intrinsic,
    pointer_to,
    read,
    shuffle,
    types,
    write,
)

__all__ = [
    "LANES",
    "WIDE",
    "accumulate_broadcast",
    "accumulate_first",
    "accumulate_rows",
    "add",
    "decode_e2m1",
    "load",
    "load_first",
    "load_quad",
    "multiply",
    "multiply_add",
    "prefetch",
    "shift_right",
    "store",
    "store_interleaved",
    "store_quads",
    "store_tokens",
    "sum_lanes",
    "total",
    "zero",
    "zeros",
]

# -- elements ----------------------------------------------------------------------------------------------


def _decoded(builder: Any, raw: Any) -> Any:
    """uint8 is E4M3 and uint16 is bfloat16: both become float32. The others are what they are."""
    if raw.type == SHORTS:
        return builder.bitcast(builder.shl(builder.zext(raw, WORDS), constant(16)), FLOATS)
    if raw.type == BYTES:
        return _decoded_e4m3(builder, builder.zext(raw, WORDS))
    return raw


def _decoded_e4m3(builder: Any, codes: Any) -> Any:
    """As `engine.backend.cpu.floats.decode_e4m3`: exact, with subnormals and NaN."""
    magnitude = builder.and_(codes, constant(0x7F))
    sign = builder.shl(builder.and_(codes, constant(0x80)), constant(24))
    normal = builder.add(builder.shl(magnitude, constant(20)), constant(120 << 23))
    subnormal = builder.fmul(builder.sitofp(magnitude, FLOATS), constant(2.0**-9, FLOATS))
    is_subnormal = builder.icmp_unsigned("<", magnitude, constant(8))
    bits = builder.select(is_subnormal, builder.bitcast(subnormal, WORDS), normal)
    is_nan = builder.icmp_unsigned("==", magnitude, constant(0x7F))
    bits = builder.select(is_nan, constant(0x7FC0_0000), bits)
    return builder.bitcast(builder.or_(bits, sign), FLOATS)


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@intrinsic
def decode_e2m1(typing: Any, codes: Any) -> Any:
    """float32 of the E2M1 code in the low four bits of each lane. Higher bits may be anything."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (code,) = arguments
        if has_feature(context, "avx512f"):
            table = ir.Constant(FLOATS, _E2M1 + [-value for value in _E2M1])
            return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, code)
        sign = builder.shl(builder.and_(code, constant(8)), constant(28))
        if has_feature(context, "avx2"):
            magnitude = _looked_up_in_halves(builder, code)
        else:
            bits = builder.and_(code, constant(7))
            # E2M1's exponent and mantissa, moved to float32's place and bias. 0 and 0.5 have no exponent.
            normal = builder.add(builder.shl(bits, constant(22)), constant(126 << 23))
            zero_or_half = builder.and_(builder.sub(constant(0), bits), constant(126 << 23))
            magnitude = builder.select(builder.icmp_unsigned("<", bits, constant(2)), zero_or_half, normal)
        return builder.bitcast(builder.or_(magnitude, sign), FLOATS)

    return FLOAT_REGISTER(codes), generate


def _looked_up_in_halves(builder: Any, code: Any) -> Any:
    """E2M1's magnitudes by AVX2's permutation, which looks at three bits of each lane."""
    halves: list[Any] = []
    floats, table = ir.VectorType(FLOAT, 8), ir.Constant(ir.VectorType(FLOAT, 8), _E2M1)
    for first in (0, 8):
        half = shuffle(builder, code, code, list(range(first, first + 8)))
        halves.append(call(builder, "llvm.x86.avx2.permps", floats, table, half))
    return builder.bitcast(shuffle(builder, halves[0], halves[1], list(range(LANES))), WORDS)


# -- to and from memory ------------------------------------------------------------------------------------


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """A register of 16 consecutive elements. uint8 is decoded as E4M3, uint16 as bfloat16."""
    register, vector = LOADED[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], *arguments)
        return _decoded(builder, read(builder, pointer, vector))

    return register(array, types.intp), generate


@intrinsic
def load_first(typing: Any, array: Any, index: Any, count: Any) -> Any:
    """As `load`, but of the first `count` elements only; the other lanes are zero."""
    register, vector = LOADED[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, index, count = arguments
        pointer = pointer_to(context, builder, signature.args[0], source, index)
        return _decoded(builder, _read_first(builder, pointer, vector, count))

    return register(array, types.intp, types.intp), generate


def _read_first(builder: Any, pointer: Any, vector: ir.VectorType, count: Any) -> Any:
    padded = cgutils.alloca_once(builder, vector)
    builder.store(ir.Constant(vector, None), padded)
    size = ir.Constant(INDEX, vector.element.width // 8 if vector != FLOATS else 4)
    cgutils.raw_memcpy(builder, builder.bitcast(padded, pointer.type), pointer, count, size)
    return builder.load(padded)


@intrinsic
def store_tokens(
    typing: Any, array: Any, index: Any, stride: Any, sums: Any, scale: Any, bias: Any, count: Any
) -> Any:
    """``sums[t] * scale + bias`` to 16 elements from ``index + t * stride`` on, for each t below `count`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, stride, sums, scale, bias, count = arguments
        pointer = pointer_to(context, builder, signature.args[0], array, index)
        for t in range(len(signature.args[3])):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(INDEX, t), count)):
                result = fused(builder, builder.extract_value(sums, t), scale, bias)
                distance = builder.mul(ir.Constant(INDEX, t), stride)
                write(builder, result, builder.gep(pointer, [distance]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, sums, scale, bias, types.intp), generate


@intrinsic
def load_quad(typing: Any, array: Any, index: Any) -> Any:
    """Four consecutive float32, four times."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], *arguments)
        quad = read(builder, pointer, ir.VectorType(FLOAT, 4))
        return shuffle(builder, quad, quad, [0, 1, 2, 3] * 4)

    return FLOAT_REGISTER(array, types.intp), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for an element's cache line, which will be read soon. There may be no such element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(
            pointer_to(context, builder, signature.args[0], *arguments), BYTE.as_pointer()
        )
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function_type)
        read, all_caches, data = (ir.Constant(WORD, choice) for choice in (0, 3, 1))
        builder.call(function, [pointer, read, all_caches, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, register: Any) -> Any:
    """16 consecutive elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, register = arguments
        write(builder, register, pointer_to(context, builder, signature.args[0], array, index))
        return context.get_dummy_value()

    return types.void(array, types.intp, register), generate


@intrinsic
def store_interleaved(
    typing: Any, target: Any, at: Any, source: Any, index: Any, stride: Any, count: Any, tile: Any
) -> Any:
    """``source[index + t * stride + k]`` to ``target[at + k * len(tile) + t]``, for 16 k and all t in `tile`.

    A t that is not below `count` reads what the last one reads.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, source, index, stride, count, _ = arguments
        pointer = pointer_to(context, builder, signature.args[2], source, index)
        rows = []
        for t in range(len(tile)):
            rows.append(read(builder, pointer, FLOATS))
            is_last = builder.icmp_signed(">=", ir.Constant(INDEX, t + 1), count)
            pointer = builder.select(is_last, pointer, builder.gep(pointer, [stride]))
        pointer = pointer_to(context, builder, signature.args[0], target, at)
        for place, register in enumerate(_interleaved(builder, rows)):
            write(builder, register, builder.gep(pointer, [ir.Constant(INDEX, place * LANES)]))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp, types.intp, tile), generate


def _interleaved(builder: Any, registers: list[Any]) -> list[Any]:
    """The first lanes of all, then the second lanes of all, and so on. There are a power of two of them."""
    if len(registers) == 1:
        return registers
    pairs = zip(_interleaved(builder, registers[::2]), _interleaved(builder, registers[1::2]), strict=True)
    alternating = [lane for place in range(LANES) for lane in (place, LANES + place)]
    halves = alternating[:LANES], alternating[LANES:]
    return [shuffle(builder, even, odd, half) for even, odd in pairs for half in halves]


@intrinsic
def store_quads(typing: Any, array: Any, index: Any, stride: Any, register: Any, tile: Any) -> Any:
    """Lanes ``4 t`` to ``4 t + 3`` from ``index + t * stride`` on, for as many t as `tile` has elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, stride, register, _ = arguments
        pointer = pointer_to(context, builder, signature.args[0], array, index)
        for t in range(len(tile)):
            write(builder, shuffle(builder, register, register, list(range(4 * t, 4 * t + 4))), pointer)
            pointer = builder.gep(pointer, [stride])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, register, tile), generate


# -- arithmetic --------------------------------------------------------------------------------------------


@intrinsic
def zero(typing: Any) -> Any:
    """A register of zeros."""
    return FLOAT_REGISTER(), lambda *_: constant(0.0, FLOATS)


@intrinsic
def zeros(typing: Any, tile: Any) -> Any:
    """Registers of zeros, as many as the tuple `tile` has elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        registers = [constant(0.0, FLOATS)] * len(tile)
        return context.make_tuple(builder, signature.return_type, registers)

    return types.UniTuple(FLOAT_REGISTER, len(tile))(tile), generate


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    """``a * b``"""
    return FLOAT_REGISTER(a, b), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """``a + b``"""
    return FLOAT_REGISTER(a, b), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the machine can."""
    return FLOAT_REGISTER(a, b, c), lambda context, builder, signature, arguments: fused(builder, *arguments)


@intrinsic
def shift_right(typing: Any, codes: Any) -> Any:
    """The next four bits of each lane, where the lowest were."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], constant(4))

    return WORD_REGISTER(codes), generate


@intrinsic
def accumulate_broadcast(typing: Any, sums: Any, weight: Any, array: Any, index: Any) -> Any:
    """``sums[t] + weight * array[index + t]`` for each of `sums`: one number for all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weight, array, index = arguments
        pointer = pointer_to(context, builder, signature.args[2], array, index)
        results = []
        for t in range(len(signature.args[0])):
            number = builder.load(builder.gep(pointer, [ir.Constant(INDEX, t)]))
            lowest = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, ir.Constant(WORD, 0))
            everywhere = shuffle(builder, lowest, lowest, [0] * LANES)
            results.append(fused(builder, weight, everywhere, builder.extract_value(sums, t)))
        return context.make_tuple(builder, signature.return_type, results)

    return sums(sums, weight, array, types.intp), generate


@intrinsic
def accumulate_rows(typing: Any, sums: Any, weight: Any, array: Any, index: Any, stride: Any) -> Any:
    """``sums[t] + weight * array[index + t * stride :][:16]`` for each of `sums`: a number for each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weight, array, index, stride = arguments
        pointer = pointer_to(context, builder, signature.args[2], array, index)
        results = []
        for t in range(len(signature.args[0])):
            numbers = read(builder, pointer, FLOATS)
            results.append(fused(builder, weight, numbers, builder.extract_value(sums, t)))
            pointer = builder.gep(pointer, [stride])
        return context.make_tuple(builder, signature.return_type, results)

    return sums(sums, weight, array, types.intp, types.intp), generate


@intrinsic
def accumulate_first(
    typing: Any, sums: Any, weight: Any, array: Any, index: Any, stride: Any, count: Any
) -> Any:
    """As `accumulate_rows`, but of the first `count` lanes only."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weight, array, index, stride, count = arguments
        pointer = pointer_to(context, builder, signature.args[2], array, index)
        results = []
        for t in range(len(signature.args[0])):
            numbers = _read_first(builder, pointer, FLOATS, count)
            results.append(fused(builder, weight, numbers, builder.extract_value(sums, t)))
            pointer = builder.gep(pointer, [stride])
        return context.make_tuple(builder, signature.return_type, results)

    return sums(sums, weight, array, types.intp, types.intp, types.intp), generate


@intrinsic
def sum_lanes(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of the lanes of ``a[t], b[t], c[t], d[t]`` in lanes ``4 t`` to ``4 t + 3``, for up to four t.

    A register's lanes are added in pairs, pairs of pairs and so on, whatever other registers there are.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tokens = range(len(signature.args[0]))
        return _lane_sums(builder, [builder.extract_value(sums, t) for t in tokens for sums in arguments])

    return FLOAT_REGISTER(a, b, c, d), generate


@intrinsic
def total(typing: Any, register: Any) -> Any:
    """The sum of the lanes, added as `sum_lanes` adds them: float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(_lane_sums(builder, list(arguments)), ir.Constant(WORD, 0))

    return types.float32(register), generate


def _lane_sums(builder: Any, registers: list[Any]) -> Any:
    """A register of the sums of the lanes of up to 16 registers."""
    level = registers
    even, odd = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
    for _ in range(LANES.bit_length() - 1):
        if len(level) % 2:
            level.append(level[-1])
        level = [
            builder.fadd(shuffle(builder, left, right, even), shuffle(builder, left, right, odd))
            for left, right in zip(level[::2], level[1::2], strict=True)
        ]
    return level[0]
