"""The training loss: summed over tokens, the same in chunks, weighted over the exits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import edgeformer.models.crt.loss as crt_loss
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.loss import IGNORED, TokenLosses, chunked_loss, exit_losses, weighted, whole_loss
from tests.models.crt_oracle import small_config


def setting(heads: str = "shared") -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (3, 21))
    targets = ids.roll(-1, 1)
    targets[:, 15:] = IGNORED
    targets[2] = IGNORED  # a row without anything to predict
    return build_crt(small_config(dropout=0.0, heads=heads)).train(), ids, targets


def test_is_the_sum_over_predicted_tokens_only() -> None:
    model, ids, targets = setting()
    with torch.no_grad():
        states = model(ids)
        losses = exit_losses(model, states, targets)
    assert list(losses) == [1, 3, 4]
    for loop, loss in losses.items():
        log_p = F.log_softmax(model.head_of(loop)(states[loop]).detach(), -1)
        expected = -sum(log_p[b, t, targets[b, t]] for b in range(3) for t in range(21) if targets[b, t] != IGNORED)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5)


def test_a_cosine_is_between_the_states_around_a_loop() -> None:
    model, ids, targets = setting()
    with torch.no_grad():
        found = TokenLosses(model.eval())(ids, targets)
        states = [state.double() for state in model(ids, every=True).values()]
    for loop in (1, 3, 4):
        before, after = states[loop - 1], states[loop]
        expected = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        torch.testing.assert_close(found[f"cosine_exit{loop}"].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("exit_weight", [0.3, 0.0, 1.0])
@pytest.mark.parametrize("heads", ["shared", "separate", "tied"])
@pytest.mark.parametrize("chunk", [1, 8, 63, 64, 1000])
def test_chunks_change_neither_loss_nor_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk: int, heads: str, exit_weight: float
) -> None:
    monkeypatch.setattr(crt_loss, "CHUNK_TOKENS", chunk)
    found = []
    for measure in (whole_loss, chunked_loss):
        model, ids, targets = setting(heads)
        loss, parts = measure(model, model(ids), targets, exit_weight)
        (loss / 7).backward()
        found.append((loss.item(), parts, {name: p.grad for name, p in model.named_parameters()}))
    (whole, each, gradients), (chunked, every, again) = found
    assert chunked == pytest.approx(whole, rel=1e-6)
    assert list(every) == [1, 3, 4] and not any(part.requires_grad for part in every.values())
    for loop, part in each.items():
        assert every[loop].item() == pytest.approx(part.item(), rel=1e-6)
    for name, gradient in gradients.items():
        if gradient is None:  # of a head that does not count: the optimizer must leave it alone
            assert again[name] is None, name
        else:
            assert torch.allclose(gradient, again[name], atol=1e-5), name


def test_half_a_gradient_is_as_good_as_whole_logits_give_it() -> None:
    """Under autocast both round to bfloat16; neither may be further from what float32 gives."""
    found = {}
    for name, measure, half in (
        ("exact", whole_loss, False),
        ("whole", whole_loss, True),
        ("chunked", chunked_loss, True),
    ):
        model, ids, targets = setting()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = measure(model, model(ids), targets, 0.3)
        loss.backward()
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    error = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in found}
    assert 0 < error["chunked"] < max(1.2 * error["whole"], 1e-3) < 0.03


def test_logits_far_apart_do_not_overflow() -> None:
    model, ids, targets = setting()
    with torch.no_grad():
        states = {loop: 3000 * state for loop, state in model(ids).items()}
    (whole, _), (chunked, _) = (measure(model, states, targets, 0.3) for measure in (whole_loss, chunked_loss))
    assert whole.item() > 1e4 and chunked.item() == pytest.approx(whole.item(), rel=1e-6)


def test_chunks_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crt_loss, "CHUNK_TOKENS", 10)
    model, ids, targets = setting()
    states = {loop: state.detach().requires_grad_() for loop, state in model(ids).items()}
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, Tensor) else 0)
            return made

    with Sizes():
        loss, _ = chunked_loss(model, states, targets, 0.3)
        loss.backward()
    assert max(sizes) == 63 * 32  # a state; logits of all tokens would be 63 × 60
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_weights_of_the_exits() -> None:
    losses = {2: torch.tensor(1.0), 4: torch.tensor(3.0), 8: torch.tensor(10.0)}
    assert weighted(losses, 0.3).item() == pytest.approx(0.7 * 10 + 0.3 * 2)
    assert weighted(losses, 0.0).item() == 10.0
    assert weighted({8: losses[8]}, 0.3).item() == 10.0
