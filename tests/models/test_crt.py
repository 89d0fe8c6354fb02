"""CRT-Deep: exact parameter counts, the forward pass against its equations, recomputation, packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from edgeformer.models import load_recipe
from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.checkpoint import convert
from edgeformer.models.crt.loss import exit_losses, weighted
from edgeformer.models.crt.model import CRT, Checkpointing, DilatedConv
from edgeformer.training.plan import count_offline
from tests.models.crt_oracle import Oracle, public_weights, small_config


def crt_of(config: CRTConfig, seed: int = 0) -> CRT:
    torch.manual_seed(seed)
    return build_crt(config).eval()


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("heads", "parameters"), [("shared", 92_053_760), ("separate", 143_516_928), ("tied", 66_322_176)]
)
def test_parameter_counts_are_the_papers(heads: str, parameters: int) -> None:
    assert count_offline(load_recipe("crt_deep_rtx4050", [f"model.heads={heads}"])) == parameters


def test_the_published_recipe_has_the_released_codes_count() -> None:
    assert count_offline(load_recipe("crt_deep_published")) == 143_516_928


def test_offline_count_is_the_built_models() -> None:
    recipe = load_recipe("crt_mini")
    assert count_offline(recipe) == sum(p.numel() for p in build_crt(recipe.model).parameters()) <= 10_000_000


@pytest.mark.parametrize("causal", [True, False])
def test_forward_follows_the_equations(causal: bool) -> None:
    weights = public_weights(small_config())
    model = crt_of(small_config(heads="separate", causal=causal))
    model.load_state_dict(convert(weights, small_config(heads="separate"), "the test's weights"))
    model.double()
    ids = random_ids(2, 50)
    expected = Oracle(weights, causal=causal).states(ids)
    states = model(ids)
    assert list(states) == [1, 3, 4]
    for loop, state in states.items():
        assert torch.allclose(state, expected[loop], atol=1e-12, rtol=0), loop
    for loop, logits in Oracle(weights, causal=causal).logits(ids).items():
        assert torch.allclose(model.head_of(loop)(states[loop]), logits, atol=1e-12, rtol=0), loop


@pytest.mark.parametrize(("heads", "distinct"), [("shared", 2), ("separate", 3), ("tied", 1)])
def test_every_exit_has_its_head(heads: str, distinct: int) -> None:
    model = crt_of(small_config(heads=heads))
    assert len({id(model.head_of(loop)) for loop in model.exits}) == distinct
    assert model.head_of(4) is model.head
    assert (model.head_of(1) is model.head_of(3)) == (heads != "separate")


@pytest.mark.parametrize("trm", ["conv_linear", "conv", "linear", "depthwise"])
@pytest.mark.parametrize("norm", ["layer", "rms", "batch", "none"])
def test_every_variant_of_the_ablations_learns_something(trm: str, norm: str) -> None:
    model = crt_of(small_config(trm=trm, norm=norm, dropout=0.0)).train()
    ids = random_ids(2, 20)
    targets = ids.roll(-1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = weighted(exit_losses(model, model(ids), targets), 0.3)
    before.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    after = weighted(exit_losses(model, model(ids), targets), 0.3)
    assert after < before


def test_variants_differ_in_what_they_hold() -> None:
    names = {trm: set(crt_of(small_config(trm=trm)).trm.cycles[0].state_dict()) for trm in ("conv", "linear")}
    assert {"depthwise.weight", "pointwise.weight"} <= names["conv"] and "lin1.weight" not in names["conv"]
    assert {"lin1.weight", "lin2.weight"} <= names["linear"] and "depthwise.weight" not in names["linear"]
    depthwise = set(crt_of(small_config(trm="depthwise")).trm.cycles[0].state_dict())
    assert {"depthwise.weight", "lin1.weight"} <= depthwise and "pointwise.weight" not in depthwise


@pytest.mark.parametrize("dilation", [1, 4])
def test_convolution_with_its_past_given(dilation: int) -> None:
    conv = DilatedConv(6, dilation, causal=True).double()
    x = torch.randn(2, 15, 6, dtype=torch.float64)
    whole = conv(x)
    rest = conv(x[:, 9:], x[:, 9 - conv.context :])
    assert torch.allclose(rest, whole[:, 9:], atol=1e-14)


@pytest.mark.parametrize("checkpointing", ["loop", "cycles"])
@pytest.mark.parametrize("positions", [False, True])
def test_recomputation_changes_neither_loss_nor_gradient(checkpointing: Checkpointing, positions: bool) -> None:
    ids = random_ids(2, 24)
    places = torch.arange(24).expand(2, -1) % 10 if positions else None

    def gradients(how: Checkpointing) -> tuple[Tensor, dict[str, Tensor]]:
        model = crt_of(small_config(dropout=0.2)).train()
        model.checkpointing = how
        torch.manual_seed(3)  # the same dropout masks, which recomputation must draw again
        loss = weighted(exit_losses(model, model(ids, places), ids.roll(-1, 1)), 0.3)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = gradients("none"), gradients(checkpointing)
    assert torch.equal(plain[0], recomputed[0])
    assert plain[1].keys() == recomputed[1].keys()
    for name, gradient in plain[1].items():
        assert torch.allclose(gradient, recomputed[1][name], atol=1e-6), name


def test_recomputation_keeps_fewer_activations() -> None:
    def kept_bytes(how: Checkpointing) -> int:
        model = crt_of(small_config()).train()
        model.checkpointing = how
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            states = model(random_ids(2, 64))
        assert states[4].requires_grad
        return sum(kept.values())

    assert kept_bytes("loop") < kept_bytes("cycles") < kept_bytes("none")


def test_packed_documents_are_as_if_alone() -> None:
    """Positions start again at 0 where a document begins; nothing looks across."""
    model = crt_of(small_config()).double()
    lengths = (1, 13, 2, 20)
    documents = [random_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(torch.cat(documents, 1), positions)
    start = 0
    for document in documents:
        end = start + document.shape[1]
        for loop, alone in model(document).items():
            assert torch.allclose(packed[loop][:, start:end], alone, atol=1e-12), (loop, start)
        start = end


def test_one_document_with_positions_is_as_without() -> None:
    model = crt_of(small_config())
    ids = random_ids(1, 30)
    with_positions, without = model(ids, torch.arange(30)[None]), model(ids)
    for loop in model.exits:
        assert torch.allclose(with_positions[loop], without[loop], atol=1e-5)


def test_later_loops_are_not_computed_for_an_early_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = crt_of(small_config())
    ids = random_ids(1, 9)
    full = model(ids)
    ran: list[int] = []
    block = model.block

    def counted(x: Tensor, encoding: Tensor, *rest: Any) -> Tensor:
        ran.extend(loop for loop, own in enumerate(model.loop_encodings, start=1) if torch.equal(own, encoding))
        return block(x, encoding, *rest)

    monkeypatch.setattr(model, "block", counted)
    logits = model.logits(ids, 3)
    assert ran == [1, 2, 3]
    assert torch.equal(logits, model.head_of(3)(full[3]))


def test_a_plain_embedding_has_nothing_behind_its_table() -> None:
    plain = {"embedding_size": 32, "embedding_projection": False, "embedding_cycles": 0}
    model, projected = (
        build_crt(small_config(**plain)),
        build_crt(small_config(**{**plain, "embedding_projection": True})),
    )
    ids = torch.randint(0, 60, (2, 9))
    expected = model.tokens.weight[ids] + model.positions.weight[:9]
    torch.testing.assert_close(model.eval().embed(ids), expected, atol=0, rtol=0)
    assert sum(p.numel() for p in projected.parameters()) - sum(p.numel() for p in model.parameters()) == 32 * 33
    with pytest.raises(ValueError, match="embedding_projection: false needs embedding_size 32"):
        small_config(embedding_projection=False)
