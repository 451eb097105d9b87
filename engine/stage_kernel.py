"""A layer's stage by the compiled CPU kernels, in memory that all layers share.

Owns: that memory, and the kernels' arguments, made once. Refuses to know: attention, weights' names,
scheduling. Invariants: bit for bit what ComposedStage computes by KernelOps (tests/parity); the memory grows
to the largest step, and a decoder runs one step at a time.

A decode step calls some three hundred kernels of a few microseconds each: to make tensors for them and to ask
tensors for their addresses would take as long as the work.

Usage: `memory = StageMemory(parts); stages = [KernelStage(part, memory, threads=2) for part in parts]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from firstdiff.engine import kernels, kernels_parallel
from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.ops import HeadShape, Product, StageParts

Placed = Callable[[int, int], None]
"""(address, number of rows) -> nothing: a kernel that has all its other arguments."""


class StageMemory:
    """What stages write on the way: one place for each kind of intermediate, whatever the layer."""

    def __init__(self, parts: Sequence[StageParts]) -> None:
        linears = [linear for part in parts for linear in _linears(part)]
        self._dtype = linears[0].dtype
        self._width = max(linear.padded_width for linear in linears)
        self._depth = max(linear.depth for linear in linears)
        self._heads: tuple[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        self.capacity = 0
        self.projected = self.normed = self.halves = self.gated = self.qkv = self.widened = torch.empty(0)

    def hold(self, num_rows: int) -> None:
        """Make room for `num_rows`; what was there is lost when that takes new memory."""
        if num_rows <= self.capacity:
            return
        self.capacity = max(16, 1 << (num_rows - 1).bit_length())
        self._heads = None
        self.projected, self.normed, self.halves, self.gated, self.qkv = (
            torch.empty(self.capacity * self._width, dtype=self._dtype) for _ in range(5)
        )
        self.widened = torch.empty(self.capacity * self._depth)

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
    """One layer's stage; the kernels' arguments are made again when the memory has grown."""

    def __init__(self, parts: StageParts, memory: StageMemory, *, threads: int) -> None:
        self._parts = parts
        self._memory = memory
        self._threads = threads
        self._capacity = 0
        self._bf16 = int(_kernel(parts.output).dtype == torch.bfloat16)
        self._item = 2 if self._bf16 else 4
        self._attended_norm: Placed | None = None
        self._mlp_added_norm: Placed | None = None

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = self._finish(residual, attended)
        return residual, self._added[:num_rows]

    def advance(
        self, residual: torch.Tensor, attended: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        following = self._parts.following
        assert following is not None
        num_rows = self._finish(residual, attended)
        self._following_norm(residual.data_ptr(), num_rows)
        self._qkv(self._normed, self._norm_stride, num_rows)
        self._turn(cos.data_ptr(), sin.data_ptr(), num_rows)
        heads = self._memory.heads(num_rows, _kernel(following.qkv), self._parts.shape)
        return (residual, *heads)

    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> int:
        assert residual.is_contiguous()
        num_rows = residual.shape[0]
        self._memory.hold(num_rows)
        if self._capacity != self._memory.capacity:
            self._bind()
        self._output(attended.data_ptr(), attended.stride(0) * self._item, num_rows)
        if self._attended_norm is not None:
            self._attended_norm(self._projected, num_rows)
        self._mlp_norm(residual.data_ptr(), num_rows)
        self._gate_up(self._normed, self._norm_stride, num_rows)
        self._gate(num_rows)
        self._down(self._gated, self._gated_stride, num_rows)
        if self._mlp_added_norm is not None:
            self._mlp_added_norm(self._projected, num_rows)
        return num_rows

    def _bind(self) -> None:
        """Give each kernel the addresses of what it reads and writes."""
        parts, memory, item = self._parts, self._memory, self._item
        output, gate_up, down = (_kernel(p) for p in (parts.output, parts.gate_up, parts.down))
        width, widened = parts.mlp_norm.shape[0], memory.widened
        projected = memory.rows(memory.projected, output.padded_width)
        normed = memory.rows(memory.normed, width)
        # What attention adds is normed into the place of the halves, which are made later.
        renormed = memory.rows(memory.halves, width)
        halves = memory.rows(memory.halves, gate_up.padded_width)
        gated = memory.rows(memory.gated, down.depth)
        self._projected, self._normed, self._gated = (t.data_ptr() for t in (projected, normed, gated))
        self._norm_stride, self._gated_stride = width * item, down.depth * item
        self._output = output.into(projected, widened)
        attended = projected
        if parts.attended_norm is not None:
            self._attended_norm = self._norm(parts.attended_norm, projected, None, renormed)
            attended = renormed
        self._mlp_norm = self._norm(parts.mlp_norm, normed, attended, normed)
        self._gate_up = gate_up.into(halves, widened)
        self._gate = self._gating(halves, gated)
        self._down = down.into(projected, widened)
        self._added = projected[:, :width]
        if parts.mlp_added_norm is not None:
            self._mlp_added_norm = self._norm(parts.mlp_added_norm, projected, None, normed)
            self._added = normed
        if parts.following is not None:
            following = parts.following
            qkv = _kernel(following.qkv)
            self._following_norm = self._norm(following.norm, normed, self._added, normed)
            self._qkv = qkv.into(memory.rows(memory.qkv, qkv.padded_width), widened)
            self._turn = self._turning(memory.rows(memory.qkv, qkv.padded_width), following.qk_norm)
        self._capacity = memory.capacity

    def _norm(
        self, weight: torch.Tensor, like: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor
    ) -> Placed:
        """`add_norm` of rows as far apart as those of `like`."""
        threads, stride, address = self._threads, like.stride(0) * self._item, out.data_ptr()
        place = (0, 0) if added is None else (added.data_ptr(), added.stride(0) * self._item)
        before = (stride, *place, weight.data_ptr(), int(weight.dtype == torch.bfloat16), address)
        after = (weight.shape[0], self._parts.eps, self._bf16)

        def norm(x: int, num_rows: int) -> None:
            if threads == 1 or num_rows < kernels_parallel.SERIAL_ROWS:
                kernels.add_norm(0, 1, x, *before, num_rows, *after)
            else:
                kernels_parallel.add_norm(threads, x, *before, num_rows, *after)

        return norm

    def _gating(self, halves: torch.Tensor, gated: torch.Tensor) -> Callable[[int], None]:
        threads = self._threads
        before = (halves.data_ptr(), halves.stride(0) * self._item, gated.data_ptr())
        after = (gated.shape[1], int(self._parts.activation == "silu"), self._bf16)

        def gate(num_rows: int) -> None:
            if threads == 1 or num_rows < kernels_parallel.SERIAL_ROWS:
                kernels.gate_rows(0, 1, *before, num_rows, *after)
            else:
                kernels_parallel.gate_rows(threads, *before, num_rows, *after)

        return gate

    def _turning(self, qkv: torch.Tensor, qk_norm: torch.Tensor | None) -> Callable[[int, int, int], None]:
        threads, shape, eps, bf16 = self._threads, self._parts.shape, self._parts.eps, self._bf16
        place, stride = qkv.data_ptr(), qkv.stride(0) * self._item
        weight = 0 if qk_norm is None else qk_norm.data_ptr()
        heads = (shape.num_turned, shape.head_dim)

        def turn(cos: int, sin: int, num_rows: int) -> None:
            if threads == 1 or num_rows < kernels_parallel.SERIAL_ROWS:
                kernels.turn_heads(0, 1, place, stride, cos, sin, weight, num_rows, *heads, eps, bf16)
            else:
                kernels_parallel.turn_heads(
                    threads, place, stride, cos, sin, weight, num_rows, *heads, eps, bf16
                )

        return turn


def _linears(part: StageParts) -> list[KernelLinear]:
    following = [] if part.following is None else [part.following.qkv]
    return [_kernel(product) for product in (part.output, part.gate_up, part.down, *following)]


def _kernel(product: Product) -> KernelLinear:
    assert isinstance(product, KernelLinear), "a kernel stage needs weights packed for kernels"
    return product
