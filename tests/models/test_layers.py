"""The building blocks against their equations, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from edgeformer.models.encoder.model import MASKED, RMSNorm, SelfAttention, SwiGLU, rotary_angles, rotate, sdpa


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def table(positions: int, size: int) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_angles(positions, size, 10_000.0)
    return cos.double()[:, None], sin.double()[:, None]


def test_rotary_angles_follow_the_formula() -> None:
    cos, sin = rotary_angles(7, 8, 10_000.0)
    for m in range(7):
        for i in range(4):
            angle = m * 10_000.0 ** (-2 * i / 8)
            assert cos[m, i] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[m, i] == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_turns_interleaved_pairs() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    cos, sin = table(5, 8)
    turned = rotate(x, cos, sin)
    for i in range(4):
        pair = torch.stack((x[..., 2 * i], x[..., 2 * i + 1]), -1)
        for m in range(5):
            c, s = cos[m, 0, i], sin[m, 0, i]
            matrix = torch.stack((torch.stack((c, -s)), torch.stack((s, c))))
            expected = pair[:, m] @ matrix.T
            assert torch.allclose(turned[:, m, :, i], expected[..., 0])
            assert torch.allclose(turned[:, m, :, 4 + i], expected[..., 1])


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    cos, sin = table(40, 8)

    def score(m: int, n: int) -> float:
        left = rotate(q[None, None], cos[m : m + 1], sin[m : m + 1])
        right = rotate(k[None, None], cos[n : n + 1], sin[n : n + 1])
        return float((left * right).sum())

    # The table is float32, so equal distances agree to its precision, not to that of float64.
    assert score(3, 10) == pytest.approx(score(25, 32), abs=1e-5)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-3)
    assert score(5, 5) == pytest.approx(float(q @ k), abs=1e-6)


def test_rms_norm_follows_the_formula_in_float64() -> None:
    norm = RMSNorm(6, eps=1e-6).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.stack([row / math.sqrt(float((row**2).mean()) + 1e-6) * norm.weight for row in x])
    assert torch.allclose(norm(x), expected, atol=1e-14)


def test_rms_norm_survives_values_whose_square_overflows_fp16() -> None:
    norm = RMSNorm(4, eps=1e-6)
    x = torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16)
    assert torch.equal(norm(x), torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float16))


def test_swiglu_follows_the_formula_in_float64() -> None:
    ffn = SwiGLU(6, 10).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    w1, w2 = ffn.w12.weight[:10], ffn.w12.weight[10:]
    b1, b2 = ffn.w12.bias[:10], ffn.w12.bias[10:]
    gate = x @ w1.T + b1
    expected = (gate / (1 + torch.exp(-gate)) * (x @ w2.T + b2)) @ ffn.w3.weight.T + ffn.w3.bias
    assert torch.allclose(ffn(x), expected, atol=1e-14)


def test_attention_follows_the_formula_in_float64() -> None:
    attention = SelfAttention(8, heads=2, dropout=0.0, attention=sdpa).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.float64)
    cos, sin = table(5, 4)
    got = attention(x, cos, sin, (1 - real)[:, None, None] * MASKED)
    q, k, v = attention.qkv(x).split(8, dim=-1)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        qh = rotate(q[..., part].unsqueeze(2), cos, sin).squeeze(2)
        kh = rotate(k[..., part].unsqueeze(2), cos, sin).squeeze(2)
        scores = (qh @ kh.transpose(1, 2) / 2.0).masked_fill(real[:, None] == 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    assert torch.allclose(got, attention.out(torch.cat(heads, -1)), atol=1e-12)


def test_first_queries_equal_the_full_result() -> None:
    attention = SelfAttention(8, heads=2, dropout=0.0, attention=sdpa).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    cos, sin = table(5, 4)
    assert torch.allclose(attention(x, cos, sin, None, 1), attention(x, cos, sin, None)[:, :1], atol=1e-14)
