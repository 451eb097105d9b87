"""What a decoder layer does between its products: the boundary, and the readable truth.

Owns: the Ops protocol and its form in torch. Refuses to know: layers, weights' names, attention.
Invariants: rows never mix; sums and roots are taken in fp32; every other form equals TorchOps up to
rounding (tests/parity).

Usage: `ops = TorchOps(); residual, x = ops.add_norm(residual, x, weight, eps)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of [N, H + 2 Hkv, D]."""
        turned = self.num_turned
        return heads[:, : self.num_heads], heads[:, self.num_heads : turned], heads[:, turned:]


@dataclass(frozen=True, slots=True)
class Following:
    """How the next layer begins: norm, product, rotation."""

    norm: torch.Tensor  # [E]
    qkv: Product  # E -> (H + 2 Hkv) * D
    qk_norm: torch.Tensor | None  # [H + Hkv, D]


@dataclass(frozen=True, slots=True)
class StageParts:
    """What lies between the attention of one layer and that of the next, where rows never mix."""

    shape: HeadShape
    activation: str
    eps: float
    output: Product  # H * D -> E
    attended_norm: torch.Tensor | None  # [E], of what attention adds
    mlp_norm: torch.Tensor  # [E]
    gate_up: Product  # E -> 2 F
    down: Product  # F -> E
    mlp_added_norm: torch.Tensor | None  # [E], of what the MLP adds
    following: Following | None
    """None in the last layer."""


class Stage(Protocol):
    """The parts, in order. Results may lie in memory that the next call overwrites."""

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's end, of residual [N, E], attended [N, H * D]: (residual, what is yet to be added)."""
        ...

    def advance(
        self, residual: torch.Tensor, attended: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The layer's end and the next one's beginning: residual, and q, k, v as from `Ops.turn`."""
        ...


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

    def stages(self, parts: Sequence[StageParts]) -> Sequence[Stage]:
        """The layers' stages, equal to ComposedStage's."""
        ...


class ComposedStage:
    """A stage as the sequence of its operations: what others must equal."""

    def __init__(self, ops: Ops, parts: StageParts) -> None:
        self._ops = ops
        self._parts = parts

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops, parts, eps = self._ops, self._parts, self._parts.eps
        x = parts.output(attended)
        if parts.attended_norm is not None:
            x = ops.norm(x, parts.attended_norm, eps)
        residual, x = ops.add_norm(residual, x, parts.mlp_norm, eps)
        x = parts.down(ops.gate(parts.gate_up(x), parts.activation))
        if parts.mlp_added_norm is not None:
            x = ops.norm(x, parts.mlp_added_norm, eps)
        return residual, x

    def advance(
        self, residual: torch.Tensor, attended: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ops, parts, following = self._ops, self._parts, self._parts.following
        assert following is not None
        residual, x = self.finish(residual, attended)
        residual, x = ops.add_norm(residual, x, following.norm, parts.eps)
        qkv = following.qkv(x)
        return (residual, *ops.turn(qkv, parts.shape, cos, sin, following.qk_norm, parts.eps))


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

    def stages(self, parts: Sequence[StageParts]) -> Sequence[Stage]:
        return [ComposedStage(self, part) for part in parts]


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
