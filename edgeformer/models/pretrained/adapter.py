"""The torch half of pretrained encoders: built from the source's configuration, started from its weights, exported."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import ArtifactError, InputError, RecipeError
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.artifacts.workspace import MODEL_FOLDER
from edgeformer.models import read_run_recipe
from edgeformer.models.adapter import ModelAdapter, ParameterSettings, count_parameters, sharing_copy
from edgeformer.models.blocks.tracing import BATCH, TOKENS, Exits, Graphs, GraphSpec, Piece, export_graph, text_spec
from edgeformer.models.pretrained import PretrainedConfig
from edgeformer.models.pretrained.model import EXPORT_ATTENTION, OwnBias, PretrainedEncoder, load_components, table_of
from edgeformer.models.pretrained.source import open_source, weights_sha256
from edgeformer.models.weights import WEIGHTS, load_weights

_HIDDEN_DROPOUTS = ("hidden_dropout_prob", "dropout", "embedding_dropout", "mlp_dropout")
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
_FREE_KEYS = {
    *_HIDDEN_DROPOUTS, *_ATTENTION_DROPOUTS, "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout",
    "cls_dropout", "pooler_dropout", "architectures", "id2label", "label2id", "num_labels", "problem_type",
    "initializer_range", "use_cache",
}  # fmt: skip
"""Keys of ``model.architecture`` that may differ from the source: its weights do not depend on them."""


class PretrainedAdapter(ModelAdapter):
    def build(self, recipe: Any) -> PretrainedEncoder:
        config: PretrainedConfig = recipe.model
        overrides = {"vocab_size": config.vocab_size} | _dropouts(config)
        components, _ = load_components(
            None, config.architecture, recipe.classes, per_token=recipe.per_token, **overrides
        )
        model = PretrainedEncoder(components, config, trained=False)
        model.head.pools_prompt = getattr(recipe.data, "pools_prompt", True)
        return model

    def pinned(self, recipe: Any) -> Any:
        """Add the checksum of the source's weights. Raises InputError or ArtifactError if the source is unusable."""
        if recipe.model.weights_sha256 is not None:
            return recipe
        checksum = weights_sha256(open_source(recipe.model.source).folder)
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights_sha256": checksum})})

    def start(self, model: PretrainedEncoder, recipe: Any) -> tuple[str, ...]:
        """Load the source's weights, or the teacher's for ``model.fold.weights: teacher``."""
        # 1. Compare the source with the recipe
        config: PretrainedConfig = recipe.model
        source = open_source(config.source)
        if config.weights_sha256 is not None and weights_sha256(source.folder) != config.weights_sha256:
            raise ArtifactError(
                f"{source.folder}: the weights changed since the recipe was made (model.weights_sha256); remove that "
                "key to use them anyway"
            )
        different = sorted(
            key
            for key, value in config.architecture.items()
            if key not in _FREE_KEYS and key in source.config and source.config[key] != value
        )
        if different:
            raise ArtifactError(
                f"{source.folder}: differs from model.architecture in {', '.join(different[:4])}; remove that key "
                "from the recipe to read it from the source"
            )
        if recipe.tokenizer.kind == "trained":
            raise InputError(
                "tokenizer.kind: trained is not possible with pretrained token vectors, which belong to their own "
                "tokenizer; remove tokenizer from the recipe"
            )

        # 2. Load the source's weights
        components, missing = load_components(
            source.folder, source.config, recipe.classes, per_token=recipe.per_token, **_dropouts(config)
        )
        table = components.words.weight.detach()
        if len(table) < config.vocab_size:
            further = [source.tokenizer.id_to_token(number) for number in range(len(table), config.vocab_size)]
            raise ArtifactError(
                f"{source.folder}: has {len(table)} token vectors, but its tokenizer has {config.vocab_size} tokens: "
                f"{', '.join(map(repr, further[:4]))} has none; load the model with transformers, call "
                "resize_token_embeddings(len(tokenizer)), and save it again, or correct the special tokens in "
                "tokenizer_config.json"
            )
        # Tables are often padded to a round number of rows, which no token uses.
        components.words.weight = nn.Parameter(table[: config.vocab_size].clone())

        # 3. Replace them by the teacher's
        has_classifier = components.head is not None
        uses_teacher = config.fold is not None and config.fold.weights == "teacher"
        teacher_weights: dict[str, Tensor] = {}
        if uses_teacher:
            folder = Path(recipe.training.teacher)
            teacher: Any = read_run_recipe(folder).model
            keys = ("pooling", "position_padding", "normalize")
            is_same = teacher.kind == config.kind and teacher.fold is None
            is_same = is_same and all(getattr(teacher, key) == getattr(config, key) for key in keys)
            if not is_same or (config.weights_sha256 is not None and teacher.weights_sha256 != config.weights_sha256):
                raise RecipeError(
                    f"model.fold.weights: {folder} was not trained from this source without changes and with pooling "
                    f"{config.pooling}, normalize {str(config.normalize).lower()}; use such a teacher, or "
                    "fold.weights: source"
                )
            unfolded = PretrainedEncoder(components, config.model_copy(update={"fold": None}), trained=True)
            load_weights(unfolded, folder / MODEL_FOLDER / WEIGHTS)  # also into the components, whose layers it shares
            weights = unfolded.state_dict()
            teacher_weights = {name: weights[name] for name in weights if not name.startswith("layers.")}
        model.load_state_dict(PretrainedEncoder(components, config, trained=True).state_dict() | teacher_weights)
        if uses_teacher:
            return ()
        if not has_classifier or config.pooling is not None:  # the source's pooler is not used
            missing = frozenset(name for name in missing if "pooler" not in name)
        return tuple(sorted(missing))

    def needed(self, model: PretrainedEncoder) -> dict[int, int]:
        """Count a layer's shared parameters once and its own ones per application up to the exit."""
        around = sum(map(count_parameters, (model.embeddings, model.layer_inputs, model.head, model.final_norm)))
        needed = {}
        for exit_ in model.exits:
            needed[exit_] = around
            order = model.order[: exit_ * model.layers_per_stage]
            for number, layer in enumerate(model.layers):
                uses = order.count(number)
                for name, parameter in layer.named_parameters() if uses else ():
                    share = len(parameter) if _is_per_application(name, layer) else uses
                    needed[exit_] += parameter.numel() * uses // share
        return needed

    def trace(
        self, model: PretrainedEncoder, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None
    ) -> Graphs:
        """Trace the exits, and the parts if every stage applies the same layers in the same order."""
        model = self.exported(model)
        exits, size, longest = Exits(model), model.layers_per_stage, {"sequence": model.max_positions}
        graphs = {"exits": export_graph(text_spec(exits, inputs, model.max_positions, exits.outputs))}
        stages = {model.order[start : start + size] for start in range(0, len(model.order), size)}
        if steps and len(stages) == 1 and not model.layer_inputs.differs_by_layer:
            words, project = model.embeddings.words, model.embeddings.project
            width = project.out_features if isinstance(project, nn.Linear) else words.embedding_dim
            mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
            mask[1, 1:] = 0
            state = {"state": torch.zeros(BATCH, TOKENS, width, dtype=words.weight.dtype)}
            text, tokens = state | {"attention_mask": mask}, [name for name in inputs if name != "attention_mask"]
            axes = {name: {0: "batch", 1: "sequence"} for name in text}
            # The loop graph takes its number if layers depend on it.
            has_number = any(hasattr(module, "own_parts") for module in model.modules())
            loop_number = {"loop": torch.zeros(1, dtype=torch.int64)} if has_number else {}
            readout = state if model.head.pooling in ("cls", "tokens") else text
            readout_axes = {name: axes[name] for name in readout}
            specs = {
                "embed": text_spec(Piece(model, model.embeddings.forward), tokens, model.max_positions, ("state",)),
                "loop": GraphSpec(Piece(model, model.advance), text | loop_number, axes, ("next_state",), longest),
                "readout": GraphSpec(Piece(model, model.readout), readout, readout_axes, longest=longest),
            }
            graphs |= {part: export_graph(spec) for part, spec in specs.items()}
        return Graphs(graphs.pop("exits"), graphs, has_row_scales=True)

    def exported(self, model: PretrainedEncoder) -> PretrainedEncoder:
        """Keep three products for queries, keys and values: splitting the result of a single one is a copy."""
        exported = sharing_copy(model)
        for module in exported.layers.modules():
            config: Any = getattr(module, "config", None)
            if config is not None:  # a copy, too
                config._attn_implementation = EXPORT_ATTENTION
            if isinstance(module, OwnBias):  # XNNPACK's product takes no bias that is chosen from several
                module.adds_bias = True
        return exported

    def trim(self, model: PretrainedEncoder, kept: Tensor) -> PretrainedEncoder:
        trimmed = sharing_copy(model)
        trimmed.embeddings.words = table_of(model.embeddings.words.weight[kept])
        separator = model.embeddings.separator
        if separator is not None:
            rows = (kept == separator).nonzero()
            if not len(rows):
                raise InputError(
                    f"--vocab-trim: model.separator {separator} is not a special token, and trimming would remove it; "
                    "leave --vocab-trim out"
                )
            trimmed.embeddings.separator = int(rows)
        if (padding := model.embeddings.position_padding) is not None:  # a removed token is in no text
            trimmed.embeddings.position_padding = next(iter((kept == padding).nonzero().flatten().tolist()), -1)
        return trimmed.train(model.training)

    def learning(self, model: PretrainedEncoder, training: TrainingConfig) -> Iterator[ParameterSettings]:
        """Apply ``training.encoder_rate``, and ``training.layer_decay`` from each layer to the one before it."""
        decay, encoder_rate = (float(getattr(training, name, 1.0)) for name in ("layer_decay", "encoder_rate"))
        depth = len(model.order)
        rates = dict.fromkeys(("embeddings", "layer_inputs"), decay ** (depth + 1))
        # The last application determines the rate of a shared layer.
        rates |= {f"layers.{number}": decay ** (depth - index) for index, number in enumerate(model.order)}
        for name, parameter in model.named_parameters():
            module = ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
            dimensions = parameter.ndim - _is_per_application(name, model)
            rate = 1.0 if module == "head" else encoder_rate * rates.get(module, 1.0)
            yield ParameterSettings(parameter, rate, decays=dimensions >= 2)


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    """Return the keys of the source's config.json that the recipe's dropouts replace."""
    hidden = dict.fromkeys(_HIDDEN_DROPOUTS, config.dropout)
    dropouts = {**hidden, **dict.fromkeys(_ATTENTION_DROPOUTS, config.attention_dropout)}
    return {name: value for name, value in dropouts.items() if name in config.architecture and value is not None}


def _is_per_application(parameter_name: str, module: nn.Module) -> bool:
    """Return whether the first dimension of a parameter counts the applications of a shared layer."""
    owner, _, name = parameter_name.rpartition(".")
    return name in getattr(module.get_submodule(owner), "own_parts", ())


ADAPTER = PretrainedAdapter()
