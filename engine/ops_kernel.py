"""The operations of a layer by the compiled CPU kernels.

Owns: one tape an operation. Refuses to know:
layers, attention, scheduling. Invariants: equal to TorchOps up to rounding; bit for bit, a row's result
depends on that row alone; tensors outlive the call that reads their address.

Usage: `ops = KernelOps(threads=2); project = ops.linear(weight, bias); y = project(x)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import torch

from firstdiff.engine.linear_kernel import KernelLinear
from firstdiff.engine.ops import HeadShape, Product, Stage, StageParts
from firstdiff.engine.stage_kernel import KernelStage, StageMemory
from firstdiff.engine.tape import NOWHERE, Place, Tape


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
        assert weight.shape == x.shape[1:]
        out = torch.empty(x.shape, dtype=x.dtype)
        tape = Tape(threads=self._threads, eps=eps)
        tape.add_norm(Place.of(x), NOWHERE if added is None else Place.of(added), weight, out, x.dtype)
        tape.run(len(x))
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
        tape = Tape(threads=self._threads, eps=eps)
        tape.turn(
            Place.of(qkv), cos.data_ptr(), sin.data_ptr(), qk_norm, shape.num_turned, shape.head_dim,
            qkv.dtype,
        )  # fmt: skip
        tape.run(len(qkv))
        return shape.split(qkv.view(len(qkv), -1, shape.head_dim))

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        width = x.shape[1] // 2
        out = torch.empty(len(x), width, dtype=x.dtype)
        tape = Tape(threads=self._threads)
        tape.gate(Place.of(x), out, width=width, activation=activation, dtype=x.dtype)
        tape.run(len(x))
        return out

    def stages(self, parts: Sequence[StageParts]) -> Sequence[Stage]:
        memory = StageMemory(parts)
        return [KernelStage(part, memory, threads=self._threads) for part in parts]
