"""CRT-Deep against the equations of paper B: forward pass, causality, loss, and checkpoints of the public code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import edgeformer.models.blocks.language_loss as language_loss
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models import load_recipe
from edgeformer.models.blocks.causal import TOLERANCE, Checkpointing
from edgeformer.models.blocks.language_loss import IGNORED, TokenLosses, chunked_loss, exit_weights, full_loss
from edgeformer.models.crt.adapter import ADAPTER
from edgeformer.models.crt.checkpoint import convert_weights, extract_state_dict, infer_config
from edgeformer.models.crt.model import CRT, DilatedConv
from edgeformer.training.plan.plan import count_offline
from tests.models.crt_oracle import Oracle, make_crt, public_weights, small_config

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 0, 1, 2, 3, 4, 0, 1, 0]])


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
    model = make_crt(heads="separate", causal=causal)
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
        model = make_crt(dropout=0.2).train()
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
    model, lengths = make_crt().double(), (1, 13, 2, 20)
    documents = [random_ids(1, length, seed=length) for length in lengths]
    packed = model(torch.cat(documents, 1), torch.cat([torch.arange(length) for length in lengths])[None])
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
        results.append((y.detach(), leaf.grad, conv.weight.grad))
    for expected, trained in zip(*results, strict=True):
        assert torch.allclose(expected, trained, rtol=0, atol=1e-12)
        assert expected.shape == trained.shape and expected.abs().max() > 0


@pytest.mark.parametrize(
    ("trm", "norm"), [("conv_linear", "layer"), ("conv", "rms"), ("linear", "none"), ("depthwise", "batch")]
)
def test_causal_variants_pass(trm: str, norm: str) -> None:
    probe = ADAPTER.causality(make_crt(trm=trm, norm=norm))
    assert not probe.leaks and probe.reach == 0 and set(probe.largest_change) == {"1", "3", "4"}
    assert max(probe.largest_change.values()) < TOLERANCE / 10


def test_published_architecture_leaks_as_far_as_its_convolutions_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ADAPTER.causality(make_crt(causal=False, cycles=8))
    assert probe.leaks and all(change > 10 * TOLERANCE for change in probe.largest_change.values())
    sizes = {"loops": 1, "exits": (), "cycles": 2, "embedding_cycles": 1, "dilations": (2, 3)}
    config = small_config(causal=False, heads="tied", **sizes)
    model = CRT(config)  # fresh weights are so small that distant tokens have less effect than rounding
    model.load_state_dict(convert_weights(public_weights(config), config, "checkpoint"))
    assert ADAPTER.causality(model).reach == 2 + 2 + 3
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: sdpa(q, k, v))
    assert ADAPTER.causality(make_crt()).leaks


@pytest.mark.parametrize(("part", "cycles"), [("refine", slice(None)), ("trm", slice(None)), ("trm", slice(4, 5))])
def test_single_leak_is_detected(part: str, cycles: slice) -> None:
    model = make_crt(cycles=8)
    for cycle in getattr(model, part).cycles[cycles]:
        cycle.depthwise.causal = False
    probe = ADAPTER.causality(model)
    assert probe.leaks and probe.reach > 0


@pytest.mark.parametrize(("weight", "value"), [("tokens", 0.0), ("norm1", float("nan"))])
def test_degenerate_model_is_refused(weight: str, value: float) -> None:
    model = make_crt()
    with torch.no_grad():
        getattr(model, weight).weight.fill_(value)
    with pytest.raises(ValueError, match="change no output"):
        ADAPTER.causality(model)


def test_probe_restores_mode_and_depends_on_its_seed_alone() -> None:
    model = make_crt().train()
    torch.manual_seed(5)
    first = ADAPTER.causality(model, seed=1)
    assert model.training and model.trm.training
    torch.manual_seed(6)
    assert ADAPTER.causality(model, seed=1) == first
    assert torch.initial_seed() == 6


def make_case(heads: str = "shared") -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return a model, input_ids [3, 21] and targets."""
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (3, 21))
    targets = ids.roll(-1, 1)
    targets[:, 15:] = IGNORED
    targets[2] = IGNORED  # a row without targets
    return CRT(small_config(dropout=0.0, heads=heads)).train(), ids, targets


def test_loss_is_summed_over_predicted_tokens() -> None:
    model, ids, targets = make_case()
    with torch.no_grad():
        states = model(ids)
        total, losses = full_loss(model, states, targets, 0.3)
    assert list(losses) == [1, 3, 4]
    for loop, loss in losses.items():
        log_p = F.log_softmax(model.head_of(loop)(states[loop]).detach(), -1)
        expected = -sum(log_p[b, t, targets[b, t]] for b in range(3) for t in range(21) if targets[b, t] != IGNORED)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(total, sum(weight * losses[loop] for loop, weight in exit_weights([*losses], 0.3).items()))


def test_cosine_compares_the_states_around_a_loop() -> None:
    model, ids, targets = make_case()
    with torch.no_grad():
        outputs = TokenLosses(model.eval())(ids, targets)
        states = [state.double() for state in model(ids, every=True).values()]
    for loop in (1, 3, 4):
        x, y = states[loop - 1], states[loop]
        expected = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
        torch.testing.assert_close(outputs[f"cosine_exit{loop}"].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("chunk", "heads", "exit_weight"),
    [(8, "shared", 0.3), (63, "separate", 0.3), (1000, "tied", 0.3), (8, "separate", 0.0), (63, "shared", 1.0)],
)
def test_chunks_keep_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, heads: str, exit_weight: float) -> None:
    monkeypatch.setattr(language_loss, "CHUNK_TOKENS", chunk)
    results = []
    for compute in (full_loss, chunked_loss):
        model, ids, targets = make_case(heads)
        loss, parts = compute(model, model(ids), targets, exit_weight)
        (loss / 7).backward()
        results.append((loss.item(), parts, {name: p.grad for name, p in model.named_parameters()}))
    (loss, parts, gradients), (chunked, chunked_parts, chunked_gradients) = results
    assert chunked == pytest.approx(loss, rel=1e-6)
    assert list(chunked_parts) == [1, 3, 4] and not any(part.requires_grad for part in chunked_parts.values())
    for loop, part in parts.items():
        assert chunked_parts[loop].item() == pytest.approx(part.item(), rel=1e-6)
    for name, gradient in gradients.items():
        if gradient is None:  # a head without weight, which the optimizer must skip
            assert chunked_gradients[name] is None, name
        else:
            assert torch.allclose(gradient, chunked_gradients[name], atol=1e-5), name


def test_chunks_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_loss, "CHUNK_TOKENS", 10)
    model, ids, targets = make_case()
    states = {loop: state.detach().requires_grad_() for loop, state in model(ids).items()}
    sizes: list[int] = []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            sizes.append(result.numel() if isinstance(result, Tensor) else 0)
            return result

    with RecordSizes():
        loss, _ = chunked_loss(model, states, targets, 0.3)
        loss.backward()
    assert max(sizes) == 63 * 32  # a state; all logits would be 63 × 60
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_weights_of_the_exits() -> None:
    assert exit_weights([2, 4, 8], 0.3) == pytest.approx({2: 0.15, 4: 0.15, 8: 0.7})
    assert exit_weights([2, 4, 8], 0.0) == {2: 0.0, 4: 0.0, 8: 1.0} and exit_weights([8], 0.3) == {8: 1.0}


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return public_weights(small_config(heads="separate", causal=False))


@pytest.mark.parametrize(("key", "prefix"), [("model", "_orig_mod.module."), ("model_state_dict", "module.")])
def test_wrapped_and_prefixed_weights(weights: dict[str, Tensor], key: str, prefix: str) -> None:
    content = {"epoch": 9, key: {prefix + name: tensor for name, tensor in weights.items()}, "loss": 0.07}
    state_dict = extract_state_dict(content, "checkpoint")
    assert state_dict.keys() == weights.keys() and all(state_dict[name] is weights[name] for name in weights)
    without_exits = {name: tensor for name, tensor in weights.items() if not name.startswith("intermediate_heads")}
    assert infer_config(without_exits, "checkpoint").heads == "tied"


@pytest.mark.parametrize("content", [None, [], {"model": {}}, {"model": {"a": 1}}, {"epoch": 3, "w": torch.ones(1)}])
def test_content_without_a_state_dict(content: object) -> None:
    with pytest.raises(ArtifactError, match="checkpoint: has no state dict"):
        extract_state_dict(content, "checkpoint")


def test_every_mismatch_is_listed(weights: dict[str, Tensor]) -> None:
    del weights["trm.norms.2.bias"], weights["norm1.weight"]
    weights["trm.extra.weight"] = torch.zeros(3, 4)
    weights["q_proj.weight"] = torch.zeros(32, 31)
    weights["trm.convs.1.pointwise.weight"] = torch.zeros(32, 32)
    config = infer_config(weights, "checkpoint")
    with pytest.raises(ArtifactError) as raised:
        convert_weights(weights, config, "checkpoint")
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == [
        "missing norm1.weight [32]",
        "missing trm.norms.2.bias [32]",
        "q_proj.weight is [32, 31], not [32, 32]",
        "trm.convs.1.pointwise.weight is [32, 32], not [32, 32, 1]",
        "unexpected trm.extra.weight [3, 4]",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("trm.lin1.0.weight", None, r"not a CRT checkpoint: trm\.lin1\.0\.weight is missing"),
        ("loop_encodings", (4, 32), "loop_encodings has 2 dimensions, not 4"),
        ("lm_head.weight", (60, 30), "width 30 is not a multiple"),
        ("intermediate_heads.loop_9.weight", (60, 32), "exits"),  # a head after the last loop
    ],
)
def test_impossible_sizes(weights: dict[str, Tensor], name: str, shape: tuple[int, ...] | None, message: str) -> None:
    weights.pop(name, None)
    with pytest.raises(ArtifactError, match=message):
        infer_config({**weights, **({name: torch.zeros(shape)} if shape else {})}, "checkpoint")
