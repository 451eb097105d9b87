"""Products with weights packed for the compiled CPU kernels.

Owns: the packing, and the arguments of the product kernel. Refuses to know: layers, what a product is for.
Invariants: a row's result depends, bit for bit, on that row alone; tensors outlive the call that reads their
address.

Usage: `project = KernelLinear(weight, bias, threads=2); y = project(x)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from firstdiff.engine import kernels, kernels_parallel
from firstdiff.engine.kernel_loops import PANEL

_ALIGNMENT = 64


PlacedProduct = Callable[[int, int, int], None]
"""(address of x, bytes from row to row, number of rows) -> nothing: the output has its place."""


class KernelLinear:
    """`weight` [out, in] in panels of 32 outputs, each in the order in which a tile reads it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1, wide: bool = False
    ) -> None:
        self._bf16 = int(weight.dtype == torch.bfloat16)
        self._wide = int(wide)
        self._threads = threads
        self.num_outputs, self.depth = weight.shape
        self._num_panels = -(-self.num_outputs // PANEL)
        padded = weight.new_zeros(self._num_panels * PANEL, self.depth)
        padded[: self.num_outputs] = weight
        if self._bf16:
            # Columns c and c + 16 share a 32-bit word, which a shift and a mask take apart.
            shaped = padded.view(self._num_panels, 2, PANEL // 2, self.depth).permute(0, 3, 2, 1)
        else:
            shaped = padded.view(self._num_panels, PANEL, self.depth).permute(0, 2, 1)
        self._panels = _aligned_like(shaped)
        self._panels.copy_(shaped)
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[: self.num_outputs] = bias.float()
        self.dtype = torch.float32 if wide else weight.dtype
        """Of the outputs."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out] of x [N, in], whose rows may have gaps between them."""
        num_rows = x.shape[0]
        assert x.shape[1] == self.depth
        out = torch.empty(num_rows, self.padded_width, dtype=self.dtype)
        widened = torch.empty(num_rows, self.depth) if self._bf16 else x
        self.into(out, widened)(x.data_ptr(), x.stride(0) * x.element_size(), num_rows)
        return out if out.shape[1] == self.num_outputs else out[:, : self.num_outputs]

    @property
    def padded_width(self) -> int:
        """The outputs, filled up to whole panels."""
        return self._num_panels * PANEL

    def into(self, out: torch.Tensor, widened: torch.Tensor) -> PlacedProduct:
        """The product of `num_rows` rows at an address, written to `out` [>= N, padded width].

        `widened` is room for the rows in fp32, which products of bf16 need. Both must outlive the result.
        """
        before = (widened.data_ptr(), self._panels.data_ptr(), self._bias.data_ptr())
        place = (out.data_ptr(), out.stride(0) * out.element_size())
        after = (self.depth, self._num_panels, self._bf16, self._wide)
        if self._threads == 1:
            return lambda x, stride, rows: kernels.linear(x, stride, *before, *place, rows, *after)
        threads, linear = self._threads, kernels_parallel.linear
        return lambda x, stride, rows: linear(threads, x, stride, *before, *place, rows, *after)


def _aligned_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of the same shape and dtype that begins at a cache line."""
    num_bytes = tensor.numel() * tensor.element_size()
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
