"""Vector instructions that numba has no words for, written as LLVM IR.

Owns: the vocabulary: vectors of 16 fp32, raw memory by address, loops, sums, e^x, rounding. Refuses to
know: what is computed with it. Invariants: no fast-math flag is set anywhere, so the compiler keeps the
order of every sum; a NaN that goes in comes out.

LLVM cuts the vectors to what the CPU has: one AVX-512 register, two of AVX2, four of NEON.

Usage: `value = load(builder, address, FLOATS, 4)` inside the `emit` of an `instruction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

LANES = 16
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)

Values = Any
"""LLVM values and builders, which llvmlite leaves untyped."""


def int_of(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * LANES)


def offset(builder: Values, address: Values, *factors: Values) -> Values:
    """address + the product of `factors`."""
    product = factors[0]
    for factor in factors[1:]:
        product = builder.mul(product, factor)
    return builder.add(address, product)


def load(builder: Values, address: Values, kind: Values, align: int) -> Values:
    value = builder.load(builder.inttoptr(address, ir.PointerType(kind)))
    value.align = align
    return value


def store(builder: Values, value: Values, address: Values, align: int) -> None:
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = align


def scalars(builder: Values, address: Values) -> Values:
    """A pointer to single fp32 values."""
    return builder.inttoptr(address, ir.PointerType(F32))


def prefetch(builder: Values, address: Values) -> None:
    """Ask for a cache line that is read soon; an address beyond the array does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    reads, keep, data = (ir.Constant(I32, flag) for flag in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, kind.args[0]), reads, keep, data])


def splat(builder: Values, value: Values) -> Values:
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ints(0))


def call(builder: Values, name: str, *arguments: Values) -> Values:
    """An LLVM intrinsic over whole vectors, such as llvm.fma."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, arguments)


def pairwise_sums(builder: Values, vectors: list[Values]) -> Values:
    """16 vectors -> one whose lane i is the sum of vector i, added neighbour by neighbour."""
    evens = ir.Constant(INTS, list(range(0, 2 * LANES, 2)))
    odds = ir.Constant(INTS, list(range(1, 2 * LANES, 2)))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, evens), builder.shuffle_vector(a, b, odds))
            for a, b in pairs
        ]
    return vectors[0]


def reduced(builder: Values, vector: Values, combine: Callable[[Values, Values], Values]) -> Values:
    """One scalar of 16 lanes: halves combined until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        mask = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return extract(builder, vector, 0)


def extract(builder: Values, vector: Values, lane: int) -> Values:
    return builder.extract_element(vector, ir.Constant(I32, lane))


def exp(builder: Values, x: Values) -> Values:
    """e^x to 2 ulp: 2^n times a polynomial in the rest (Cephes expf); 0 below -87.3."""
    lowest, highest = floats(-87.3), floats(88.3)
    low = builder.fcmp_ordered("<", x, lowest)
    inside = builder.select(low, lowest, x)
    inside = builder.select(builder.fcmp_ordered(">", inside, highest), highest, inside)
    n = call(builder, "rint", builder.fmul(inside, floats(math.log2(math.e))))
    rest = call(builder, "fma", n, floats(-0.693359375), inside)
    rest = call(builder, "fma", n, floats(2.12194440e-4), rest)
    y = floats(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = call(builder, "fma", y, rest, floats(coefficient))
    y = call(builder, "fma", y, builder.fmul(rest, rest), rest)
    y = builder.fadd(y, floats(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, INTS), ints(127)), ints(23))
    return builder.select(low, floats(0.0), builder.fmul(y, builder.bitcast(exponent, FLOATS)))


def rounded(builder: Values, value: Values) -> Values:
    """fp32 -> bf16, to nearest even. A NaN stays one: those of arithmetic have zeros in the low half."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    bits = builder.add(bits, builder.add(odd, ints(0x7FFF)))
    return builder.trunc(builder.lshr(bits, ints(16)), WORDS)


def widened(builder: Values, address: Values) -> Values:
    """16 bf16 at `address`, as fp32."""
    words = load(builder, address, WORDS, 2)
    return builder.bitcast(builder.shl(builder.zext(words, INTS), ints(16)), FLOATS)


def loop(
    builder: Values,
    count: Values,
    start: Sequence[Values],
    body: Callable[[Values, list[Values]], list[Values]],
) -> list[Values]:
    """`state = body(index, state)` for index in 0 .. count, at least once; returns the last state."""
    before, inside, after = (
        builder.block,
        builder.append_basic_block("inside"),
        builder.append_basic_block("after"),
    )
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(int_of(0), before)
    state = [builder.phi(value.type) for value in start]
    for phi, value in zip(state, start, strict=True):
        phi.add_incoming(value, before)
    updated = body(index, state)
    following = builder.add(index, int_of(1))
    for phi, value in zip(state, updated, strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return updated


def instruction(result: Values, letters: str, emit: Callable[..., Values]) -> Values:
    """What numba's `intrinsic` wants, by `emit(builder, *arguments)`: `i` is int64 and `f` float32."""

    def generate(context: Values, builder: Values, signature: Values, arguments: Values) -> Values:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if result == types.void else value

    return result(*({"i": types.int64, "f": types.float32}[letter] for letter in letters)), generate


def intrinsic(define: Callable[..., Values]) -> Callable[..., Values]:
    """numba's decorator, with a type; `define(context, *arguments)` answers by `instruction`."""
    made: Callable[..., Values] = extending.intrinsic(define)
    return made


def _pointer(kind: Values) -> Values:
    @intrinsic
    def pointer(context: Values, address: Values) -> Values:
        def generate(context: Values, builder: Values, signature: Values, arguments: Values) -> Values:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats_at = _pointer(types.float32)
words_at = _pointer(types.uint16)
bits_at = _pointer(types.uint32)
ints_at = _pointer(types.int64)
