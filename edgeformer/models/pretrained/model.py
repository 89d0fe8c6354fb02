"""Pretrained text encoders: transformers models mapped to common components, folding, and the form for export.

Shapes: B rows, S tokens, d width, V vocabulary.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.data.source_folder import quiet_transformers
from edgeformer.models.blocks.layers import MASKED, LayerNorm, explicit_attention, padding_mask, to_float32
from edgeformer.models.pretrained import FoldConfig, PretrainedConfig
from edgeformer.models.pretrained.relative import (
    BiasInputs,
    DisentangledInputs,
    LayerInputs,
    RotaryInputs,
    disentangled_scores,
)

_ENCODER_WEIGHT = re.compile(r"(^|\.)(embeddings|embeddings_project|encoder|transformer|layers?|final_norm)\.")
_HEAD_WEIGHT = re.compile(r"(classifier|pre_classifier|score|qa_outputs|head)\.")
_BUFFER = re.compile(r"\.(position_ids|token_type_ids|inv_freq)$")
EXPORT_ATTENTION = "edgeformer_written_out"
_DISENTANGLED_ATTENTION = "edgeformer_disentangled"
"""Names under which transformers finds our attention functions, besides its own ``sdpa`` and ``eager``."""
Weights = Mapping[str, Tensor]
"""Parameters of a layer by name."""


class Head(nn.Module):
    """States of a text → one vector: pooling, then a dense layer, scaling to length 1, and classes if there are any.

    ``pooling`` ``tokens``: each token has an answer. ``dense_dropout`` comes before ``dense``, ``dropout``
    before ``out``. Without ``pools_prompt``, the mask has the value 2 for tokens that are read and not pooled.
    """

    def __init__(
        self, pooling: str = "cls", dense: nn.Module | None = None,
        activation: Callable[[Tensor], Tensor] = torch.tanh, out: nn.Module | None = None, dropout: float = 0.0, *,
        dense_dropout: float = 0.0, norm: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pooling, self.normalize, self.activation = pooling, False, activation
        self.dimensions: int | None = None
        self.pools_prompt = True
        self.dense, self.norm = dense, norm
        self.dense_dropout, self.dropout = nn.Dropout(dense_dropout), nn.Dropout(dropout)
        self.out = out

    def forward(self, h: Tensor, attention_mask: Tensor | None) -> Tensor:
        """h [B, S, d], attention_mask int64 [B, S] or None (all real) → float32 [B, classes or d], or per token."""
        if attention_mask is not None and not self.pools_prompt:
            attention_mask = attention_mask * (2 - attention_mask)
        if self.pooling == "tokens":
            x = h
        elif self.pooling == "cls":
            x = h[:, 0]
        elif attention_mask is None:
            x = h.mean(1) if self.pooling == "mean" else h.amax(1)
        elif self.pooling == "max":
            x = h.masked_fill(attention_mask[:, :, None] == 0, MASKED).amax(1)
        else:  # summed in float32: the sum over a long text exceeds FP16
            real = attention_mask[:, :, None]
            x = ((h.float() * real).sum(1) / real.sum(1).clamp(min=1)).to(h.dtype)
        if self.dense is not None:
            x = self.activation(self.dense(self.dense_dropout(x)))
            x = x if self.norm is None else self.norm(x)
        if self.normalize:  # in float32: squares exceed FP16
            x = F.normalize(x.float(), dim=-1).to(x.dtype if self.out is not None else torch.float32)
        if self.out is not None:
            x = self.out(self.dropout(x))
        x = x.float()
        return x if self.dimensions is None else x[:, : self.dimensions]


@dataclass(frozen=True)
class Components:
    """Modules of an encoder, common to all architectures."""

    words: nn.Embedding  # [V, e]
    positions: nn.Embedding | None  # [P, e]; None: positions are relative ones alone
    has_padding_row: bool  # the first row of ``positions`` is that of a token that counts no position
    types: nn.Embedding | None
    norm: nn.Module  # of the embeddings
    dropout: float  # of the embeddings
    layers: list[nn.Module]  # each once
    order: tuple[int, ...]  # of their applications
    layer_inputs: LayerInputs  # the padding mask and relative positions as the layers read them
    project: nn.Module | None = None  # from the width of the embeddings to that of the layers
    final_norm: nn.Module | None = None
    head: Head | None = None


@quiet_transformers()
def load_components(
    folder: Path | None, architecture: Mapping[str, Any], classes: int | None, *, per_token: bool = False,
    **overrides: Any,
) -> tuple[Components, frozenset[str]]:  # fmt: skip
    """Load the components of the model in ``folder``; also return the names of missing weights, which are fresh.

    Only safetensors are read, and no code of the folder runs.

    Args:
        folder: None: all weights are fresh, from torch's global generator, and none counts as missing.
        architecture: content of config.json, some keys of which ``overrides`` replace.
        classes: of the classifier; None: no head.
        per_token: the classifier reads every token.

    Raises:
        MissingDependencyError: transformers is not installed.
        ArtifactError: transformers cannot build the configuration, or the weights are damaged or another encoder's.
    """
    import transformers
    from transformers import AttentionInterface
    from transformers.initialization import no_init_weights

    AttentionInterface.register(EXPORT_ATTENTION, _export_attention)
    AttentionInterface.register(_DISENTANGLED_ATTENTION, _disentangled_attention)

    # 1. Choose class and options
    options = {**architecture, **overrides}
    kind = options.pop("model_type")
    if classes is not None and len(options.get("id2label") or {}) != classes:
        options = {key: value for key, value in options.items() if key not in ("id2label", "label2id")}
        options["num_labels"] = classes
    head = "TokenClassification" if per_token else "SequenceClassification"
    auto_model: Any = getattr(transformers, "AutoModel" if classes is None else f"AutoModelFor{head}")

    # 2. Load the weights
    try:
        config = transformers.AutoConfig.for_model(kind, **options)
        attention = "eager" if LAYOUTS[kind].layer_parts else "sdpa"  # those layers are replaced
        if folder is None:
            # Memory is planned with tensors without values, of which torch cannot draw ModernBERT's truncated normal.
            has_values = not isinstance(torch.empty(0), FakeTensor)
            with nullcontext() if has_values else no_init_weights():
                model = auto_model.from_config(config, attn_implementation=attention)
            return map_components(model, per_token=per_token), frozenset()
        model, report = auto_model.from_pretrained(
            str(folder), config=config, attn_implementation=attention, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True, dtype=torch.float32,
        )  # fmt: skip

        # 3. Refuse weights that have no place
        mismatched = {str(key[0]) for key in report["mismatched_keys"]}
        unexpected = sorted({*report["unexpected_keys"], *mismatched})
        unused = [name for name in unexpected if _ENCODER_WEIGHT.search(name) and not _BUFFER.search(name)]
        if unused:
            raise ArtifactError(
                f"{folder}: has weights that an encoder of its config.json does not use: {', '.join(unused[:4])}; its "
                "architecture is not supported, or config.json belongs to another model"
            )
        heads = [name for name in unexpected if _HEAD_WEIGHT.match(name)]
        if heads and classes is None and not architecture.get("architectures"):  # else the model would lose its head
            raise ArtifactError(
                f"{folder}: has the weights {', '.join(heads[:4])} of a head, and config.json does not name its class; "
                'add the class, such as "architectures": ["BertForSequenceClassification"]'
            )
        return map_components(model, per_token=per_token), frozenset({*report["missing_keys"], *mismatched})
    except EdgeformerError:
        raise
    except Exception as error:  # invalid settings raise many types, even ZeroDivisionError
        lines = [line.strip() for line in str(error).strip().splitlines()[:2]] or [type(error).__name__]
        reason = f"it does not support {error}" if isinstance(error, KeyError) else " ".join(lines)
        raise ArtifactError(f"{folder or kind}: transformers cannot build the model: {reason}") from None


@dataclass(frozen=True)
class Layout:
    """Where transformers keeps the parts of an architecture, and its dropouts."""

    # Names of the encoder's modules, and module of BERT's layer → the same one here, for layers that become BERT's
    layers: str = "encoder.layer"
    words: str = "embeddings.word_embeddings"
    norm: str = "embeddings.LayerNorm"
    project: str = ""
    final_norm: str = ""
    layer_parts: Mapping[str, str] = field(default_factory=dict)
    # Names of modules of a sequence classifier
    dense: str = "classifier.dense"
    activation: str = "tanh"  # of ``dense``: a function, or the key of config.json that names it
    head_norm: str = ""
    out: str = "classifier.out_proj"
    # Keys of config.json; without a value, the head has the encoder's dropout
    dropout: str = "hidden_dropout_prob"
    dense_dropout: str = "classifier_dropout"
    out_dropout: str = "classifier_dropout"


LAYOUTS: Mapping[str, Layout] = {
    "bert": Layout(dense="bert.pooler.dense", out="classifier", dense_dropout=""),
    "roberta": Layout(),
    "xlm-roberta": Layout(),
    "electra": Layout(project="embeddings_project", activation="gelu"),
    "albert": Layout(
        layers="encoder.albert_layer_groups", project="encoder.embedding_hidden_mapping_in", dense="albert.pooler",
        out="classifier", dense_dropout="", out_dropout="classifier_dropout_prob",
    ),
    "distilbert": Layout(
        layers="transformer.layer", dense="pre_classifier", activation="relu", out="classifier", dropout="dropout",
        dense_dropout="", out_dropout="seq_classif_dropout",
    ),
    "modernbert": Layout(
        layers="layers", words="embeddings.tok_embeddings", norm="embeddings.norm", final_norm="final_norm",
        dense="head.dense", activation="classifier_activation", head_norm="head.norm", out="classifier",
        dropout="embedding_dropout", dense_dropout="",
    ),
    "mpnet": Layout(
        layer_parts={
            "attention.self.query": "attention.attn.q", "attention.self.key": "attention.attn.k",
            "attention.self.value": "attention.attn.v", "attention.output.dense": "attention.attn.o",
            "attention.output.LayerNorm": "attention.LayerNorm", "intermediate": "intermediate", "output": "output",
        },
        dense_dropout="hidden_dropout_prob", out_dropout="hidden_dropout_prob",
    ),
    "deberta-v2": Layout(
        layer_parts={
            "attention.self.query": "attention.self.query_proj", "attention.self.key": "attention.self.key_proj",
            "attention.self.value": "attention.self.value_proj", "attention.output": "attention.output",
            "intermediate": "intermediate", "output": "output",
        },
        dense="pooler.dense", activation="pooler_hidden_act", out="classifier", dense_dropout="pooler_dropout",
        out_dropout="cls_dropout",
    ),
}  # fmt: skip
"""``model_type`` → layout. MiniLM's is BERT's or RoBERTa's, multilingual E5's XLM-RoBERTa's, Ettin's ModernBERT's."""


def map_components(model: Any, *, per_token: bool = False) -> Components:
    """Map a transformers model to components; norms become float32 ones. It is a bare encoder or a classifier."""
    # 1. Replace the norms
    from transformers.activations import ACT2FN

    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.LayerNorm:  # the same weights, in float32 in an FP16 graph
                norm = LayerNorm(child.normalized_shape, eps=child.eps, bias=child.bias is not None)
                norm.weight, norm.bias = child.weight, child.bias
                setattr(module, name, norm)

    # 2. Find layers and positions
    config, encoder = model.config, model.base_model
    kind, depth, layout = config.model_type, config.num_hidden_layers, LAYOUTS[config.model_type]
    parts, head_parts = ({path: part for path, part in root.named_modules() if path} for root in (encoder, model))
    layers, order = list(parts[layout.layers]), tuple(range(depth))
    if kind == "albert":  # it shares its layers: one application of a group counts as a layer
        order = tuple(int(number / (depth / config.num_hidden_groups)) for number in range(depth))
    if layout.layer_parts:  # layers of BERT get the modules of layers that differ in names and in their scores only
        from transformers import BertConfig

        bert: Any = import_module("transformers.models.bert.modeling_bert")
        keys = ("hidden_size", "num_attention_heads", "intermediate_size", "hidden_act", "hidden_dropout_prob",
                "attention_probs_dropout_prob")  # fmt: skip
        for number, source in enumerate(layers):
            settings = BertConfig(**{key: getattr(config, key) for key in keys})
            settings._attn_implementation = "sdpa"
            with torch.device("meta"):
                layers[number] = bert_layer = bert.BertLayer(settings)
            if kind == "deberta-v2":  # its scores are sums of three
                settings._attn_implementation = _DISENTANGLED_ATTENTION
                bert_layer.attention.self.scaling *= 3**-0.5
            for path, part in layout.layer_parts.items():
                bert_layer.set_submodule(path, source.get_submodule(part))
    positions: Any = getattr(encoder.embeddings, "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    if padding is not None:  # the rows before it are unused
        positions = table_of(positions.weight[padding:])

    # 3. Map the head
    def dropout(key: str) -> float:
        value = getattr(config, key, None) if key else 0.0
        return float(getattr(config, layout.dropout) if value is None else value)

    head = None
    if model is not encoder:
        token_dropout = "classifier_dropout_prob" if kind == "albert" else "classifier_dropout"
        head = Head(
            "tokens" if per_token else getattr(config, "classifier_pooling", "cls"),
            head_parts.get(layout.dense),  # of token classifiers, only ModernBERT's has one
            ACT2FN[getattr(config, layout.activation, layout.activation)],
            model.classifier if per_token else head_parts[layout.out],
            dropout(token_dropout if per_token else layout.out_dropout),
            dense_dropout=0.0 if per_token else dropout(layout.dense_dropout),
            norm=head_parts.get(layout.head_norm),
        )

    # 4. Choose what the layers read besides the states
    longest = config.max_position_embeddings
    stack: Any = getattr(encoder, "encoder", None)
    distances = torch.arange(1 - longest, longest)  # query position minus key position
    layer_inputs = LayerInputs()
    if kind == "modernbert":
        layer_inputs = RotaryInputs(encoder.rotary_emb, config.layer_types, config.sliding_window)
    elif kind == "mpnet":
        layer_inputs = BiasInputs(stack.relative_attention_bias.weight, stack.relative_position_bucket(-distances))
    elif kind == "deberta-v2":
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        middle, last = stack.position_buckets // 2, stack.max_relative_positions - 1
        if middle > 0:
            distances = make_log_bucket_position(distances, stack.position_buckets, stack.max_relative_positions)
        layer_inputs = DisentangledInputs(
            stack.rel_embeddings.weight, stack.LayerNorm if "layer_norm" in stack.norm_rel_ebd else nn.Identity(),
            distances.long(), config.hidden_dropout_prob,
            is_reachable=middle <= 0 or last >= math.e * middle,  # the logarithm's slope is at most 1
        )  # fmt: skip

    # 5. Combine the parts
    return Components(
        words=parts[layout.words], positions=positions, has_padding_row=padding is not None,
        types=getattr(encoder.embeddings, "token_type_embeddings", None), norm=parts[layout.norm],
        dropout=dropout(layout.dropout), layers=layers, order=order, project=parts.get(layout.project),
        final_norm=parts.get(layout.final_norm), head=head, layer_inputs=layer_inputs,
    )  # fmt: skip


def table_of(weight: Tensor) -> nn.Embedding:
    """Return an embedding table with a copy of the rows [V, d]."""
    return nn.Embedding(len(weight), weight.shape[1], _weight=weight.detach().clone())


class Embeddings(nn.Module):
    """Sum of token, position and token-type vectors, normalised, and projected to the layers' width if needed.

    With ``config.pairs`` tokens have types: those of the input ``token_type_ids``, or in runs of earlier versions the
    second one after the first ``config.separator``. Otherwise the first type's vector is added to the position table in
    advance, or to the token table. Positions count tokens other than ``config.position_padding``, which has the first
    row of their table; None: they count all.
    """

    def __init__(self, components: Components, config: PretrainedConfig) -> None:
        super().__init__()
        self.words = table_of(components.words.weight)
        self.positions: nn.Parameter | None = None
        self.types: nn.Embedding | None = None
        if components.positions is not None:
            counts_all = config.position_padding is None
            rows = components.positions.weight.detach()[components.has_padding_row and counts_all :]
            self.positions = nn.Parameter(rows[: config.max_positions + (not counts_all)].clone())
        if components.types is not None:
            if config.reads_types or (config.pairs and config.separator is not None):
                self.types = table_of(components.types.weight)
            else:
                table = self.words.weight if self.positions is None else self.positions
                table.data += components.types.weight.detach()[0]
        self.norm, self.dropout = components.norm, nn.Dropout(components.dropout)
        self.project, self.separator = components.project, config.separator
        self.position_padding = config.position_padding

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """input_ids, token_type_ids (None: zeros) int64 [B, S] → [B, S, d]."""
        x = self.words(input_ids)
        if self.types is not None:
            if self.separator is not None:
                is_separator = torch.eq(input_ids, self.separator).long()
                token_type_ids = (is_separator.cumsum(1) - is_separator).clamp(max=len(self.types.weight) - 1)
            x = x + self.types(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        if self.positions is not None:
            if self.position_padding is None:
                x = x + self.positions[: input_ids.shape[1]]
            else:
                is_counted = torch.ne(input_ids, self.position_padding).long()
                x = x + F.embedding(is_counted.cumsum(1) * is_counted, self.positions)
        x = self.dropout(self.norm(x))
        return x if self.project is None else self.project(x)


class PretrainedEncoder(nn.Module):
    """embeddings → stages of layers → readout. Each stage can be followed by an exit.

    A stage is one iteration of a folded model, else one layer. Without ``trained`` weights, a fold skips slow
    computations on them.

    Shapes: input_ids, attention_mask and token_type_ids int64 [B, S] → float32 [B, classes], [B, S, classes] of a token
    classifier, or [B, d] of an embedding. A model without token types ignores token_type_ids.
    """

    inputs = ("input_ids",)

    def __init__(self, components: Components, config: PretrainedConfig, *, trained: bool) -> None:
        super().__init__()
        fold = config.fold
        self.optional = ("attention_mask", *((TOKEN_TYPES,) if config.reads_types else ()))
        self.embeddings = Embeddings(components, config)
        self.head = components.head if components.head is not None else Head()
        if config.pooling is not None:  # the dense layer was trained for the source's pooling
            self.head.pooling = config.pooling
            self.head.dense = self.head.norm = None
        self.head.normalize, self.head.dimensions = config.normalize, config.dimensions
        self.layer_inputs = components.layer_inputs
        self.application = Application()
        self.layers_per_stage = fold.layers if fold is not None else 1
        if fold is not None:
            components = fold_components(components, fold, self.application, trained=trained)
        self.layers = nn.ModuleList(components.layers)
        self.final_norm = components.final_norm if components.final_norm is not None else nn.Identity()
        self.order = components.order
        self.max_positions = config.max_positions
        self.stages = len(self.order) // self.layers_per_stage
        self.exits = range(1, self.stages + 1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, *,
        states: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Return the answer, and with ``states`` the state [B, S, d] after every stage."""
        h, all_states = self.embeddings(input_ids, token_type_ids), []
        for stage in range(self.stages):
            h = self.advance(h, attention_mask, stage)
            all_states.append(h)
        answer = self.readout(h, attention_mask)
        return (answer, all_states) if states else answer

    def every_exit(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the answers after every stage through the only head, then the states, float32 [B, S, d].

        Only the last exit is trained.
        """
        _, states = self(input_ids, attention_mask, token_type_ids, states=True)
        return (*(self.readout(state, attention_mask) for state in states), *(state.float() for state in states))

    def advance(self, h: Tensor, attention_mask: Tensor | None, stage: int | Tensor = 0) -> Tensor:
        """Apply one stage of layers, from 0, or int64 [1] in the graph that a host loops: [B, S, d] → [B, S, d]."""
        if attention_mask is not None and not self.head.pools_prompt:
            attention_mask = attention_mask.clamp(max=1)
        padding = padding_mask(h, attention_mask)  # [B, 1, 1, S]
        first = 0 if isinstance(stage, Tensor) else stage * self.layers_per_stage
        for index in range(first, first + self.layers_per_stage):
            layer = self.order[index]
            # How often the layer was applied before.
            self.application.number = stage if isinstance(stage, Tensor) else self.order[:index].count(layer)
            h = self.layers[layer](h, **self.layer_inputs(h, padding, layer))
        return h

    def readout(self, h: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """h [B, S, d] → float32 [B, classes or d]."""
        return self.head(self.final_norm(h), attention_mask)


class Application:
    """Number of the current application of the shared layers: from 0, or int64 [1] as an input of a loop graph."""

    number: int | Tensor = 0

    def select(self, stacked: Tensor) -> Tensor:
        """[applications, …] → […] of the current application."""
        if isinstance(self.number, Tensor):
            return stacked.index_select(0, self.number)[0]
        return stacked[self.number]


def fold_components(components: Components, fold: FoldConfig, application: Application, *, trained: bool) -> Components:
    """Keep ``fold.layers`` layers, in place, which all iterations share (paper A's recurrence on pretrained weights).

    If there are as many applications as layers in the source, an application's own parameters (``fold.own``) are
    computed from the layer that it replaces: that layer's biases and norms, or a low-rank approximation of the
    difference to the shared matrix, which weights that are not ``trained`` skip. Otherwise all start with the same.
    """
    source: list[Weights] = [dict(layer.named_parameters()) for layer in components.layers]
    count, applied = len(source), range(fold.layers * fold.iterations)
    order = tuple(n % fold.layers if fold.order == "cycle" else n // fold.iterations for n in applied)
    kept = [components.layers[number * count // fold.layers] for number in range(fold.layers)]
    applications = [[index for index, used in enumerate(order) if used == number] for number in range(fold.layers)]
    if fold.init == "average":
        for layer, indices in zip(kept, applications, strict=True):
            averaged = [source[index * count // len(order)] for index in indices]
            for name in averaged[0]:
                owner, _, attribute = name.rpartition(".")
                mean = torch.stack([weights[name].detach() for weights in averaged]).mean(0)
                setattr(layer.get_submodule(owner), attribute, nn.Parameter(mean))
    for layer, indices in zip(kept, applications, strict=True):
        replaced: list[Weights] = [dict(layer.named_parameters())] * len(indices)
        if trained and len(order) == count:
            replaced = [source[index] for index in indices]
        for path, module in list(layer.named_modules()):
            parent, _, name = path.rpartition(".")
            keys = [key for key, _ in module.named_parameters(recurse=False)]
            weights = [{key: layer_weights[f"{path}.{key}"] for key in keys} for layer_weights in replaced]
            replacement: nn.Module
            if isinstance(module, nn.Linear) and fold.own == "norms":
                replacement = OwnBias(module, weights, application)
            elif isinstance(module, nn.Linear) and fold.own == "adapters":
                replacement = AdaptedLinear(module, weights, fold.rank, application)
            elif isinstance(module, LayerNorm) and fold.own == "norms":
                replacement = OwnNorm(module, weights, application)
            else:
                continue
            setattr(layer.get_submodule(parent), name, replacement)
    return replace(components, layers=kept, order=order)


class OwnBias(nn.Module):
    """y = W x + b_t: a shared matrix W [out, in] and a bias for every application t, [applications, out]."""

    own_parts = ("bias",)
    adds_bias = False  # True: in an operator of its own

    def __init__(self, shared: nn.Linear, replaced: Sequence[Weights], application: Application) -> None:
        super().__init__()
        self.weight, self.application = shared.weight, application
        self.bias = nn.Parameter(torch.stack([weights["bias"].detach() for weights in replaced]))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.application.select(self.bias)
        return F.linear(x, self.weight) + bias if self.adds_bias else F.linear(x, self.weight, bias)


class OwnNorm(nn.Module):
    """Layer normalisation in float32 with weight and bias for every application, [applications, size]."""

    keeps_float32 = True
    own_parts = ("weight", "bias")

    def __init__(self, shared: LayerNorm, replaced: Sequence[Weights], application: Application) -> None:
        super().__init__()
        self.shape, self.eps, self.application = shared.normalized_shape, shared.eps, application
        self.weight = nn.Parameter(torch.stack([weights["weight"].detach() for weights in replaced]))
        self.bias = nn.Parameter(torch.stack([weights["bias"].detach() for weights in replaced]))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.application.select(self.weight), self.application.select(self.bias)
        return F.layer_norm(to_float32(x), self.shape, weight, bias, self.eps).to(x.dtype)


class AdaptedLinear(nn.Module):
    """y = W x + b + U_t (D_t x): shared W and b, and a low-rank matrix for every application t.

    U_t D_t starts as the closest one to the difference of a replaced layer's matrix from W. For W itself, U_t is zero
    and D_t random, so that both can be trained. D [applications, rank, in], U [applications, out, rank].
    """

    own_parts = ("down", "up")

    @torch.no_grad()
    def __init__(self, shared: nn.Linear, replaced: Sequence[Weights], rank: int, application: Application) -> None:
        super().__init__()
        self.weight, self.bias, self.application = shared.weight, shared.bias, application
        rows, columns = shared.weight.shape
        rank = min(rank, rows, columns)
        downs, ups = [], []
        for target in (weights["weight"] for weights in replaced):
            if target is shared.weight:
                downs.append(torch.randn(rank, columns) * columns**-0.5)
                ups.append(torch.zeros(rows, rank))
            else:
                u, s, v = torch.linalg.svd(target - shared.weight, full_matrices=False)
                root = s[:rank].sqrt()
                downs.append(root[:, None] * v[:rank])
                ups.append(u[:, :rank] * root)
        self.down, self.up = nn.Parameter(torch.stack(downs)), nn.Parameter(torch.stack(ups))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.application.select(self.down))
        return F.linear(x, self.weight, self.bias) + F.linear(low, self.application.select(self.up))


def _disentangled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float, distances: tuple[Tensor, Tensor], **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key, value [B, H, S, D] → [B, S, H, D], and no attention weights."""
    mask = disentangled_scores(module, query, key, distances, attention_mask, scaling)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return result.transpose(1, 2), None


def _export_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, distances: tuple[Tensor, Tensor] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key, value [B, H, S, D] → [B, S, H, D], and no attention weights."""
    if distances is not None and scaling is not None:
        attention_mask = disentangled_scores(module, query, key, distances, attention_mask, scaling)
    return explicit_attention(query, key, value, attention_mask, scaling).transpose(1, 2), None
