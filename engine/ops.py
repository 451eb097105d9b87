"""What a decoder layer does between its products: the boundary, and the readable truth.

Owns: the Ops protocol and its form in torch. Refuses to know: layers, weights' names, attention.
Invariants: rows never mix; sums and roots are taken in fp32; every other form equals TorchOps up to
rounding (tests/parity).

Usage: `ops = TorchOps(); residual, x = ops.add_norm(residual, x, weight, eps)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from firstdiff.engine.linear import Linear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [N, in] -> [N, out]."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of q, k and v is cut into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_turned(self) -> int:
        """The leading heads, q's and k's, that positions turn."""
        return self.num_heads + self.num_kv_heads


class Ops(Protocol):
    """The arithmetic of a layer, for one kind of machine."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Product:
        """A product with `weight` [out, in]; `wide` may answer in fp32, unrounded."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rms_norm`."""
        ...

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual + x, its rms_norm); may overwrite `residual`."""
        ...

    def turn(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [N, heads, D] of qkv [N, (H + 2 Hkv) * D], q and k normed and rotated by cos, sin [N, D].

        May overwrite `qkv`.
        """
        ...

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(left half of x [N, 2 F]) * right half, one of ACTIVATIONS."""
        ...


class TorchOps:
    """Each operation as the papers have it."""

    def __init__(self, *, pack: bool = True) -> None:
        self._pack = pack

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Product:
        return Linear(weight, bias, pack=self._pack)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return residual, rms_norm(residual, weight, eps)

    def turn(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        turned = heads[:, : shape.num_turned]
        if qk_norm is not None:
            turned = rms_norm(turned, qk_norm, eps)
        turned = rotate(turned, cos[:, None], sin[:, None])
        return turned[:, : shape.num_heads], turned[:, shape.num_heads :], heads[:, shape.num_turned :]

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return ACTIVATIONS[activation](left) * right


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] scaled to unit mean square, computed in fp32, then `weight` (arXiv 1910.07467, eq. 4).

    A weight in fp32 is applied before the one rounding to x's dtype. `weight` is [D], or [heads, D].
    """
    if weight.dtype == x.dtype and weight.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x [N, heads, D]: x * cos + rotate_half(x) * sin, halves as in Hugging Face.

    rotate_half(x) = (-x2, x1); here the halves are swapped and the minus sits in `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
