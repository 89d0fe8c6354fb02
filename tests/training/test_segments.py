"""Training without padding: the same loss and gradients as with padding, and which kernel computes attention."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.artifacts.progress import SILENT
from edgeformer.data.batching import IGNORED, LEAST_PADDING, concatenate
from edgeformer.models import load_recipe
from edgeformer.models.blocks.language_loss import full_loss
from edgeformer.models.blocks.segments import FLASH_ATTN, SDPA, VARLEN, Segments, choose_attention
from edgeformer.models.crt.model import CRT
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.models.encoder.model import EncoderClassifier
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.loop.objective import Objective
from edgeformer.training.plan.duration import StepWork
from edgeformer.training.plan.memory import predict_peak
from edgeformer.training.train import TrainOptions, train
from tests.models.crt_oracle import small_config
from tests.models.test_decoder import SIZES as DECODER
from tests.models.test_encoder import SMALL as ENCODER
from tests.training.test_training_memory import language_recipe

LENGTHS = (9, 1, 4, 30)
CPU = torch.device("cpu")


def encoder_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    targets = batch["targets"] if logits.ndim == 3 else batch["labels"]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def language_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    return full_loss(model, model(batch["input_ids"], batch.get("positions")), batch["targets"], 0.3)[0]


STACKED = ENCODER.model_copy(update={"dropout": 0.0, "iterations": 1, "residual_scale": 0.0})
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, dict[str, Any]], Tensor]]] = {
    "recurrent encoder": (lambda: EncoderClassifier(ENCODER.model_copy(update={"dropout": 0.0}), 3), encoder_loss),
    "stacked encoder of tokens": (lambda: EncoderClassifier(STACKED, 3, per_token=True), encoder_loss),
    "crt": (lambda: CRT(small_config(dropout=0.0)), language_loss),
    "decoder": (lambda: DecoderModel(DecoderConfig(**DECODER)), language_loss),
}


def padded_batch(*, language: bool, packed: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of the ``LENGTHS``; ``packed``: the last one is three documents."""
    rng, shape = np.random.default_rng(0), (len(LENGTHS), max(LENGTHS))
    real = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    batch = {"input_ids": rng.integers(0, 40, shape), "targets": np.where(real, rng.integers(0, 3, shape), IGNORED)}
    if not language:
        return {**batch, "attention_mask": real.astype(np.int64), "labels": np.array([0, 2, 1, 1])}
    if packed:
        batch["positions"] = np.where(real, np.arange(shape[1]), 0)
        batch["positions"][3] = np.r_[0:7, 0:1, 0:22]
    return batch


def unpadded_batch(batch: dict[str, Any], kernel: str, *, language: bool) -> dict[str, Any]:
    arrays = concatenate(batch)
    longest = int(arrays["positions"].max()) + 1
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    segments = Segments(tensors.pop("ends"), tensors.pop("positions"), tensors.pop("places"), longest, kernel)
    return {**tensors, "positions" if language else "attention_mask": segments}


def attention_by_row(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, *, causal: bool) -> Tensor:
    """Attention of [N, H, D], as the kernels for CUDA compute it, and with their demands on the description."""
    assert q.shape == k.shape == v.shape and q.ndim == 3 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert ends.dtype == torch.int32 and int(ends[-1]) == len(q) and int(ends.diff().max()) == longest
    queries, keys, values = (x.transpose(0, 1).split(ends.diff().tolist(), 1) for x in (q, k, v))
    rows = zip(queries, keys, values, strict=True)
    attend = F.scaled_dot_product_attention
    return torch.cat([attend(q, k, v, is_causal=causal) for q, k, v in rows], 1).transpose(0, 1)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    assert dropout_p == 0 and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    return attention_by_row(q, k, v, cu_seqlens_q, max_seqlen_q, causal=causal)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    assert cu_seq_q is cu_seq_k and max_q == max_k and window_size in ((-1, -1), (-1, 0))
    return attention_by_row(query, key, value, cu_seq_q, max_q, causal=window_size == (-1, 0))


FLASH: Any = ModuleType("flash_attn")
FLASH.flash_attn_varlen_func = flash_attn_varlen_func
PACKAGES = {"flash-attn 2": FLASH, "another of this name": ModuleType("flash_attn"), "none": None}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for both kernels, which a CPU does not have."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", FLASH)


@pytest.mark.parametrize("kernel", [SDPA, VARLEN, FLASH_ATTN])
@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in MODELS), ("crt", True), ("decoder", True)])
def test_loss_and_gradients_are_those_of_padded_batches(name: str, packed: bool, kernel: str, kernels: None) -> None:
    make, compute = MODELS[name]
    torch.manual_seed(0)
    model, language = make().train(), compute is language_loss
    batch, results = padded_batch(language=language, packed=packed), []
    for inputs in (
        {key: torch.from_numpy(array) for key, array in batch.items()},
        unpadded_batch(batch, kernel, language=language),
    ):
        model.zero_grad()
        loss = compute(model, inputs)
        loss.backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, expected), (unpadded_loss, gradients) = results
    assert inputs["input_ids"].shape == (1, sum(LENGTHS)), "padding is left out"
    torch.testing.assert_close(unpadded_loss, loss, atol=1e-5, rtol=1e-6)
    assert expected.keys() == gradients.keys() and len(gradients) > 5
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], atol=1e-5, rtol=1e-5, msg=key)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernel_by_card_format_and_package(
    package: str, capability: tuple[int, int], precision: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", PACKAGES[package])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    base = ["model.hidden_size=64", "model.heads=2", f"model.dropout={dropout}"]
    expected, problem = SDPA, ""
    if capability < (8, 0):
        problem = "flash kernels need compute capability 8.0, and this card has 7.5"
    elif precision == "fp32":
        problem = "flash kernels compute in bf16 and fp16"
    elif package == "flash-attn 2":
        expected = FLASH_ATTN
    elif not dropout:
        expected = VARLEN
    else:
        problem = "flash-attn 2 cannot be imported"
    for requested in ("auto", "flash"):
        recipe = load_recipe("quickstart", [*base, f"model.attention={requested}"])
        if problem and requested == "flash":
            with pytest.raises(InputError, match=f"model.attention: flash is not possible: {problem}"):
                choose_attention(recipe, "cuda", precision)
            continue
        use = choose_attention(recipe, "cuda", precision)
        assert (use.requested, use.used, use.unpadded) == (requested, expected, expected != SDPA)
        assert (use.reason or "").startswith(problem) and bool(use.reason) == bool(problem)
    assert choose_attention(load_recipe("quickstart", [*base, "model.attention=sdpa"]), "cuda", precision).used == SDPA


@pytest.mark.parametrize(
    ("recipe", "changes", "reason"),
    [
        ("quickstart", ["model.hidden_size=24", "model.heads=2"], "heads of 8, 16, … 192 numbers, not 12"),
        ("quickstart", ["training.compile={shapes: 2}"], "training.compile needs batches of few shapes"),
        ("crt_mini", ["training.teacher=run"], "the teacher reads padded batches"),
    ],
)
def test_padding_stays_where_it_is_needed(recipe: str, changes: list[str], reason: str) -> None:
    use = choose_attention(load_recipe(recipe, ["model.attention=auto", *changes]), "cuda", "bf16", (8, 9))
    assert (use.used, use.unpadded) == (SDPA, False) and reason in str(use.reason)


def test_future_tokens_and_batch_statistics_exclude_it_and_fingerprints_ignore_it() -> None:
    for change in ({"causal": False}, {"norm": "batch"}):
        with pytest.raises(ValueError, match="attention must be sdpa with norm: batch or causal: false"):
            small_config(attention="auto", **change)
    for name in ("quickstart", "crt_mini", "looped_mini"):
        prints = {load_recipe(name, [f"model.attention={value}"]).fingerprint() for value in ("auto", "sdpa", "flash")}
        assert len({*prints, load_recipe(name).fingerprint()}) == 1


def test_only_batches_with_much_padding_lose_it(tmp_path: Path, tiny_recipe: ClassificationRecipe) -> None:
    objective = Objective(tiny_recipe, tmp_path, SILENT)
    lengths = objective.prepared.train.sizes(np.arange(len(objective.prepared.train)))
    order = np.argsort(lengths, kind="stable")
    even, uneven = order[:8], np.append(order[:8], order[-1])
    assert 1 - lengths[uneven].mean() / lengths.max() > LEAST_PADDING
    batches = [objective.batch(rows, CPU)[0] for rows in (even, uneven)]
    objective.attention = choose_attention(tiny_recipe, "cpu", "fp32")
    (_, even_weight), (unpadded, weight) = (objective.batch(rows, CPU) for rows in (even, uneven))
    assert objective.batch(even, CPU)[0]["input_ids"].shape == batches[0]["input_ids"].shape
    assert (even_weight, weight) == (8, 9) and unpadded["labels"].tolist() == batches[1]["labels"].tolist()
    segments: Any = unpadded["attention_mask"]
    assert unpadded["input_ids"].shape == (1, lengths[uneven].sum()) and segments.longest == lengths.max()
    assert segments.ends.tolist() == [0, *lengths[uneven].cumsum()]


def test_the_run_says_what_was_requested_used_and_why(tmp_path: Path, tiny_recipe: ClassificationRecipe) -> None:
    run = train(tiny_recipe, TrainOptions(tmp_path, max_steps=1, accelerator="cpu"))
    reason = "flash kernels need a CUDA card"
    assert read_run(run).attention == AttentionUse(requested="auto", used=SDPA, reason=reason, unpadded=True)
    recipe = tiny_recipe.model_copy(update={"model": tiny_recipe.model.model_copy(update={"attention": "flash"})})
    with pytest.raises(InputError, match=f"model.attention: flash is not possible: {reason}"):
        train(recipe, TrainOptions(tmp_path, name="flash", accelerator="cpu"))
    assert not (tmp_path / "flash").exists()


def test_plan_counts_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of attention are those of SDPA, and no mask of packed rows is stored."""
    results = {}
    for name in ("sdpa", "auto"):
        recipe, work = language_recipe(f"model.attention={name}", "training.checkpointing=none"), StepWork()
        results[name] = predict_peak(recipe, device_kind="cuda", precision="bf16", work=work), work.operations
    (padded, operations), (unpadded, unpadded_operations) = results["sdpa"], results["auto"]
    assert unpadded_operations == operations > 0
    assert 0.9 * padded.activations < unpadded.activations <= padded.activations
