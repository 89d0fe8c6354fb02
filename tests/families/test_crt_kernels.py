"""What training computes in another way than inference is the same, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgeformer.families.crt.kernels import attention, attention_here
from edgeformer.families.crt.layers import DilatedConv, document_mask
from edgeformer.families.crt.network import NETWORK, build_crt
from tests.families.crt_oracle import small_config

PLACES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 0, 1, 2, 3, 4, 0, 1, 0]])


@pytest.mark.parametrize("dilation", [1, 2, 4, 5, 9, 30])
@pytest.mark.parametrize("places", [None, PLACES])
def test_convolution_in_training_is_that_of_inference(dilation: int, places: Tensor | None) -> None:
    torch.manual_seed(0)
    layer = DilatedConv(3, dilation, causal=True).double()
    x, slope = torch.randn(2, 2, 9, 3, dtype=torch.float64).unbind(0)
    found = []
    for training in (False, True):
        given = x.clone().requires_grad_()
        y = layer.train(training)(given, None, places)
        layer.zero_grad()
        y.backward(slope)
        assert layer.weight.grad is not None and given.grad is not None
        found.append((y.detach(), given.grad, layer.weight.grad))
    for plain, fast in zip(*found, strict=True):
        assert torch.allclose(plain, fast, rtol=0, atol=1e-12)
        assert plain.shape == fast.shape and plain.abs().max() > 0


def test_convolution_keeps_its_input_only() -> None:
    layer, kept = DilatedConv(3, 2, causal=True).train(), list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 9, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x, None, PLACES)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in (x, layer.weight, PLACES)}


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_a_gradient_is_at_least_as_exact(masked: bool) -> None:
    torch.manual_seed(0)
    mask = document_mask(PLACES) if masked else None
    values, slope = torch.randn(3, 2, 4, 9, 8).bfloat16(), torch.randn(2, 4, 9, 8).bfloat16()
    found = {}
    for name, compute, kind in (
        ("exact", attention, torch.float64),
        ("plain", attention, torch.bfloat16),
        ("here", attention_here, torch.bfloat16),
    ):
        given = values.clone().to(kind).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16):
            result = compute(*given.unbind(0), mask)
        assert result.dtype == kind
        result.backward(slope.to(kind))
        assert given.grad is not None
        found[name] = torch.cat((result.detach().flatten(), given.grad.flatten())).double()
    error = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in ("plain", "here")}
    assert error["here"] <= error["plain"] < 0.02


def test_without_a_gradient_attention_is_the_plain_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).bfloat16().unbind(0)
    assert torch.equal(attention_here(q, k, v, None), attention(q, k, v, None))


def test_a_card_keeps_no_copies_in_float32() -> None:
    model, ids, kept = build_crt(small_config()).train(), torch.zeros(2, 9, dtype=torch.int64), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    found = []
    for change in (lambda _: None, NETWORK.as_on_cuda):
        change(model)
        kept.clear()
        saved = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with saved, torch.autocast("cpu", torch.bfloat16):
            states = model(ids)
        found.append(sum(kept.values()))
        del states
    here, card = found
    assert card < here
