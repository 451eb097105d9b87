"""Products with weights packed for the compiled CPU kernels.

Owns: the packing, and the place of the product on a tape. Refuses to know: layers, what a product is for.
Invariants: a row's result depends, bit for bit, on that row alone; tensors outlive the call that reads their
address.

Usage: `project = KernelLinear(weight, bias, threads=2); y = project(x)`.
"""

from __future__ import annotations

import torch

from firstdiff.engine.kernel_loops import PANEL
from firstdiff.engine.tape import Place, Tape

_ALIGNMENT = 64


class KernelLinear:
    """`weight` [out, in] in panels of 32 outputs, each in the order in which a tile reads it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1, wide: bool = False
    ) -> None:
        self._wide = wide
        self._threads = threads
        self.num_outputs, self.depth = weight.shape
        self._num_panels = -(-self.num_outputs // PANEL)
        padded = weight.new_zeros(self._num_panels * PANEL, self.depth)
        padded[: self.num_outputs] = weight
        if weight.dtype == torch.bfloat16:
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
        tape = Tape(threads=self._threads)
        widened = torch.empty(num_rows, self.depth)
        self.add_to(tape, self.widened(tape, x, widened), out)
        tape.run(num_rows)
        return out if out.shape[1] == self.num_outputs else out[:, : self.num_outputs]

    @property
    def padded_width(self) -> int:
        """The outputs, filled up to whole panels."""
        return self._num_panels * PANEL

    def widened(self, tape: Tape, x: torch.Tensor, room: torch.Tensor) -> Place:
        """Where the product may read x [N, in]: in `room` [N * in] fp32 if it is bf16."""
        if x.dtype == torch.float32:
            return Place.of(x)
        tape.widen(Place.of(x), room, self.depth)
        return Place(room.data_ptr(), self.depth * room.element_size())

    def add_to(self, tape: Tape, x: Place, out: torch.Tensor) -> int:
        """Add the product of fp32 x [N, in], written to `out` [>= N, padded width]."""
        return tape.product(x, self._panels, self._bias, Place.of(out), depth=self.depth, wide=self._wide)


def _aligned_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of the same shape and dtype that begins at a cache line."""
    num_bytes = tensor.numel() * tensor.element_size()
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
