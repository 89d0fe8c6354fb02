"""Attention to rows that follow each other in one sequence without padding, and the choice of its kernel."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.tasks import get_task

SDPA, FLASH_ATTN, VARLEN = "sdpa", "flash-attn", "varlen_attn"
"""Kernels: torch's ``scaled_dot_product_attention``, which needs padded rows; of flash-attn 2; torch's other one."""


def kernel_problems() -> dict[str, str | None]:
    """Return flash kernel → why this host cannot use it (None: it can), the preferred one first."""
    has_flash = torch.backends.cuda.is_flash_attention_available()
    problems = {FLASH_ATTN: None, VARLEN: None if has_flash else "this torch is built without flash attention"}
    try:  # flash-attn-4 has the same package name, and not this function
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        problems[FLASH_ATTN] = f"flash-attn 2 cannot be imported ({str(error).strip().splitlines()[0]})"
    return problems


def choose_attention(recipe: Any, device: str, precision: str, card: tuple[int, ...] | None = None) -> AttentionUse:
    """Choose the kernel of attention in training, and whether batches have padding, by ``model.attention``.

    ``device`` is cuda or cpu, ``precision`` resolved. ``card`` is the compute capability of a planned card, for which
    torch's kernel is assumed; None: the card of this host. Raises InputError if ``flash`` is requested and impossible.
    """
    model, training, is_card = recipe.model, recipe.training, device == "cuda"
    is_language = get_task(recipe.task).can_write  # its models do not drop attention weights
    requested = getattr(model, "attention", SDPA)
    if requested == SDPA:
        return AttentionUse()
    major, minor = (card or torch.cuda.get_device_capability()) if is_card else (0, 0)
    needs_padding = {
        "training.compile needs batches of few shapes": training.compile is not None,
        "the teacher reads padded batches": is_language and training.teacher is not None,
    }
    heads = getattr(model, "attention_heads", None) or model.heads
    head = getattr(model, "head_size", None) or model.hidden_size // heads
    obstacles = needs_padding | {
        "flash kernels need a CUDA card": not is_card,
        f"flash kernels need compute capability 8.0, and this card has {major}.{minor}": major < 8,
        "flash kernels compute in bf16 and fp16, and this training in fp32": precision == "fp32",
        # Above 192 numbers, some cards from compute capability 8.0 on lack the gradient.
        f"flash kernels need heads of 8, 16, … 192 numbers, not {head}": head % 8 > 0 or head > 192,
    }
    reason = next((text for text, applies in obstacles.items() if applies), "")
    if not reason:
        kernels: dict[str, str | None] = kernel_problems() if card is None else {VARLEN: None}
        if model.dropout and not is_language:
            kernels[VARLEN] = kernels[VARLEN] or "torch's varlen_attn has no dropout of attention weights"
        if kernel := next((name for name, problem in kernels.items() if problem is None), None):
            return AttentionUse(requested=requested, used=kernel, unpadded=True)
        reason = "; ".join(filter(None, kernels.values()))
    if requested == "flash":
        raise InputError(f"model.attention: flash is not possible: {reason}; use auto, or change that")
    unpadded = not is_card and not any(needs_padding.values())
    return AttentionUse(requested=requested, used=SDPA, reason=reason, unpadded=unpadded)


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows, or documents of packed rows, that follow each other in one sequence; models take it instead of a mask.

    Shapes: B rows, N tokens of all rows, S tokens of the longest row, H heads, D numbers of a head.
    """

    ends: Tensor  # where each row begins, then N; int32 [B + 1]
    positions: Tensor  # of each token in its row, int64 [N]
    places: Tensor  # of each token in the flattened [B, S] of padded rows, int64 [N]
    longest: int  # S
    kernel: str = SDPA  # with which rows are padded within attention only

    def pad(self, x: Tensor) -> Tensor:
        """x [1, H, N, D] → [B, H, S, D], zeros for padding."""
        padded = x.new_zeros((len(self.ends) - 1) * self.longest, x.shape[1], x.shape[3])
        padded[self.places] = x[0].transpose(0, 1)
        return padded.view(-1, self.longest, *padded.shape[1:]).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
        """Attend within each row, at scale D^-0.5: q, k, v [1, H, N, D] → [1, H, N, D]."""
        if self.kernel == SDPA:
            # [B, 1, 1, S]; a causal mask hides padding, which comes last.
            mask = None if causal else self.pad(torch.ones_like(q[:, :1, :, :1])).bool().transpose(2, 3)
            rows = self.pad(q), self.pad(k), self.pad(v)
            mixed = F.scaled_dot_product_attention(*rows, attn_mask=mask, dropout_p=dropout, is_causal=causal)
            # The gradient of F.embedding is faster on CPUs than that of an index.
            tokens = F.embedding(self.places, mixed.transpose(1, 2).flatten(0, 1).flatten(1))  # [N, H · D]
            return tokens.view(-1, *q.shape[1::2]).transpose(0, 1)[None]
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, H, D]
        lengths = self.ends, self.ends, self.longest, self.longest
        if self.kernel == FLASH_ATTN:
            from flash_attn import flash_attn_varlen_func

            result: Any = flash_attn_varlen_func(q, k, v, *lengths, dropout_p=dropout, causal=causal)
        else:
            from torch.nn.attention.varlen import varlen_attn

            result = varlen_attn(q, k, v, *lengths, window_size=(-1, 0 if causal else -1))
        return result.transpose(0, 1)[None]


Mask = Tensor | Segments | None
"""What hides other rows, documents and padding from a token; None: every row is whole."""
