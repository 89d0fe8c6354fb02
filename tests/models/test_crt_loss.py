"""The training loss of language models: summed over tokens, equal in chunks, weighted over the exits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import edgeformer.models.language_loss as language_loss
from edgeformer.models.crt.model import CRT
from edgeformer.models.language_loss import IGNORED, TokenLosses, chunked_loss, exit_weights, full_loss
from tests.models.crt_oracle import small_config


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
def test_chunks_keep_loss_and_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk: int, heads: str, exit_weight: float
) -> None:
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
