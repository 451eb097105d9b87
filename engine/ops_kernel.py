"""The operations of a layer by the compiled CPU kernels.

Owns: handing tensors to kernels.py by address, packed weights, one or several threads. Refuses to know:
layers, attention, scheduling. Invariants: equal to TorchOps up to rounding; bit for bit, a row's result
depends on that row alone; tensors outlive the call that reads their address.

Usage: `ops = KernelOps(threads=2); project = ops.linear(weight, bias); y = project(x)`.
"""

from __future__ import annotations

import numba
import torch

from firstdiff.engine import kernels, kernels_parallel
from firstdiff.engine.kernel_loops import PANEL
from firstdiff.engine.ops import HeadShape, Product

_ALIGNMENT = 64


def set_threads(threads: int) -> None:
    """Use `threads` threads from here on in the calling thread; ValueError when this machine has fewer."""
    if threads == 1:
        return
    if threads > numba.config.NUMBA_NUM_THREADS:
        raise ValueError(
            f"expected --threads of at most {numba.config.NUMBA_NUM_THREADS}, the CPUs of this process, "
            f"got {threads}"
        )
    numba.set_num_threads(threads)


class KernelLinear:
    """`weight` [out, in] in panels of 32 outputs, each in the order in which a tile reads it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1, wide: bool = False
    ) -> None:
        self._bf16 = int(weight.dtype == torch.bfloat16)
        self._wide = int(wide)
        self._threads = threads
        self._num_outputs, self._depth = weight.shape
        self._num_panels = -(-self._num_outputs // PANEL)
        padded = weight.new_zeros(self._num_panels * PANEL, self._depth)
        padded[: self._num_outputs] = weight
        if self._bf16:
            # Columns c and c + 16 share a 32-bit word, which a shift and a mask take apart.
            shaped = padded.view(self._num_panels, 2, PANEL // 2, self._depth).permute(0, 3, 2, 1)
        else:
            shaped = padded.view(self._num_panels, PANEL, self._depth).permute(0, 2, 1)
        self._panels = _aligned_like(shaped)
        self._panels.copy_(shaped)
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[: self._num_outputs] = bias.float()
        self._out_dtype = torch.float32 if wide else weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out] of x [N, in], whose rows may have gaps between them."""
        num_rows, depth = x.shape
        assert depth == self._depth
        out = torch.empty(num_rows, self._num_panels * PANEL, dtype=self._out_dtype)
        widened = torch.empty(num_rows, depth) if self._bf16 else x
        arguments = (
            x.data_ptr(), x.stride(0) * x.element_size(), widened.data_ptr(), self._panels.data_ptr(),
            self._bias.data_ptr(), out.data_ptr(), out.stride(0) * out.element_size(), num_rows, depth,
            self._num_panels, self._bf16, self._wide,
        )  # fmt: skip
        if self._threads == 1:
            kernels.linear(*arguments)
        else:
            kernels_parallel.linear(self._threads, *arguments)
        return out if out.shape[1] == self._num_outputs else out[:, : self._num_outputs]


def _aligned_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of the same shape and dtype that begins at a cache line."""
    num_bytes = tensor.numel() * tensor.element_size()
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)


class KernelOps:
    """Each operation as one pass over its rows."""

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Product:
        return KernelLinear(weight, bias, threads=self._threads, wide=wide)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._add_norm(x, None, weight, eps)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, self._add_norm(residual, x, weight, eps)

    def _add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_rows, width = x.shape
        out = torch.empty(num_rows, width, dtype=x.dtype)
        item = x.element_size()
        arguments = (
            x.data_ptr(), x.stride(0) * item, 0 if added is None else added.data_ptr(),
            0 if added is None else added.stride(0) * item, weight.data_ptr(),
            int(weight.dtype == torch.bfloat16), out.data_ptr(), num_rows, width, eps, int(item == 2),
        )  # fmt: skip
        if self._serial(num_rows):
            kernels.add_norm(0, 1, *arguments)
        else:
            kernels_parallel.add_norm(self._threads, *arguments)
        return out

    def turn(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows, head_dim, item = qkv.shape[0], shape.head_dim, qkv.element_size()
        arguments = (
            qkv.data_ptr(), qkv.stride(0) * item, cos.data_ptr(), sin.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(), num_rows, shape.num_turned, head_dim, eps,
            int(item == 2),
        )  # fmt: skip
        if self._serial(num_rows):
            kernels.turn_heads(0, 1, *arguments)
        else:
            kernels_parallel.turn_heads(self._threads, *arguments)
        heads = qkv.view(num_rows, -1, head_dim)
        return (
            heads[:, : shape.num_heads],
            heads[:, shape.num_heads : shape.num_turned],
            heads[:, shape.num_turned :],
        )

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        num_rows, width, item = x.shape[0], x.shape[1] // 2, x.element_size()
        out = torch.empty(num_rows, width, dtype=x.dtype)
        arguments = (
            x.data_ptr(), x.stride(0) * item, out.data_ptr(), num_rows, width, int(activation == "silu"),
            int(item == 2),
        )  # fmt: skip
        if self._serial(num_rows):
            kernels.gate_rows(0, 1, *arguments)
        else:
            kernels_parallel.gate_rows(self._threads, *arguments)
        return out

    def _serial(self, num_rows: int) -> bool:
        return self._threads == 1 or num_rows < kernels_parallel.SERIAL_ROWS
