"""Says in every test report whether a GPU was there; the engine has no GPU path yet that could be tested."""

from __future__ import annotations

import pytest
import torch


def test_a_cuda_device_multiplies_like_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: nothing in this report was run on a GPU")
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 64, 64, generator=generator).unbind()
    product = (left.double().cuda() @ right.double().cuda()).cpu()
    torch.testing.assert_close(product, left.double() @ right.double())
