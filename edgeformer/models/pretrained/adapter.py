"""The torch half of pretrained encoders: built from the source's configuration, started from its weights, exported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import ArtifactError, InputError, RecipeError
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.models import read_recipe_of
from edgeformer.models.adapter import Learning, Loss, ModelAdapter, Place, sharing_copy
from edgeformer.models.distillation import classification_loss
from edgeformer.models.pretrained import MODEL, PretrainedConfig
from edgeformer.models.pretrained.fold import folded
from edgeformer.models.pretrained.model import (
    Embeddings,
    Head,
    Looped,
    Parts,
    PretrainedEncoder,
    Turn,
    exported_form,
    fresh,
    pretrained,
    table_of,
)
from edgeformer.models.pretrained.source import open_source, width_of
from edgeformer.models.tracing import Graphs, GraphSpec, Piece, export_graph, state_name, text_spec
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS, load_weights
from edgeformer.tasks import Prepared
from edgeformer.tasks.early_exit import exit_logits

# Of the examples; a size of 0 or 1 would become a constant of the graph.
_BATCH, _NEW = 2, 3
_STATE = {0: "batch", 1: "sequence"}
_HIDDEN = ("hidden_dropout_prob", "dropout", "embedding_dropout", "mlp_dropout")
_ATTENTION = ("attention_probs_dropout_prob", "attention_dropout")
_FREE = {
    *_HIDDEN, *_ATTENTION, "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "architectures",
    "id2label", "label2id", "num_labels", "problem_type", "initializer_range", "use_cache",
}  # fmt: skip
"""What a recipe's ``architecture`` may have otherwise than its source: nothing that the source's weights depend on."""


class PretrainedExits(nn.Module):
    """The encoder with an exit after every stage, through the one head it has. Only the last exit was trained."""

    def __init__(self, model: PretrainedEncoder) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.stages + 1))
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """input_ids, attention_mask int64 [B, S] → answers per exit, then the states [B, S, d] of every stage."""
        h, answers, states = self.model.embed(input_ids), [], []
        for stage in range(self.model.stages):
            h = self.model.advance(h, attention_mask, stage)
            answers.append(self.model.readout(h, attention_mask))
            states.append(h.float())
        return (*answers, *states)


class PretrainedAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[PretrainedEncoder, AttentionUse]:
        """Its attention is always torch's SDPA."""
        config: PretrainedConfig = recipe.model
        rows = {"vocab_size": config.vocab_size} | _dropouts(config)
        parts = fresh(config.architecture, _classes(recipe), **rows)
        return _assemble(parts, config, trained=False), AttentionUse(requested="sdpa", used="sdpa")

    def pinned(self, recipe: Any) -> Any:
        """With the checksum of its source's weights. Raises InputError, ArtifactError: there is no such source."""
        if recipe.model.weights_sha256 is not None:
            return recipe
        found = open_source(recipe.model.source).weights_sha256()
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights_sha256": found})})

    def start(self, model: PretrainedEncoder, recipe: Any) -> tuple[str, ...]:
        """Loads the weights of the recipe's source. Raises InputError, ArtifactError."""
        config: PretrainedConfig = recipe.model
        source = open_source(config.source)
        if config.weights_sha256 is not None and source.weights_sha256() != config.weights_sha256:
            raise ArtifactError(
                f"{source.folder}: the weights are not those that the recipe was made for (model.weights_sha256); "
                "take that key out to use them all the same"
            )
        odd = sorted(
            key
            for key, value in config.architecture.items()
            if key not in _FREE and key in source.config and source.config[key] != value
        )
        if odd:
            raise ArtifactError(
                f"{source.folder}: is not the model that model.architecture describes ({', '.join(odd[:4])}); take "
                "that key out of the recipe, and it is read from there"
            )
        if recipe.tokenizer.kind == "trained":
            raise InputError(
                "tokenizer.kind: trained: the token vectors of a pretrained model belong to its own tokenizer; take "
                "tokenizer out of the recipe, and that one is used"
            )
        parts, lacking = pretrained(source.folder, source.config, _classes(recipe), **_dropouts(config))
        weight = parts.words.weight.detach()
        if len(weight) < config.vocab_size:
            raise ArtifactError(f"{source.folder}: has {len(weight)} token vectors, its tokenizer {config.vocab_size}")
        # Tables are often padded to a round number of rows, which no token has.
        parts.words.weight = nn.Parameter(weight[: config.vocab_size].clone())
        taught = _of_teacher(parts, recipe) if config.fold is not None and config.fold.weights == "teacher" else None
        model.load_state_dict(_assemble(parts, config, trained=True).state_dict() | (taught or {}))
        if taught is not None:
            return ()
        if parts.head is None or config.pooling is not None:  # what it has of a head is not used
            lacking = frozenset(name for name in lacking if "pooler" not in name)
        return tuple(sorted(lacking))

    def state_shape(self, recipe: Any) -> tuple[int, int]:
        return MODEL.loops(recipe.model), width_of(recipe.model.architecture)

    def loss(self, model: PretrainedEncoder, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy, or distillation from a teacher."""
        return classification_loss(recipe, prepared)

    def scorer(self, model: PretrainedEncoder) -> nn.Module:
        """The model itself."""
        return model

    def exits(self, model: PretrainedEncoder) -> PretrainedExits:
        return PretrainedExits(model)

    def needed(self, model: PretrainedEncoder) -> dict[int, int]:
        found = {}
        for exit_ in range(1, model.stages + 1):
            applied = exit_ * model.stage
            total = _elements(model.embeddings) + _elements(model.head) + _elements(model.final_norm)
            uses = [model.order[:applied].count(number) for number in range(len(model.layers))]
            found[exit_] = total + sum(map(_needed_of, model.layers, uses))
        return found

    def trace(self, model: PretrainedEncoder, inputs: Sequence[str], *, steps: bool) -> Graphs:
        model = exported_form(model)
        exits = PretrainedExits(model)
        full = text_spec(exits, inputs, model.longest, exits.outputs)
        parts = _step_specs(model) if steps and model.loops_one_graph else {}
        return Graphs(export_graph(full), {part: export_graph(spec) for part, spec in parts.items()}, row_scales=True)

    def trim(self, model: PretrainedEncoder, kept: Tensor) -> PretrainedEncoder:
        """All other parameters are the same tensors, not copies."""
        trimmed = sharing_copy(model)
        table = model.embeddings.words.weight.detach()[kept]
        trimmed.embeddings.words = table_of(table)
        separator = model.embeddings.separator
        if separator is not None:
            places = (kept == separator).nonzero()
            if not len(places):
                raise InputError(f"--vocab-trim: model.separator {separator} is no special token, and was trimmed away")
            trimmed.embeddings.separator = int(places)
        return trimmed.train(model.training)

    def as_on_cuda(self, model: PretrainedEncoder) -> None:
        """With dropout, the CPU's attention holds all its weights [B, H, S, S]; CUDA's fused kernels never do."""
        module: Any
        for module in model.layers.modules():
            if "Attention" in type(module).__name__:
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
                if isinstance(getattr(module, "dropout", None), nn.Dropout):
                    module.dropout.p = 0.0

    def learning(self, model: PretrainedEncoder, training: TrainingConfig) -> Iterator[Learning]:
        """``training.layer_decay``: a layer learns that much less than the one behind it, embeddings least."""
        decay = float(getattr(training, "layer_decay", 1.0))
        last = len(model.order)
        rates = {"embeddings": decay ** (last + 1)}
        for number in range(len(model.layers)):
            # A shared layer learns as its last application does.
            place = max(place for place, which in enumerate(model.order) if which == number)
            rates[f"layers.{number}"] = decay ** (last - place)
        for name, parameter in model.named_parameters():
            start = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
            yield Learning(parameter, rates.get(start, 1.0), decays=parameter.ndim - _own(name, model) >= 2)


def _classes(recipe: Any) -> int | None:
    """Classes of the head; None: the task wants none."""
    return getattr(recipe, "classes", None)


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    known = config.architecture
    told = {name: config.dropout for name in _HIDDEN if name in known and config.dropout is not None}
    attention = config.attention_dropout
    return told | {name: attention for name in _ATTENTION if name in known and attention is not None}


def _assemble(parts: Parts, config: PretrainedConfig, *, trained: bool) -> PretrainedEncoder:
    fold, turn = config.fold, Turn()
    embeddings = Embeddings(parts, pairs=config.pairs, separator=config.separator, longest=config.max_positions)
    pooling, own = config.pooling, parts.head
    if own is not None and pooling is not None:  # the source's dense layer was made for its own pooling
        own = replace(own, dense=None, norm=None, drop_first=False)
    head = Head(pooling or (own.pooling if own is not None else "cls"), own, normalize=config.normalize)
    if fold is None:
        return PretrainedEncoder(parts, head, embeddings, longest=config.max_positions)
    parts = folded(parts, fold, turn, trained=trained)
    looped = Looped(fold.layers, fold.turns(), turn)
    return PretrainedEncoder(parts, head, embeddings, longest=config.max_positions, looped=looped)


def _of_teacher(parts: Parts, recipe: Any) -> dict[str, Tensor]:
    """Give the parts the layers of the recipe's teacher, and return its weights around them.

    Raises:
        RecipeError, ArtifactError: the teacher is no fine-tuned model of the same source.
    """
    folder, config = Path(recipe.training.teacher), recipe.model
    own: Any = read_recipe_of(folder)
    alike = own.model.kind == config.kind and own.model.fold is None and own.model.pooling == config.pooling
    if not alike or (config.weights_sha256 is not None and own.model.weights_sha256 != config.weights_sha256):
        raise RecipeError(
            f"model.fold.weights: {folder} is not this source as it is, read with pooling {config.pooling}; name a "
            "teacher that is, or take the layers of the source (weights: source)"
        )
    whole = _assemble(parts, config.model_copy(update={"fold": None}), trained=True)
    load_weights(whole, folder / MODEL_FOLDER / WEIGHTS)  # into the parts, whose layers it shares
    return {name: tensor for name, tensor in whole.state_dict().items() if not name.startswith("layers.")}


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _own(parameter_name: str, module: nn.Module) -> bool:
    """Whether a parameter of ``module`` holds a part for every application."""
    owner, _, name = parameter_name.rpartition(".")
    return name in getattr(module.get_submodule(owner), "own_parts", ())


def _needed_of(layer: nn.Module, uses: int) -> int:
    """Elements of a layer that is applied ``uses`` times."""
    if not uses:
        return 0
    return sum(
        parameter.numel() * uses // len(parameter) if _own(name, layer) else parameter.numel()
        for name, parameter in layer.named_parameters()
    )


def _step_specs(model: PretrainedEncoder) -> dict[str, GraphSpec]:
    """Part → spec: ``embed``, ``loop``, ``readout``; the loop graph is told its number where that matters."""
    longest = {"sequence": model.longest}
    states = torch.zeros(_BATCH, _NEW, _width(model), dtype=model.embeddings.words.weight.dtype)
    mask = torch.ones(_BATCH, _NEW, dtype=torch.int64)
    mask[1, 1:] = 0
    inputs, axes = {"state": states, "attention_mask": mask}, {"state": _STATE, "attention_mask": _STATE}
    told = {"loop": torch.zeros(1, dtype=torch.int64)} if any(hasattr(m, "own_parts") for m in model.modules()) else {}

    def loop(state: Tensor, attention_mask: Tensor, number: Tensor | int = 0) -> Tensor:
        return model.advance(state, attention_mask, number)

    pooled = model.head.pooling != "cls"
    read = inputs if pooled else {"state": states}
    return {
        "embed": text_spec(Piece(model, model.embed), ("input_ids",), model.longest, ("state",)),
        "loop": GraphSpec(Piece(model, loop), inputs | told, axes, ("next_state",), longest),
        "readout": GraphSpec(Piece(model, model.readout), read, dict.fromkeys(read, _STATE), longest=longest),
    }


def _width(model: PretrainedEncoder) -> int:
    """Of the states."""
    project = model.embeddings.project
    return project.out_features if isinstance(project, nn.Linear) else model.embeddings.words.embedding_dim


ADAPTER = PretrainedAdapter()
