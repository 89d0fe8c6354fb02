"""Attention of packed and unpadded rows on a card against that of single rows and of SDPA."""

import pytest
import torch
import torch.nn.functional as F

from edgeformer.models.blocks.causal import attention_arguments
from edgeformer.models.blocks.segments import FLASH_ATTN, VARLEN, Segments, kernel_problems
from edgeformer.models.crt.model import CausalAttention

pytestmark = pytest.mark.gpu


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
def test_kernels_without_padding_compute_what_sdpa_computes(kernel: str, causal: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
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
