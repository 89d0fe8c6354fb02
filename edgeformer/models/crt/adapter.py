"""CRT-Deep's torch half: traced parts, and the ONNX graphs of all loops that are composed of them.

A host runs embed, then the loop graph any number of times, then a readout. Parts with caches take and return the cached
tensors of earlier tokens. ``past``, the number of cached tokens, is 0 at the start of a text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn

from edgeformer.models.adapter import LanguageAdapter, count_parameters
from edgeformer.models.blocks.tracing import (
    BATCH,
    TOKENS,
    Composer,
    Graphs,
    GraphSpec,
    KeyValue,
    Piece,
    export_graph,
    state_name,
)
from edgeformer.models.crt.model import CRT, CachedLoops
from edgeformer.tasks.early_exit import exit_logits

EMBED, BLOCK = "text_embed", "block"
_PAST = 5  # cached tokens of the examples; differs from BATCH and TOKENS so that no size is mistaken for another
_TOKEN_AXES, _PAST_AXES = {0: "batch", 1: "sequence"}, {0: "batch", 2: "past"}
_AXES = {
    **dict.fromkeys(("input_ids", "position_ids", "state"), _TOKEN_AXES),
    **dict.fromkeys(("past_key", "past_value"), _PAST_AXES),
    "past_conv": {0: "batch"},
}


class CRTAdapter(LanguageAdapter):
    def build(self, recipe: Any) -> CRT:
        return CRT(recipe.model)

    def needed(self, model: CRT) -> dict[int, int]:
        """Exclude the heads of other exits and the encodings of later loops."""
        heads = count_parameters(model.exit_heads) + count_parameters(model.head)
        shared, width = count_parameters(model) - heads, model.loop_encodings.shape[1]
        return {
            loop: shared + count_parameters(model.head_of(loop)) - (model.loops - loop) * width for loop in model.exits
        }

    def trace(self, model: CRT, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None) -> Graphs:
        """The block is traced once for all loops; a model that looks ahead gets no graphs with caches."""
        # 1. Trace the pieces; those of a causal model with caches are the parts of the step artifact
        pieces = {name: export_graph(spec) for name, spec in piece_specs(model).items()}
        parts = {name: graph for name, graph in pieces.items() if name not in (EMBED, BLOCK)} if model.causal else {}

        # 2. Compose the graph of all exits
        composer = Composer({name: graph for name, graph in pieces.items() if name not in ("embed", "loop")})
        ids = composer.input(EMBED, "input_ids")
        x = composer.call(EMBED, {"input_ids": ids})["state"]
        logits: dict[str, onnx_ir.Value] = {}
        states: dict[str, onnx_ir.Value] = {}
        for loop in range(1, model.loops + 1):
            encoding = composer.constant(f"loop_encoding{loop}", model.loop_encodings[loop - 1].detach().numpy())
            x = composer.call(BLOCK, {"state": x, "encoding": encoding})["next_state"]
            states[state_name(loop)] = composer.to_float32(x)
            if loop in model.exits:
                part = "readout_exit" if "shared" in model.exit_heads else f"readout_exit{loop}"
                has_exit_head = loop < model.loops and len(model.exit_heads) > 0
                logits[exit_logits(loop)] = composer.call(part if has_exit_head else "readout", {"state": x})["logits"]
        exits = composer.finish([ids], {**logits, **states})
        if not parts:
            return Graphs(exits, shared_weights=True)

        # 3. Compose the graph of all loops for new tokens, whose caches are inputs and outputs
        composer = Composer({name: parts[name] for name in ("embed", "loop", "readout")})
        text = {name: composer.input("embed", name) for name in ("input_ids", "position_ids")}
        convolutions = [composer.input("embed", "past_conv", "past_conv.embed")]
        results = composer.call("embed", {**text, "past_conv": convolutions[0]})
        x, present_conv = results["state"], {"present_conv.embed": results["present_conv"]}
        past = composer.cache_inputs("loop", model.loops)
        present: list[KeyValue] = []
        for number, (key, value) in enumerate(past):
            convolution = composer.input("loop", "past_conv", f"past_conv.{number}")
            loop_number = composer.constant(f"loop_number{number}", np.array([number], dtype=np.int64))
            caches = {"past_key": key, "past_value": value, "past_conv": convolution}
            results = composer.call("loop", {"state": x, "loop": loop_number, **caches})
            x = results["next_state"]
            convolutions.append(convolution)
            present.append((results["present_key"], results["present_value"]))
            present_conv[f"present_conv.{number}"] = results["present_conv"]
        newest = {"logits": composer.newest_logits(x), **composer.cache_outputs(present), **present_conv}
        cached = [*text.values(), *(value for pair in past for value in pair), *convolutions]
        decode = composer.finish(cached, newest)
        return Graphs(exits, parts if steps else {}, decode, shared_weights=True)

    def decoder(self, model: CRT) -> CachedLoops:
        return CachedLoops(model)


def piece_specs(model: CRT) -> dict[str, GraphSpec]:
    """Return the spec of every piece: those of the full text, and of a causal model the parts of the step artifact.

    Both have the heads: ``readout`` of the last loop, and ``readout_exit`` for a head that the exits share, else
    ``readout_exit2``, ``readout_exit4``…; none if they are tied to the last head.
    """
    attention, weight = model.attention, model.head.weight
    width = weight.shape[1]
    ids, state = torch.ones(BATCH, TOKENS, dtype=torch.int64), weight.new_zeros(BATCH, TOKENS, width)
    encoding = model.loop_encodings[0].detach()

    def spec(forward: Callable[..., Any], outputs: tuple[str, ...], **inputs: Tensor) -> GraphSpec:
        axes = {name: _AXES[name] for name in inputs if name in _AXES}
        sizes = {size for names in axes.values() for size in names.values() if size != "batch"}
        return GraphSpec(Piece(model, forward), inputs, axes, outputs, dict.fromkeys(sizes, model.max_positions))

    specs = {
        EMBED: spec(model.embed, ("state",), input_ids=ids),
        BLOCK: spec(model.block, ("next_state",), state=state, encoding=encoding),
    }
    if model.causal:
        key = weight.new_zeros(BATCH, attention.heads, _PAST, attention.head_size)
        embed_cache, loop_cache = (weight.new_zeros(BATCH, sum(c.contexts), width) for c in (model.refine, model.trm))
        specs["embed"] = spec(
            model.embed_cached, ("state", "present_conv"), input_ids=torch.zeros_like(ids),
            position_ids=torch.arange(_PAST, _PAST + TOKENS).repeat(BATCH, 1), past_conv=embed_cache,
        )  # fmt: skip
        specs["loop"] = spec(
            partial(_run_loop, model), ("next_state", "present_key", "present_value", "present_conv"), state=state,
            loop=torch.zeros(1, dtype=torch.int64), past_key=key, past_value=key.clone(), past_conv=loop_cache,
        )  # fmt: skip
    heads = {"readout": model.loops}
    if "shared" in model.exit_heads and len(model.exits) > 1:
        heads["readout_exit"] = model.exits[0]
    heads |= {f"readout_exit{name}": int(name) for name in model.exit_heads if name != "shared"}
    for part, loop in heads.items():
        head = model.head_of(loop)
        specs[part] = GraphSpec(Piece(head, partial(_readout, head)), {"state": state}, {"state": _TOKEN_AXES})
    return specs


def _readout(head: nn.Linear, state: Tensor) -> Tensor:
    return head(state).float()


def _run_loop(
    model: CRT, state: Tensor, loop: Tensor, past_key: Tensor, past_value: Tensor, past_conv: Tensor
) -> tuple[Tensor, ...]:
    """Run one loop on new tokens [B, S, C], ``loop`` from 0, int64 [1].

    Keys and values of the tokens before are [B, H, past, D], the convolution cache [B, sum(contexts), C]. Returns the
    next state, all keys and values, and the next convolution cache.
    """
    present: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Explicit instead of torch's SDPA, which is exported as copies of all keys, scaled and transposed, per token.
        keys, values = torch.cat((past_key, k), dim=2), torch.cat((past_value, v), dim=2)
        present[:] = keys, values
        scores = (q * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(past_key.shape[2])
        weights = scores.float().masked_fill(~visible, -torch.inf).softmax(-1)
        return weights.to(q.dtype) @ values

    encoding = model.loop_encodings.index_select(0, loop)
    state, present_conv = model.block_cached(state, encoding, attend, past_conv)
    return (state, *present, present_conv)


ADAPTER = CRTAdapter()
