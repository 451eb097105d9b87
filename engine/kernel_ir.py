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


def prefetch(builder: Values, address: Values, level: int = 1) -> None:
    """Ask for a cache line that is read soon, into cache `level`; one beyond the array does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    reads, keep, data = (ir.Constant(I32, flag) for flag in (0, 4 - level, 1))
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


def pairwise_sums(builder: Values, vectors: list[Values], met: int = 1) -> Values:
    """16 vectors -> one whose lane i is the sum of vector i, added neighbour by neighbour.

    Fewer vectors -> what is then one of the vectors, in each of which `met` have met. Lanes first meet
    inside the quarters of registers, where moving them is cheapest, then quarters do.
    """
    while len(vectors) > 1:
        first, second = _neighbours(met >= LANES // 4)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
            for a, b in pairs
        ]
        met *= 2
    return vectors[0]


def _neighbours(of_quarters: bool) -> tuple[Values, Values]:
    """Masks that take the even and the odd ones of two vectors: lanes of each quarter, or quarters."""
    quarter = LANES // 4
    if of_quarters:
        evens = [quarter * part + lane for part in range(0, 2 * quarter, 2) for lane in range(quarter)]
        step = quarter
    else:
        evens = [quarter * part + lane for part in range(quarter) for lane in (0, 2, LANES, LANES + 2)]
        step = 1
    return ir.Constant(INTS, evens), ir.Constant(INTS, [lane + step for lane in evens])


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
    """e^x, for x up to 88, to 2 ulp: 2^n times a polynomial in the rest (Cephes expf); 0 below -87.3."""
    # Added to a number of this size, n lies in the lowest bits, with the bias of an exponent.
    size = floats(1.5 * 2**23 + 127)
    shifted = call(builder, "fma", x, floats(math.log2(math.e)), size)
    n = builder.fsub(shifted, size)
    rest = call(builder, "fma", n, floats(-0.693359375), x)
    rest = call(builder, "fma", n, floats(2.12194440e-4), rest)
    square = builder.fmul(rest, rest)
    # In twos, not one after another: attention waits for the last of these.
    high, middle, low = (
        call(builder, "fma", floats(factor), rest, floats(added))
        for factor, added in (
            (1.9875691500e-4, 1.3981999507e-3), (8.3334519073e-3, 4.1665795894e-2),
            (1.6666665459e-1, 5.0000001201e-1),
        )
    )  # fmt: skip
    y = call(builder, "fma", call(builder, "fma", high, square, middle), square, low)
    y = call(builder, "fma", y, square, builder.fadd(rest, floats(1.0)))
    power = builder.bitcast(builder.shl(builder.bitcast(shifted, INTS), ints(23)), FLOATS)
    below = builder.fcmp_ordered("<", x, floats(-87.3))
    return builder.select(below, floats(0.0), builder.fmul(y, power))


def _rounded_up(builder: Values, value: Values) -> Values:
    """Bits of fp32 whose upper halves are the nearest bf16, ties to even.

    A NaN stays one: those of arithmetic have zeros in the low half.
    """
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    return builder.add(bits, builder.add(odd, ints(0x7FFF)))


def rounded(builder: Values, value: Values) -> Values:
    """fp32 -> bf16, to nearest even."""
    return builder.trunc(builder.lshr(_rounded_up(builder, value), ints(16)), WORDS)


def split(builder: Values, words: Values) -> tuple[Values, Values]:
    """The lower and the upper bf16 of 16 words, as fp32."""
    low, high = builder.shl(words, ints(16)), builder.and_(words, ints(0xFFFF0000))
    return builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)


def joined(builder: Values, low: Values, high: Values) -> Values:
    """Words of what `split` gives, rounded to bf16."""
    lower = builder.lshr(_rounded_up(builder, low), ints(16))
    return builder.or_(lower, builder.and_(_rounded_up(builder, high), ints(0xFFFF0000)))


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
