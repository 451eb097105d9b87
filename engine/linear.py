"""A matrix product with fixed weights, in the fastest form this machine has.

Owns: the choice between plain and packed weights. Refuses to know: what the layer means.
Invariants: `Linear(w, b)(x)` equals `x @ w.T + b` up to rounding, whichever form is used (tests/parity).

oneDNN can lay a bf16 weight out once for its kernels, which saves a third of the time of small batches. The
operators for that are private to torch, so their absence falls back to plain. fp32 stays plain: it is the
dtype of parity tests, and the packed fp32 kernels doubled the distance to an fp64 reference (8.5e-5 against
4.5e-5 in the logits of SmolLM2).

Usage: `project = Linear(weight); y = project(x)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS_HINT = 8  # the batch size the packed layout is tuned for; any other works


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU can run packed weights of `dtype`."""
    mkldnn = torch.ops.mkldnn
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(mkldnn._is_mkldnn_bf16_supported())
        and hasattr(mkldnn, "_reorder_linear_weight")
        and hasattr(mkldnn, "_linear_pointwise")
    )


class Linear:
    """`weight` [out, in] and `bias` [out] or none; call with x [N, in] for [N, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True) -> None:
        self.packed = pack and can_pack(weight.dtype)
        self._weight = weight
        self._bias = bias
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)
