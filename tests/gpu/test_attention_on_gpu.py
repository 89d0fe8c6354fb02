"""Attention kernels of a card against the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgeformer.models.blocks.causal import attention_arguments
from edgeformer.models.blocks.segments import FLASH_ATTN, VARLEN, Segments, kernel_problems
from edgeformer.models.crt.model import CausalAttention

pytestmark = pytest.mark.gpu

HALF = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Format → error of an output whose values are about 1, a few units in the last place."""


@pytest.fixture
def ampere() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("torch's flash attention needs compute capability 8.0")


def vectors(format_: torch.dtype, length: int = 96) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 4, length, 64, device="cuda", dtype=format_).unbind(0)


@pytest.mark.parametrize("format_", HALF)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_computes_what_math_computes(format_: torch.dtype, causal: bool, ampere: None) -> None:
    q, k, v = vectors(format_)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fast = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    assert torch.allclose(fast.double(), exact, atol=HALF[format_], rtol=HALF[format_])


def test_gradients_of_flash_are_those_of_math(ampere: None) -> None:
    fast = [vector.clone().requires_grad_() for vector in vectors(torch.bfloat16)]
    exact = [vector.detach().double().requires_grad_() for vector in fast]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(*fast, is_causal=True).square().mean().backward()
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*exact, is_causal=True).square().mean().backward()
    for vector, expected in zip(fast, exact, strict=True):
        assert vector.grad is not None and expected.grad is not None
        assert (vector.grad.double() - expected.grad).norm() <= 2e-2 * expected.grad.norm()


def test_packed_documents_attend_as_if_they_were_alone() -> None:
    """The mask of packed rows excludes torch's flash kernel: this is what it takes instead, whichever that is."""
    layer = CausalAttention(64, 4, 0.0).cuda().to(torch.bfloat16).eval()
    lengths = [5, 17, 42]
    x = torch.randn(1, sum(lengths), 64, device="cuda", dtype=torch.bfloat16)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    with torch.no_grad():
        packed = layer(x, attention_arguments(positions)[1])
        alone = torch.cat([layer(part) for part in x.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, alone, atol=2e-2)


@pytest.mark.parametrize("kernel", [VARLEN, FLASH_ATTN])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_without_padding_compute_what_sdpa_computes(kernel: str, causal: bool, ampere: None) -> None:
    if (problem := kernel_problems()[kernel]) is not None:
        pytest.skip(problem)
    lengths = torch.tensor([5, 1, 42, 17], device="cuda")
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths.tolist()])
    places = torch.arange(4, device="cuda").repeat_interleave(lengths) * 42 + positions
    base, results = torch.randn(3, 1, 4, len(places), 64, device="cuda", dtype=torch.bfloat16), []
    for name in (kernel, "sdpa"):
        vectors = base.clone().requires_grad_()
        mixed = Segments(ends, positions, places, 42, name).attend(*vectors, causal=causal)
        mixed.square().sum().backward()
        assert vectors.grad is not None
        results.append((mixed.detach(), vectors.grad))
    for fast, expected in zip(*results, strict=True):
        assert (fast - expected).float().norm() <= 2e-2 * expected.float().norm()
