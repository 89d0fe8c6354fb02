"""What training computes in another way than inference is the same, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Place
from edgeformer.models.crt.adapter import ADAPTER, build_crt
from edgeformer.models.crt.model import DilatedConv, attention, attention_here, document_mask, jagged
from tests.models.crt_oracle import small_config

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


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_documents_apart_are_attended_to_as_behind_a_mask(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    places = PLACES.clone()
    places[1, 0] = 0  # a row begins a document
    values, slope = torch.randn(3, 2, 4, 9, 8).to(kind), torch.randn(2, 4, 9, 8).to(kind)
    begins = torch.cat(((places.flatten() == 0).nonzero()[:, 0], torch.tensor([places.numel()])))
    found = []
    for documents in (document_mask(places), begins):
        given = values.clone().requires_grad_()
        result = attention_here(*given.unbind(0), documents)
        result.backward(slope)
        assert result.dtype == kind and given.grad is not None
        found.append((result.detach(), given.grad))
    for masked, alone in zip(*found, strict=True):
        assert torch.allclose(masked, alone, atol=1e-12 if kind == torch.float64 else 2e-2)
    everything = attention(*values.unbind(0), None)
    assert not torch.allclose(everything.double(), found[1][0].double(), atol=0.1), "documents do not see each other"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_card_gets_are_the_documents_in_their_order() -> None:
    """torch's CPU has no causal kernel for nested tensors: without the triangle it computes what the masks allow."""
    torch.manual_seed(0)
    given = torch.randn(3, 2, 4, 9, 8).unbind(0)
    begins = torch.tensor([0, 5, 9, 10, 16, 18])
    mixed = F.scaled_dot_product_attention(*jagged(given, begins)).transpose(1, 2).values()
    document = torch.bucketize(torch.arange(18), begins, right=True).view(2, 9)
    same = (document[:, :, None] == document[:, None, :])[:, None]
    expected = F.scaled_dot_product_attention(*given, attn_mask=same)
    assert torch.allclose(mixed.view(2, 9, 4, 8).transpose(1, 2), expected, atol=1e-6)


def test_a_model_is_trained_the_same_with_documents_apart() -> None:
    torch.manual_seed(0)
    ids, losses = torch.randint(0, 60, (2, 9)), []
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 0, 1, 2, 0, 1, 0]])
    for kind in ("sdpa", "varlen"):
        torch.manual_seed(1)
        config = small_config(attention=kind, dropout=0.0)
        recipe = load_recipe("crt_mini").model_copy(update={"model": config})
        model, used = ADAPTER.build(recipe, Place())
        batch = ADAPTER.batch(recipe, {"input_ids": ids.numpy(), "positions": places.numpy(), "targets": ids.numpy()})
        assert used.used == kind and ("documents" in batch) is (kind == "varlen")
        given = {name: torch.from_numpy(array) for name, array in batch.items()}
        total = ADAPTER.loss(model.train(), recipe, None)(model, given).total
        total.backward()
        losses.append((total.detach(), model.attention.qkv.weight.grad))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*losses, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [(["data.mode=paragraphs"], "varlen is for packed rows"), (["training.compile={shapes: 1}"], "another shape")],
)
def test_documents_apart_are_refused_where_there_are_none_or_too_many_shapes(changes: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_recipe("crt_mini", ["model.attention=varlen", *changes])


def test_without_a_gradient_attention_is_the_plain_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).bfloat16().unbind(0)
    assert torch.equal(attention_here(q, k, v, None), attention(q, k, v, None))


def test_a_card_keeps_no_copies_in_float32() -> None:
    model, ids, kept = build_crt(small_config()).train(), torch.zeros(2, 9, dtype=torch.int64), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    found = []
    for change in (lambda _: None, ADAPTER.as_on_cuda):
        change(model)
        kept.clear()
        saved = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with saved, torch.autocast("cpu", torch.bfloat16):
            states = model(ids)
        found.append(sum(kept.values()))
        del states
    here, card = found
    assert card < here
