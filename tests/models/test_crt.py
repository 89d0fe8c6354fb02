"""CRT-Deep: parameter counts, the forward pass against its equations, training kernels, packed documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgeformer.models import load_recipe
from edgeformer.models.causal import Checkpointing
from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.checkpoint import convert_weights
from edgeformer.models.crt.model import (
    CRT,
    DilatedConv,
)
from edgeformer.models.language_loss import full_loss
from edgeformer.training.plan.plan import count_offline
from tests.models.crt_oracle import Oracle, public_weights, small_config

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 0, 1, 2, 3, 4, 0, 1, 0]])


def make_crt(config: CRTConfig, seed: int = 0) -> CRT:
    torch.manual_seed(seed)
    return CRT(config).eval()


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"),
    [
        ("crt_deep_rtx4050", ["model.heads=shared"], 92_053_760),
        ("crt_deep_rtx4050", ["model.heads=separate"], 143_516_928),
        ("crt_deep_rtx4050", ["model.heads=tied"], 66_322_176),
        ("crt_deep_published", [], 143_516_928),
    ],
)
def test_parameter_count_of_the_paper(name: str, overrides: list[str], parameters: int) -> None:
    assert count_offline(load_recipe(name, overrides)) == parameters


@pytest.mark.parametrize("causal", [True, False])
def test_forward_follows_the_equations(causal: bool) -> None:
    weights = public_weights(small_config())
    model = make_crt(small_config(heads="separate", causal=causal))
    model.load_state_dict(convert_weights(weights, small_config(heads="separate"), "checkpoint"))
    model.double()
    ids, oracle = random_ids(2, 50), Oracle(weights, causal=causal)
    expected, states = oracle.states(ids), model(ids)
    assert list(states) == [1, 3, 4]
    for loop, state in states.items():
        assert torch.allclose(state, expected[loop], atol=1e-12, rtol=0), loop
    for loop, logits in oracle.logits(ids).items():
        assert torch.allclose(model.head_of(loop)(states[loop]), logits, atol=1e-12, rtol=0), loop


def test_plain_embedding() -> None:
    model, ids = CRT(small_config(embedding_size=32, embedding_projection=False, embedding_cycles=0)), random_ids(2, 9)
    expected = model.tokens.weight[ids] + model.positions.weight[:9]
    torch.testing.assert_close(model.eval().embed(ids), expected, atol=0, rtol=0)
    with pytest.raises(ValueError, match="embedding_projection: false needs embedding_size 32"):
        small_config(embedding_projection=False)


@pytest.mark.parametrize("checkpointing", ["loop", "cycles"])
@pytest.mark.parametrize("packed", [False, True])
def test_recomputation_keeps_loss_and_gradients(checkpointing: Checkpointing, packed: bool) -> None:
    ids = random_ids(2, 24)
    positions = torch.arange(24).expand(2, -1) % 10 if packed else None

    def loss_and_gradients(setting: Checkpointing) -> tuple[Tensor, dict[str, Tensor]]:
        model = make_crt(small_config(dropout=0.2)).train()
        model.checkpointing = setting
        torch.manual_seed(3)  # the same dropout masks
        loss = full_loss(model, model(ids, positions), ids.roll(-1, 1), 0.3)[0]
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (loss, gradients), (recomputed_loss, recomputed) = loss_and_gradients("none"), loss_and_gradients(checkpointing)
    assert torch.equal(loss, recomputed_loss) and gradients.keys() == recomputed.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, recomputed[name], atol=1e-6), name


def test_packed_documents_equal_single_ones() -> None:
    model = make_crt(small_config()).double()
    lengths = (1, 13, 2, 20)
    documents = [random_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(torch.cat(documents, 1), positions)
    start = 0
    for document in documents:
        end = start + document.shape[1]
        for loop, state in model(document).items():
            assert torch.allclose(packed[loop][:, start:end], state, atol=1e-12), (loop, start)
        start = end


@pytest.mark.parametrize("dilation", [1, 4, 30])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["one document", "packed"])
def test_training_convolution_equals_inference(dilation: int, positions: Tensor | None) -> None:
    torch.manual_seed(0)
    conv = DilatedConv(3, dilation, causal=True).double()
    x, grad = torch.randn(2, 2, 9, 3, dtype=torch.float64).unbind(0)
    results = []
    for training in (False, True):
        leaf = x.clone().requires_grad_()
        y = conv.train(training)(leaf, None, positions)
        conv.zero_grad()
        y.backward(grad)
        assert conv.weight.grad is not None and leaf.grad is not None
        results.append((y.detach(), leaf.grad, conv.weight.grad))
    for expected, trained in zip(*results, strict=True):
        assert torch.allclose(expected, trained, rtol=0, atol=1e-12)
        assert expected.shape == trained.shape and expected.abs().max() > 0
