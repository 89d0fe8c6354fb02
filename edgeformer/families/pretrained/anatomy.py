"""Hugging Face's models taken apart: each architecture as the same few parts, its layers as transformers has them.

What is taken: embeddings, layers, the norm behind them, and the head of a sequence classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.norms import LayerNorm
from edgeformer.families.pretrained.described import refuse_unused
from edgeformer.formats.errors import ArtifactError, EdgeformerError, needs_extra

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadParts:
    """Of a classifier, in the order in which they are applied to the pooled state.

    Attributes:
        pooling: ``cls`` or ``mean``.
        drop_first: dropout comes before ``dense`` too.
    """

    pooling: str
    dense: nn.Linear | None
    activation: Activation
    out: nn.Linear
    dropout: float
    drop_first: bool = False
    norm: nn.Module | None = None


@dataclass(frozen=True)
class Parts:
    """What a model is made of.

    Attributes:
        words: token table [V, e].
        positions: position table [P, e], without rows of padding; None: positions are told to the layers.
        types: table of token types; None: there is one type, or none.
        norm, dropout: of the embeddings.
        project: from the embeddings' width to the layers'.
        layers: each once.
        order: which layer each application is.
        final_norm: behind the last layer.
        head: None where only embeddings are asked for.
        rotary: makes angles of positions, for layers that are told them; with ``kinds`` of each layer and ``window``,
            how far layers of the kind ``sliding_attention`` see to either side.
    """

    words: nn.Embedding
    positions: nn.Embedding | None
    types: nn.Embedding | None
    norm: nn.Module
    dropout: float
    layers: list[nn.Module]
    order: tuple[int, ...]
    project: nn.Module | None = None
    final_norm: nn.Module | None = None
    head: HeadParts | None = None
    rotary: nn.Module | None = None
    kinds: tuple[str, ...] = ()
    window: int = 0


def fresh(architecture: Mapping[str, Any], classes: int | None, **changed: Any) -> Parts:
    """The parts of a model with fresh weights, from torch's global generator.

    Args:
        architecture: a config.json.
        classes: of the classifier; None: without a head.
        changed: keys of the configuration that are other than there.

    Raises:
        MissingDependencyError: transformers is not installed.
        ArtifactError: a configuration that transformers cannot build.
    """
    config = _config(architecture, classes, changed)
    with _quiet(), _explained(str(architecture.get("model_type"))):
        return take_apart(_auto(classes).from_config(config, attn_implementation="sdpa"))


def pretrained(
    folder: Path, architecture: Mapping[str, Any], classes: int | None, **changed: Any
) -> tuple[Parts, frozenset[str]]:
    """The parts of the model in ``folder`` with its weights, and names of weights that it lacks, which are fresh.

    Safetensors only; no code of the folder is run. Arguments and errors are those of :func:`fresh`; ArtifactError for
    damaged weights too.
    """
    config = _config(architecture, classes, changed)
    with _quiet(), _explained(str(folder)):
        model, told = _auto(classes).from_pretrained(
            str(folder), config=config, attn_implementation="sdpa", use_safetensors=True, local_files_only=True,
            trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32,
        )  # fmt: skip
        refuse_unused(folder, told["unexpected_keys"])
        lacking = {*told["missing_keys"], *(str(key[0]) for key in told["mismatched_keys"])}
        return take_apart(model), frozenset(lacking)


def _auto(classes: int | None) -> Any:
    with needs_extra("hf", "a pretrained encoder"):
        from transformers import AutoModel, AutoModelForSequenceClassification
    return AutoModel if classes is None else AutoModelForSequenceClassification


def _config(architecture: Mapping[str, Any], classes: int | None, changed: Mapping[str, Any]) -> Any:
    with needs_extra("hf", "a pretrained encoder"):
        from transformers import AutoConfig
    told = {**architecture, **changed}
    told.pop("model_type")
    if classes is not None and len(told.get("id2label") or {}) != classes:
        told = {key: value for key, value in told.items() if key not in ("id2label", "label2id")}
        told["num_labels"] = classes
    with _explained("config.json"):
        return AutoConfig.for_model(architecture["model_type"], **told)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports fresh heads at length, and shows bars; what is fresh is told by us."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except EdgeformerError:
        raise
    except Exception as error:  # each setting that cannot be ends in a kind of its own, ZeroDivisionError among them
        lines = [line.strip() for line in str(error).strip().splitlines()[:2]] or [type(error).__name__]
        said = f"it knows no {error}" if isinstance(error, KeyError) else " ".join(lines)
        raise ArtifactError(f"{what}: transformers cannot make a model of it: {said}") from None


def take_apart(model: Any) -> Parts:
    """The parts of a transformers model (a bare encoder, or one with the head of a sequence classifier)."""
    config, base = model.config, model.base_model
    parts = _TAKEN[config.model_type](config, base, model if model is not base else None)
    for module in [parts.norm, parts.final_norm, *parts.layers]:
        if module is not None:
            _exact_norms(module)
    return parts


def _exact_norms(module: nn.Module) -> None:
    """Norms that stay in float32 in an FP16 graph; the weights are the same tensors."""
    for name, child in module.named_children():
        if type(child) is nn.LayerNorm:
            setattr(module, name, exact_norm(child))
        else:
            _exact_norms(child)


def exact_norm(norm: nn.LayerNorm) -> LayerNorm:
    """A norm that stays in float32, with the weights of ``norm``."""
    made = LayerNorm(norm.normalized_shape, eps=norm.eps, bias=norm.bias is not None)
    made.weight, made.bias = norm.weight, norm.bias
    return made


def _bert(config: Any, base: Any, whole: Any) -> Parts:
    """BERT, RoBERTa, ELECTRA: the same embeddings and layers, three heads."""
    table, first = base.embeddings.position_embeddings, 0
    if config.model_type == "roberta":
        first = config.pad_token_id + 1
    types = base.embeddings.token_type_embeddings
    head = None
    if whole is not None:
        drop = _first(getattr(config, "classifier_dropout", None), config.hidden_dropout_prob)
        if config.model_type == "bert":
            head = HeadParts("cls", base.pooler.dense, torch.tanh, whole.classifier, drop)
        else:
            made, activation = whole.classifier, torch.tanh if config.model_type == "roberta" else F.gelu
            head = HeadParts("cls", made.dense, activation, made.out_proj, drop, drop_first=True)
    return Parts(
        words=base.embeddings.word_embeddings,
        positions=_rows(table, first),
        types=types,
        norm=exact_norm(base.embeddings.LayerNorm),
        dropout=config.hidden_dropout_prob,
        layers=list(base.encoder.layer),
        order=tuple(range(config.num_hidden_layers)),
        project=getattr(base, "embeddings_project", None),
        head=head,
    )


def _distilbert(config: Any, base: Any, whole: Any) -> Parts:
    head = None
    if whole is not None:
        head = HeadParts("cls", whole.pre_classifier, F.relu, whole.classifier, config.seq_classif_dropout)
    return Parts(
        words=base.embeddings.word_embeddings,
        positions=base.embeddings.position_embeddings,
        types=None,
        norm=exact_norm(base.embeddings.LayerNorm),
        dropout=config.dropout,
        layers=list(base.transformer.layer),
        order=tuple(range(config.n_layers)),
        head=head,
    )


def _albert(config: Any, base: Any, whole: Any) -> Parts:
    """ALBERT shares its layers: an application of a group is what other models call a layer."""
    head = None
    if whole is not None:
        head = HeadParts("cls", base.pooler, torch.tanh, whole.classifier, config.classifier_dropout_prob)
    groups = config.num_hidden_layers / config.num_hidden_groups
    return Parts(
        words=base.embeddings.word_embeddings,
        positions=base.embeddings.position_embeddings,
        types=base.embeddings.token_type_embeddings,
        norm=exact_norm(base.embeddings.LayerNorm),
        dropout=config.hidden_dropout_prob,
        layers=list(base.encoder.albert_layer_groups),
        order=tuple(int(number / groups) for number in range(config.num_hidden_layers)),
        project=base.encoder.embedding_hidden_mapping_in,
        head=head,
    )


def _modernbert(config: Any, base: Any, whole: Any) -> Parts:
    head = None
    if whole is not None:
        made = whole.head
        head = HeadParts(
            config.classifier_pooling, made.dense, made.act, whole.classifier, config.classifier_dropout,
            norm=exact_norm(made.norm),
        )  # fmt: skip
    return Parts(
        words=base.embeddings.tok_embeddings,
        positions=None,
        types=None,
        norm=exact_norm(base.embeddings.norm),
        dropout=config.embedding_dropout,
        layers=list(base.layers),
        order=tuple(range(config.num_hidden_layers)),
        final_norm=exact_norm(base.final_norm),
        head=head,
        rotary=base.rotary_emb,
        kinds=tuple(config.layer_types),
        window=config.sliding_window,
    )


_TAKEN: dict[str, Callable[[Any, Any, Any], Parts]] = {
    "albert": _albert,
    "bert": _bert,
    "distilbert": _distilbert,
    "electra": _bert,
    "modernbert": _modernbert,
    "roberta": _bert,
}


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


def _rows(table: nn.Embedding, first: int) -> nn.Embedding:
    """The rows from ``first`` on."""
    if not first:
        return table
    made = nn.Embedding(table.num_embeddings - first, table.embedding_dim, device="meta")
    made.weight = nn.Parameter(table.weight.detach()[first:].clone())
    return made
