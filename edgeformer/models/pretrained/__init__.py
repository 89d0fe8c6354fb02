"""Text encoders that somebody else trained (BERT, DistilBERT, RoBERTa, ELECTRA, MiniLM, ALBERT, ModernBERT), as they
are or folded: a few of their layers, each applied several times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataSection, PositiveInt, Probability
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import ModelConfig, TrainingConfig
from edgeformer.artifacts.workspace import TOKENIZER_FILE
from edgeformer.models.pretrained.source import (
    ARCHITECTURES,
    depth_of,
    missing_size,
    open_source,
    positions_of,
    width_of,
)
from edgeformer.models.spec import ModelSpec, text_client_config

Pooling = Literal["cls", "mean", "max"]


class FoldConfig(Frozen):
    """Some layers of a stack, applied again and again: the idea of paper A on weights that are there already."""

    layers: PositiveInt = Field(description="that are kept, and shared by all iterations")
    iterations: PositiveInt
    init: Literal["stepwise", "average"] = Field(
        "stepwise",
        description="stepwise: every n-th layer of the stack; average: the mean of the layers that each stands for",
    )
    weights: Literal["source", "teacher"] = Field(
        "source",
        description="whose layers are kept: the source's; or those of training.teacher, which began as that source",
    )
    order: Literal["cycle", "immediate"] = Field(
        "cycle", description="cycle applies 1 2 3 1 2 3, as paper A does; immediate 1 1 2 2 3 3"
    )
    own: Literal["none", "norms", "adapters"] = Field(
        "none",
        description="what each application has for itself: nothing; its biases and norms; a low-rank matrix beside "
        "every shared one",
    )
    rank: PositiveInt = Field(8, description="of own: adapters")

    def order_of_layers(self) -> tuple[int, ...]:
        """Which of the kept layers each application is, from 0."""
        many = range(self.layers * self.iterations)
        return tuple(n % self.layers if self.order == "cycle" else n // self.iterations for n in many)

    def turns(self) -> tuple[int, ...]:
        """The how-manieth of its layer each application is, from 0."""
        many = range(self.layers * self.iterations)
        return tuple(n // self.layers if self.order == "cycle" else n % self.iterations for n in many)


class PretrainedConfig(ModelConfig):
    """A pretrained text encoder, and what becomes of it. Sizes are the source's own and are filled in from there."""

    folders: ClassVar[tuple[str, ...]] = ("source",)

    kind: Literal["pretrained"]
    source: str = Field(description="folder of a Hugging Face model (config.json, model.safetensors), or its hub name")
    architecture: dict[str, Any] = Field(description="the source's config.json; filled in from there when absent")
    weights_sha256: str | None = Field(None, description="of the source's weights; filled in when absent")
    pooling: Pooling | None = Field(
        None,
        description="what the answer is made of: [CLS], the tokens' mean or maximum; absent: as the source does",
    )
    normalize: bool = Field(False, description="embeddings of length 1")
    pairs: bool = Field(
        False, description="texts may be pairs: the tokens behind the first separator get the second token type"
    )
    separator: int | None = Field(None, description="token between the texts of a pair")
    dropout: Probability | None = Field(None, description="absent: as the source was trained")
    attention_dropout: Probability | None = Field(None, description="absent: as the source was trained")
    fold: FoldConfig | None = None

    @field_validator("architecture")
    @classmethod
    def _known(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        if architecture.get("model_type") not in ARCHITECTURES:
            raise ValueError(
                f"model_type must be one of {', '.join(ARCHITECTURES)}, not {architecture.get('model_type')!r}"
            )
        if (lacking := missing_size(architecture)) is not None:
            raise ValueError(f"{lacking} is missing, or no whole number; take architecture out to have it read")
        return architecture

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_positions > positions_of(self.architecture):
            raise ValueError(f"max_positions: the source takes at most {positions_of(self.architecture)} tokens")
        if self.pairs and self.separator is None:
            raise ValueError("pairs: true needs separator, the number of the token between two texts")
        if self.fold is not None and self.fold.layers > depth_of(self.architecture):
            raise ValueError(f"fold.layers: the source has {depth_of(self.architecture)} layers")
        if self.fold is not None and self.architecture["model_type"] in ("albert", "modernbert"):
            raise ValueError(
                "fold: the layers of albert are shared already, those of modernbert differ in what they attend to; "
                "fold another encoder"
            )
        return self

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        """Raises ValueError where the teacher is missing whose layers are to be folded."""
        if self.fold is not None and self.fold.weights == "teacher" and getattr(training, "teacher", None) is None:
            raise ValueError("model.fold.weights: teacher needs training.teacher, a run whose layers are folded")


class Pretrained(ModelSpec):
    """Somebody else's encoder."""

    kind: ClassVar[str] = "pretrained"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "multi-label-classification", "embedding")
    config_type: ClassVar[type[ModelConfig]] = PretrainedConfig
    model_type: ClassVar[str] = "edgeformer-pretrained"
    architecture: ClassVar[str] = "PretrainedEncoder"
    adapter_module: ClassVar[str] = "edgeformer.models.pretrained.adapter"
    completed: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "model.architecture",
        "model.vocab_size",
        "model.max_positions",
    )

    def complete(self, document: dict[str, Any]) -> None:
        """Reads what the recipe leaves to its source: architecture, sizes, checksum; the tokenizer is the source's."""
        model = document.get("model")
        if not isinstance(model, dict) or not isinstance(model.get("source"), str):
            return
        name = model["source"]
        own = {"kind": "file", "path": str(Path(name) / TOKENIZER_FILE)} if Path(name).is_dir() else None
        document.setdefault("tokenizer", own or {"kind": "hub", "name": name})
        if "architecture" in model:
            return
        source = open_source(name)
        model["architecture"] = dict(source.config)
        model.setdefault("weights_sha256", source.weights_sha256())
        model.setdefault("vocab_size", source.vocabulary())
        model.setdefault("max_positions", source.max_positions)
        if model.get("pairs") and "separator" not in model:
            model["separator"] = source.separator()

    def loops(self, config: PretrainedConfig) -> int:
        """Iterations of a folded model; else its layers, after each of which it can answer."""
        return config.fold.iterations if config.fold is not None else depth_of(config.architecture)

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        described = PretrainedConfig.model_validate(
            {"kind": self.kind, **{key: config[key] for key in PretrainedConfig.model_fields if key in config}},
            strict=False,
        )
        fold, stack = described.fold, described.architecture
        return text_client_config(
            config,
            precision,
            layers=fold.layers * fold.iterations if fold is not None else depth_of(stack),
            heads=stack.get("num_attention_heads") or stack["n_heads"],
            hidden_size=width_of(stack),
            iterations=self.loops(described),
        )

    def card_line(self, config: PretrainedConfig) -> str:
        stack, fold = config.architecture, config.fold
        line = f"{stack['model_type']}, {depth_of(stack)} layers, width {width_of(stack)}, from {config.source}"
        if fold is not None:
            own = {"none": "nothing", "norms": "biases and norms", "adapters": f"adapters of rank {fold.rank}"}
            line += (
                f"; folded into {fold.layers} layers × {fold.iterations} iterations ({fold.order}, {fold.init}), "
                f"each application's own: {own[fold.own]}"
            )
        return line

    def tags(self) -> tuple[str, ...]:
        return ("edge", "onnx")


MODEL = Pretrained()
