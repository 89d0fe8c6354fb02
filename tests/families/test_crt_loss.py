"""The training loss: summed over tokens, the same in chunks, weighted over the exits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import edgeformer.families.crt.loss as crt_loss
from edgeformer.families.crt.loss import IGNORED, TokenLosses, exit_losses, weighted
from edgeformer.families.crt.network import build_crt
from tests.families.crt_oracle import small_config


def setting() -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (3, 21))
    targets = ids.roll(-1, 1)
    targets[:, 15:] = IGNORED
    targets[2] = IGNORED  # a row without anything to predict
    return build_crt(small_config(dropout=0.0)).train(), ids, targets


def test_is_the_sum_over_predicted_tokens_only() -> None:
    model, ids, targets = setting()
    with torch.no_grad():
        states = model(ids)
        losses = exit_losses(model, states, targets, chunked=False)
    assert list(losses) == [1, 3, 4]
    for loop, loss in losses.items():
        log_p = F.log_softmax(model.head_of(loop)(states[loop]).detach(), -1)
        expected = -sum(log_p[b, t, targets[b, t]] for b in range(3) for t in range(21) if targets[b, t] != IGNORED)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5)


def test_a_cosine_is_between_the_states_around_a_loop() -> None:
    model, ids, targets = setting()
    with torch.no_grad():
        found = TokenLosses(model.eval())(ids, targets)
        states = [state.double() for _, state in model.states(ids)]
    for loop in (1, 3, 4):
        before, after = states[loop - 1], states[loop]
        expected = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        torch.testing.assert_close(found[f"cosine_exit{loop}"].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 8, 63, 64, 1000])
def test_chunks_change_neither_loss_nor_gradient(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(crt_loss, "CHUNK_TOKENS", chunk)
    found = {}
    for chunked in (False, True):
        model, ids, targets = setting()
        loss = weighted(exit_losses(model, model(ids), targets, chunked=chunked), 0.3)
        loss.backward()
        found[chunked] = (loss.item(), {name: p.grad for name, p in model.named_parameters()})
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    for name, gradient in found[False][1].items():
        assert torch.allclose(gradient, found[True][1][name], atol=1e-5), name


def test_chunks_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crt_loss, "CHUNK_TOKENS", 10)
    model, ids, targets = setting()
    rows: list[int] = []
    for head in (model.head, model.exit_heads["shared"]):
        head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    states = model(ids)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = exit_losses(model, states, targets, chunked=True)
    assert max(rows) == 10 and sum(rows) == 3 * 63
    assert max(saved) <= 63 * 32  # the hidden states; no tensor with a column per word is kept
    weighted(losses, 0.3).backward()


def test_weights_of_the_exits() -> None:
    losses = {2: torch.tensor(1.0), 4: torch.tensor(3.0), 8: torch.tensor(10.0)}
    assert weighted(losses, 0.3).item() == pytest.approx(0.7 * 10 + 0.3 * 2)
    assert weighted(losses, 0.0).item() == 10.0
    assert weighted({8: losses[8]}, 0.3).item() == 10.0
