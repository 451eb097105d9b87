"""Several kernels by one call: a tape of instructions, performed one after the other.

Owns: the form of an instruction, and which of them several threads share. Refuses to know: torch, layers,
where memory is. Invariants: an instruction begins when the one before it has ended in all threads; the number
of threads changes no bit.

A decode step is some three hundred kernels of a few microseconds each: to call them one by one would take a
tenth of its time.

Usage: `run(1, tape_address, num_instructions, num_rows, eps)`; `run_parallel` on several threads.
"""

from __future__ import annotations

from numba import prange

from firstdiff.engine.kernel_compiler import compiled, compiled_parallel
from firstdiff.engine.kernel_ir import ints_at
from firstdiff.engine.kernels import add_norm, gate_rows, product, turn_heads, widen_rows

WORDS = 13
"""Of 64 bits, of an instruction: what it is, the fewest rows that threads share, its operands."""
WORD_BYTES = 8
WIDEN, PRODUCT, ADD_NORM, GATE, TURN = range(5)


@compiled
def perform(part: int, num_parts: int, instruction: int, num_rows: int, eps: float) -> None:
    """One part of the instruction at an address; its operands are the kernel's arguments, rows left out."""
    kind, o = ints_at(instruction)[0], ints_at(instruction + 2 * WORD_BYTES)
    if kind == WIDEN:
        widen_rows(part, num_parts, o[0], o[1], o[2], num_rows, o[3])
    elif kind == PRODUCT:
        product(
            part, num_parts, o[0], o[1], o[2], o[3], o[4], o[5], num_rows, o[6], o[7], o[8], o[9]
        )  # fmt: skip
    elif kind == ADD_NORM:
        add_norm(
            part, num_parts, o[0], o[1], o[2], o[3], o[4], o[5], o[6], num_rows, o[7], eps, o[8], o[9]
        )  # fmt: skip
    elif kind == GATE:
        gate_rows(part, num_parts, o[0], o[1], o[2], num_rows, o[3], o[4], o[5], o[6])
    elif kind == TURN:
        turn_heads(part, num_parts, o[0], o[1], o[2], o[3], o[4], num_rows, o[5], o[6], eps, o[7])


@compiled
def run(threads: int, tape: int, num_instructions: int, num_rows: int, eps: float) -> None:
    """All instructions, by the calling thread; `threads` is 1."""
    for index in range(num_instructions):
        perform(0, threads, tape + index * WORDS * WORD_BYTES, num_rows, eps)


@compiled_parallel
def run_parallel(threads: int, tape: int, num_instructions: int, num_rows: int, eps: float) -> None:
    """All instructions, those of many rows by `threads` threads."""
    for index in range(num_instructions):
        instruction = tape + index * WORDS * WORD_BYTES
        if num_rows < ints_at(instruction)[1]:
            perform(0, 1, instruction, num_rows, eps)
        else:
            for part in prange(threads):
                perform(part, threads, instruction, num_rows, eps)
