"""The operations of a layer by the compiled CPU kernels.

Owns: handing tensors to kernels.py by address, one or several threads. Refuses to know:
layers, attention, scheduling. Invariants: equal to TorchOps up to rounding; bit for bit, a row's result
depends on that row alone; tensors outlive the call that reads their address.

Usage: `ops = KernelOps(threads=2); project = ops.linear(weight, bias); y = project(x)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import torch

from firstdiff.engine import kernels, kernels_parallel
from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.ops import HeadShape, Product, Stage, StageParts
from firstdiff.engine.stage_kernel import KernelStage, StageMemory


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
        return shape.split(qkv.view(num_rows, -1, head_dim))

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

    def stages(self, parts: Sequence[StageParts]) -> Sequence[Stage]:
        memory = StageMemory(parts)
        return [KernelStage(part, memory, threads=self._threads) for part in parts]

    def _serial(self, num_rows: int) -> bool:
        return self._threads == 1 or num_rows < kernels_parallel.SERIAL_ROWS
