"""Tapes of kernels from tensors: what runs in which order, on which memory.

Owns: the operands of each kernel, and how many rows are worth waking threads for. Refuses to know: layers,
attention. Invariants: tensors outlive the tape that has their addresses; what changes from step to step is
pointed at again before the tape runs.

Usage: `tape = Tape(threads=2, eps=eps); tape.gate(halves, gated, "silu"); tape.run(num_rows)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from firstdiff.engine import kernels_tape
from firstdiff.engine.kernels_tape import ADD_NORM, GATE, PRODUCT, TURN, WIDEN, WORDS

PARALLEL_VALUES = 12_288
"""Fewer values than this are not worth waking threads for, outside products (measured: break-even)."""
_X, _COS, _SIN = 2, 4, 5


class Place(NamedTuple):
    """Rows in memory: the first one's address, and the bytes from row to row."""

    address: int
    stride: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> Place:
        """Where `rows` [N, width], without gaps inside a row, are."""
        assert rows.stride(1) == 1
        return cls(rows.data_ptr(), rows.stride(0) * rows.element_size())


NOWHERE = Place(0, 0)


class Tape:
    """Instructions in order; a method adds one and returns its index."""

    def __init__(self, *, threads: int, eps: float = 0.0) -> None:
        self._threads = threads
        self._eps = eps
        self._run = kernels_tape.run if threads == 1 else kernels_tape.run_parallel
        self._words = np.zeros((0, WORDS), np.int64)
        self._address = 0

    def widen(self, x: Place, out: torch.Tensor, width: int) -> int:
        """bf16 x to fp32 `out`, without gaps."""
        return self._add(WIDEN, width, *x, out.data_ptr(), width)

    def product(
        self, x: Place, panels: torch.Tensor, bias: torch.Tensor, out: Place, *, depth: int, wide: bool
    ) -> int:
        """fp32 x times weights in panels, bf16 or fp32, to `out`: in their dtype, or in fp32 if `wide`."""
        operands = (panels.data_ptr(), bias.data_ptr(), *out, depth, len(panels), _is_bf16(panels), int(wide))
        return self._add(PRODUCT, PARALLEL_VALUES, *x, *operands)

    def add_norm(
        self, x: Place, added: Place, weight: torch.Tensor, out: torch.Tensor, dtype: torch.dtype
    ) -> int:
        """x += added unless that is NOWHERE; its rms_norm to `out`, without gaps; fp32 there if `out` is."""
        operands = (*added, weight.data_ptr(), _is_bf16(weight), out.data_ptr(), len(weight))
        return self._add(ADD_NORM, len(weight), *x, *operands, *_dtypes(dtype, out))

    def gate(
        self, halves: Place, out: torch.Tensor, *, width: int, activation: str, dtype: torch.dtype
    ) -> int:
        """activation(left half) * right half to `out` without gaps; fp32 there if `out` is."""
        operands = (out.data_ptr(), width, int(activation == "silu"))
        return self._add(GATE, width, *halves, *operands, *_dtypes(dtype, out))

    def turn(
        self, qkv: Place, cos: int, sin: int, weight: torch.Tensor | None, num_heads: int, head_dim: int,
        dtype: torch.dtype,
    ) -> int:  # fmt: skip
        """Norm by `weight` and rotate the leading heads of `qkv` in place."""
        operands = (cos, sin, 0 if weight is None else weight.data_ptr(), num_heads, head_dim)
        return self._add(TURN, num_heads * head_dim, *qkv, *operands, int(dtype == torch.bfloat16))

    def point(self, index: int, x: int) -> None:
        """Let an instruction read, or change, rows at another address, as far apart as before."""
        self._words[index, _X] = x

    def point_angles(self, index: int, cos: int, sin: int) -> None:
        """Let a `turn` rotate by other angles."""
        self._words[index, _COS], self._words[index, _SIN] = cos, sin

    def __len__(self) -> int:
        return len(self._words)

    def run(self, num_rows: int, *, end: int | None = None) -> None:
        """Perform all on `num_rows` rows, or those before instruction `end`."""
        count = len(self._words) if end is None else end
        self._run(self._threads, self._address, count, num_rows, self._eps)

    def _add(self, kind: int, values_per_row: int, *operands: int) -> int:
        fewest_rows = -(-PARALLEL_VALUES // values_per_row)
        row = np.zeros((1, WORDS), np.int64)
        row[0, : 2 + len(operands)] = (kind, fewest_rows, *operands)
        self._words = np.concatenate((self._words, row))
        self._address = self._words.ctypes.data
        return len(self._words) - 1


def _is_bf16(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _dtypes(dtype: torch.dtype, out: torch.Tensor) -> tuple[int, int]:
    """(is what is read bf16, is it written as fp32 all the same)."""
    is_bf16 = int(dtype == torch.bfloat16)
    return is_bf16, int(is_bf16 and out.dtype == torch.float32)
