"""One training step and one validation batch of a recipe, on tensors without data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from edgeformer.families.build import build_crt, build_encoder
from edgeformer.families.crt.loss import CHUNK_TOKENS, exit_losses, weighted
from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.layers import SelfAttention
from edgeformer.formats.language_recipe import CRTConfig, LanguageRecipe
from edgeformer.formats.recipe import ClassificationRecipe, EncoderConfig
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.stages.training.classification import EVALUATION_BATCH
from edgeformer.stages.training.language import EVALUATION_TOKENS
from edgeformer.stages.training.memory_ledger import Event, MemoryLedger
from edgeformer.stages.training.optimization import build_optimizer

DeviceKind = Literal["cuda", "cpu"]
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trace:
    """The memory of a training step.

    Attributes:
        weights, optimizer: bytes of the tensors that live as long as the training.
        first: the first micro-batch of a step, clipping and the optimizer's step. What it leaves are gradients.
        validation: a batch of validation.
    """

    weights: int
    optimizer: int
    first: list[Event]
    validation: list[Event]


def trace(recipe: AnyRecipe, device_kind: DeviceKind, precision: str) -> Trace:
    """The memory of training ``recipe``, batches at their longest, found without allocating any of it.

    The tensors are fake ones of the CPU (fake CUDA tensors need a torch with CUDA); for a CUDA card, what differs
    there is put in place.
    """
    with FakeTensorMode():
        if isinstance(recipe, LanguageRecipe):
            model, batch, loss = _language(recipe)
        else:
            model, batch, loss = _classification(recipe)
        if device_kind == "cuda":
            _as_on_cuda(model)
        model.train()
        parameters = list(model.parameters())
        weights = [*parameters, *model.buffers()]
        ledger = MemoryLedger(weights)
        optimizer = build_optimizer(model, recipe.training.optimizer)
        _make_state(optimizer, parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_gradient_hook(ledger))  # type: ignore[no-untyped-call]
        for tensor in batch:
            ledger.enter(tensor, "activations")
        half = _FORMATS.get(precision)
        with ledger.making("activations"), contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
            total = loss()
        with ledger.making("temporary"):
            total.backward()  # type: ignore[no-untyped-call]
            if recipe.training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, recipe.training.clip_norm)
            optimizer.step()
        first = list(ledger.events)  # a copy: what is left goes when this function returns
        state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
        return Trace(_bytes(weights), _bytes(state), first, _validation(_Shape.of(recipe)))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _make_state(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _gradient_hook(ledger: MemoryLedger) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.is_gradient(parameter.grad)

    return hook


class _MaskDropout(nn.Module):
    """Dropout as CUDA computes it: it keeps a mask of bytes, where the CPU keeps the noise in the input's type."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        result: Tensor = torch.native_dropout(x, self.share, self.training)[0]
        return result


def _as_on_cuda(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p:
                setattr(module, name, _MaskDropout(child.p))
        if isinstance(module, SelfAttention):
            # With dropout, the CPU's attention holds all its weights [B, H, S, S]. CUDA's fused kernels never do, and
            # neither does the CPU's kernel without dropout, which takes its place here.
            module.dropout = 0.0


_Work = tuple[nn.Module, list[Tensor], Callable[[], Tensor]]
"""A model, a micro-batch, and the loss of the one on the other."""


def _language(recipe: LanguageRecipe) -> _Work:
    config = recipe.training
    model = build_crt(recipe.model)
    model.checkpointing = config.checkpointing
    ids = torch.zeros(config.batch_size, recipe.data.sequence_length, dtype=torch.int64)
    targets = torch.zeros_like(ids)
    positions = torch.zeros_like(ids) if recipe.data.mode == "packed" else None

    def loss() -> Tensor:
        losses = exit_losses(model, model(ids, positions), targets, chunked=config.chunked_loss)
        return weighted(losses, config.exit_weight)

    return model, [ids, targets] + ([] if positions is None else [positions]), loss


def _classification(recipe: ClassificationRecipe) -> _Work:
    config = recipe.training
    model, _ = build_encoder(recipe.model, recipe.classes, for_export=True)  # flash or not takes the same memory
    ids = torch.zeros(config.batch_size, recipe.data.max_length, dtype=torch.int64)
    mask, labels = torch.ones_like(ids), torch.zeros(config.batch_size, dtype=torch.int64)

    def loss() -> Tensor:
        logits = model(ids, mask).float()
        return F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing, reduction="sum")

    return model, [ids, mask, labels], loss


@dataclass(frozen=True)
class _Shape:
    """All that the memory of validation depends on: nothing of how a recipe trains."""

    model: CRTConfig | EncoderConfig
    classes: int
    length: int
    packed: bool

    @classmethod
    def of(cls, recipe: AnyRecipe) -> _Shape:
        if isinstance(recipe, LanguageRecipe):
            return cls(recipe.model, 0, recipe.data.sequence_length, recipe.data.mode == "packed")
        return cls(recipe.model, recipe.classes, recipe.data.max_length, packed=False)


@functools.lru_cache(maxsize=8)
def _validation(shape: _Shape) -> list[Event]:
    """A batch of validation, in float32 and without gradients."""
    if isinstance(shape.model, CRTConfig):
        model: nn.Module = build_crt(shape.model)
        ids = torch.zeros(max(1, EVALUATION_TOKENS // shape.length), shape.length, dtype=torch.int64)
        extra = torch.zeros_like(ids) if shape.packed else None
    else:
        model, _ = build_encoder(shape.model, shape.classes, for_export=True)
        ids = torch.zeros(EVALUATION_BATCH, shape.length, dtype=torch.int64)
        extra = torch.ones_like(ids)
    model.eval()
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    for tensor in (ids, extra):
        if tensor is not None:
            ledger.enter(tensor, "activations")
    with ledger.making("activations"), torch.no_grad():
        result = model(ids, extra)
        if isinstance(model, CRT):
            for loop, state in result.items():
                scored = state.flatten(0, 1).clone()
                logits = model.head_of(loop)(scored[:CHUNK_TOKENS]).float()
                (logits.amax(-1) - logits.logsumexp(-1)).exp()
        return list(ledger.events)
