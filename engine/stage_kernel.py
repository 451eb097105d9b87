"""A layer's stage by the compiled CPU kernels, in memory that all layers share.

Owns: that memory, and each stage's tape, made once. Refuses to know: attention, weights' names,
scheduling. Invariants: bit for bit what ComposedStage computes by KernelOps (tests/parity); the memory grows
to the largest step, and a decoder runs one step at a time; what only a product reads lies in fp32, rounded.

Usage: `memory = StageMemory(parts); stages = [KernelStage(part, memory, threads=2) for part in parts]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.ops import HeadShape, Product, StageParts
from firstdiff.engine.tape import NOWHERE, Place, Tape


class StageMemory:
    """What stages write on the way: one place for each kind of intermediate, whatever the layer."""

    def __init__(self, parts: Sequence[StageParts]) -> None:
        linears = [linear for part in parts for linear in _linears(part)]
        self.dtype = linears[0].dtype
        self._width = max(linear.padded_width for linear in linears)
        self._depth = max(linear.depth for linear in linears)
        self._heads: tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        self.capacity = 0
        self.projected = self.halves = self.qkv = self.read = torch.empty(0)

    def hold(self, num_rows: int) -> None:
        """Make room for `num_rows`; what was there is lost when that takes new memory."""
        if num_rows <= self.capacity:
            return
        self.capacity = max(16, 1 << (num_rows - 1).bit_length())
        self._heads = None
        self.projected, self.halves, self.qkv = (
            torch.empty(self.capacity * self._width, dtype=self.dtype) for _ in range(3)
        )
        # What a product reads; each has read it before the next one's is written.
        self.read = torch.empty(self.capacity * self._depth)

    def rows(self, room: torch.Tensor, width: int) -> torch.Tensor:
        """One of the places as [capacity, width]."""
        return room[: self.capacity * width].view(self.capacity, width)

    def heads(
        self, num_rows: int, qkv: KernelLinear, shape: HeadShape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of what lies in `qkv`; the same tensors as long as the steps have one size."""
        if self._heads is None or self._heads[0] != num_rows:
            rows = self.rows(self.qkv, qkv.padded_width)[:num_rows, : qkv.num_outputs]
            self._heads = (num_rows, shape.split(rows.view(num_rows, -1, shape.head_dim)))
        return self._heads[1]


class KernelStage:
    """One layer's stage; its tape is made again when the memory has grown."""

    def __init__(self, parts: StageParts, memory: StageMemory, *, threads: int) -> None:
        self._parts = parts
        self._memory = memory
        self._threads = threads
        self._capacity = 0

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = self._point(residual, attended)
        self._tape.run(num_rows, end=self._end)
        return residual, self._added[:num_rows]

    def advance(
        self, residual: torch.Tensor, attended: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        following = self._parts.following
        assert following is not None
        num_rows = self._point(residual, attended)
        self._tape.point(self._following_norm, residual.data_ptr())
        self._tape.point_angles(self._turn, cos.data_ptr(), sin.data_ptr())
        self._tape.run(num_rows)
        return (residual, *self._memory.heads(num_rows, _kernel(following.qkv), self._parts.shape))

    def _point(self, residual: torch.Tensor, attended: torch.Tensor) -> int:
        """Let the tape begin with these; how many rows they have."""
        assert residual.is_contiguous()
        assert attended.is_contiguous()
        num_rows = residual.shape[0]
        self._memory.hold(num_rows)
        if self._capacity != self._memory.capacity:
            self._bind(residual, attended)
        self._tape.point(self._first, attended.data_ptr())
        self._tape.point(self._mlp_norm, residual.data_ptr())
        return num_rows

    def _bind(self, residual: torch.Tensor, attended: torch.Tensor) -> None:
        """Record the tape anew, in the memory of today."""
        parts, memory, dtype = self._parts, self._memory, self._memory.dtype
        output, gate_up, down = (_kernel(p) for p in (parts.output, parts.gate_up, parts.down))
        rows, width, read = Place.of(residual), parts.mlp_norm.shape[0], memory.read
        projected = memory.rows(memory.projected, output.padded_width)
        halves = memory.rows(memory.halves, gate_up.padded_width)
        # What is normed before it is added takes the place of the halves, made later or used up.
        renormed = memory.rows(memory.halves, width)
        tape = self._tape = Tape(threads=self._threads, eps=parts.eps)
        self._first = 0  # attention's rows are read by the first instruction, whichever it is
        output.add_to(tape, output.widened(tape, attended, read), projected)
        self._added = projected[:, :width]
        if parts.attended_norm is not None:
            tape.add_norm(Place.of(projected), NOWHERE, parts.attended_norm, renormed, dtype)
            self._added = renormed
        self._mlp_norm = tape.add_norm(rows, Place.of(self._added), parts.mlp_norm, read, dtype)
        gate_up.add_to(tape, _packed(read, width), halves)
        tape.gate(Place.of(halves), read, width=down.depth, activation=parts.activation, dtype=dtype)
        down.add_to(tape, _packed(read, down.depth), projected)
        self._added = projected[:, :width]
        if parts.mlp_added_norm is not None:
            tape.add_norm(Place.of(projected), NOWHERE, parts.mlp_added_norm, renormed, dtype)
            self._added = renormed
        self._end = len(tape)
        if parts.following is not None:
            following, shape = parts.following, parts.shape
            qkv = _kernel(following.qkv)
            qkv_rows = memory.rows(memory.qkv, qkv.padded_width)
            self._following_norm = tape.add_norm(rows, Place.of(self._added), following.norm, read, dtype)
            qkv.add_to(tape, _packed(read, width), qkv_rows)
            self._turn = tape.turn(
                Place.of(qkv_rows), 0, 0, following.qk_norm, shape.num_turned, shape.head_dim, dtype
            )
        self._capacity = memory.capacity


def _packed(read: torch.Tensor, width: int) -> Place:
    """Rows of `width` values without gaps."""
    return Place(read.data_ptr(), width * read.element_size())


def _linears(part: StageParts) -> list[KernelLinear]:
    following = [] if part.following is None else [part.following.qkv]
    return [_kernel(product) for product in (part.output, part.gate_up, part.down, *following)]


def _kernel(product: Product) -> KernelLinear:
    assert isinstance(product, KernelLinear), "a kernel stage needs weights packed for kernels"
    return product
