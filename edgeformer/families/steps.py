"""What is exported for hosts that loop by themselves: the parts of a step bundle, and so of the decode graph."""

from __future__ import annotations

import torch
from torch import Tensor

from edgeformer.families.crt.cache import convolution_context
from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.families.step_graphs import (
    CRTEmbed,
    CRTLoop,
    CRTReadout,
    EncoderEmbed,
    EncoderLoop,
    EncoderReadout,
)
from edgeformer.families.tracing import GraphSpec, text_spec

# Of the examples; a size of 0 or 1 would become a constant of the graph. All differ, so that none is taken for another.
_BATCH, _NEW, _PAST = 2, 3, 5

_ROWS = {0: "batch"}
_STATE = {0: "batch", 1: "sequence"}
_KEPT = {0: "batch", 2: "past"}


def step_specs(model: EncoderClassifier | CRT) -> dict[str, GraphSpec]:
    """Part → spec: ``embed``, ``loop``, ``readout`` (of the last loop), and a part for every other head of CRT-Deep.

    Those are ``readout_exit`` where the exits share a head, else ``readout_exit2``, ``readout_exit4``…; none where they
    are tied to the last one.

    Raises:
        InputError: a CRT that looks ahead.
    """
    return _crt_steps(model) if isinstance(model, CRT) else _encoder_steps(model)


def _encoder_steps(model: EncoderClassifier) -> dict[str, GraphSpec]:
    longest = {"sequence": len(model.cos)}
    state = _state(model)
    mask = torch.ones(_BATCH, _NEW, dtype=torch.int64)
    mask[1, 1:] = 0
    return {
        "embed": text_spec(EncoderEmbed(model), ("input_ids",), longest["sequence"], ("state",)),
        "loop": GraphSpec(
            EncoderLoop(model),
            {"state": state, "attention_mask": mask},
            {"state": _STATE, "attention_mask": _STATE},
            ("next_state",),
            longest,
        ),
        "readout": GraphSpec(EncoderReadout(model), {"state": state}, {"state": _STATE}, longest=longest),
    }


def _crt_steps(model: CRT) -> dict[str, GraphSpec]:
    longest = {"sequence": model.max_positions, "past": model.max_positions}
    state, (key, value) = _state(model), _keys_values(model)
    embed = {**_text(), "past_conv": _convolutions(model)[0]}
    loop = {
        "state": state,
        "loop": torch.zeros(1, dtype=torch.int64),
        "past_key": key,
        "past_value": value,
        "past_conv": _convolutions(model)[1],
    }
    text, kept = {"input_ids": _STATE, "position_ids": _STATE}, {"past_key": _KEPT, "past_value": _KEPT}
    return {
        "embed": GraphSpec(
            CRTEmbed(model),
            embed,
            {**text, "past_conv": _ROWS},
            ("state", "present_conv"),
            {"sequence": model.max_positions},
        ),
        "loop": GraphSpec(
            CRTLoop(model),
            loop,
            {"state": _STATE, **kept, "past_conv": _ROWS},
            ("next_state", "present_key", "present_value", "present_conv"),
            longest,
        ),
        **readout_specs(model),
    }


def readout_specs(model: CRT) -> dict[str, GraphSpec]:
    """A part for every head; also of a model that looks ahead."""
    heads = {"readout": model.loops}
    if "shared" in model.exit_heads and len(model.exits) > 1:
        heads["readout_exit"] = model.exits[0]
    heads |= {f"readout_exit{name}": int(name) for name in model.exit_heads if name != "shared"}
    state = _state(model)
    return {
        part: GraphSpec(CRTReadout(model, loop), {"state": state}, {"state": _STATE}) for part, loop in heads.items()
    }


def readout_of(model: CRT, loop: int) -> str:
    """The part that answers after ``loop``."""
    if loop == model.loops or not model.exit_heads:
        return "readout"
    return "readout_exit" if "shared" in model.exit_heads else f"readout_exit{loop}"


def _text() -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(_BATCH, _NEW, dtype=torch.int64),
        "position_ids": torch.arange(_PAST, _PAST + _NEW).repeat(_BATCH, 1),
    }


def _state(model: EncoderClassifier | CRT) -> Tensor:
    """A state in the matrices' type."""
    weight = model.projection.weight if isinstance(model, CRT) else model.tokens.weight
    width = weight.shape[0] if isinstance(model, CRT) else weight.shape[1]
    return weight.new_zeros(_BATCH, _NEW, width)


def _keys_values(model: CRT) -> tuple[Tensor, Tensor]:
    attention, weight = model.attention, model.projection.weight
    shape = (_BATCH, attention.heads, _PAST, attention.head_size)
    return weight.new_zeros(shape), weight.new_zeros(shape)


def _convolutions(model: CRT) -> tuple[Tensor, Tensor]:
    """What is kept for the convolutions of the embedding, and of a loop."""
    weight = model.projection.weight
    embed, loop = (weight.new_zeros(_BATCH, convolution_context(trm), len(weight)) for trm in (model.refine, model.trm))
    return embed, loop
