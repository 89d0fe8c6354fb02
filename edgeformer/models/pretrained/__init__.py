"""Pretrained text encoders (BERT, DistilBERT, RoBERTa, XLM-R, ELECTRA, MPNet, DeBERTa-v3, ALBERT, ModernBERT),
unchanged or folded: a few of their layers, each applied several times."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen, first_problem
from edgeformer.artifacts.data_config import DataSection, PositiveInt, Probability, SpanData
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import ModelConfig, TrainingConfig
from edgeformer.data.tokenization import embedding_rows
from edgeformer.models import ModelSpec, text_client_config
from edgeformer.models.pretrained.source import EncoderFile, open_source, weights_sha256

Pooling = Literal["cls", "mean", "max"]
_SELECT_BY = {"classification": "accuracy", "multi-label-classification": "f1"}
"""Task → ``training.select_by`` of a recipe with a frozen start that does not state it."""


class FoldConfig(Frozen):
    """Some layers of a pretrained stack, applied repeatedly: the recurrence of paper A on pretrained weights."""

    layers: PositiveInt = Field(description="number of layers, shared by all iterations")
    iterations: PositiveInt = Field(description="applications of the layers")
    init: Literal["stepwise", "average"] = Field(
        "stepwise",
        description="stepwise: every n-th layer of the stack; average: the mean of the layers that it replaces",
    )
    weights: Literal["source", "teacher"] = Field(
        "source",
        description="origin of the layers: the source, or training.teacher, a run that was fine-tuned from this source",
    )
    order: Literal["cycle", "immediate"] = Field(
        "cycle", description="cycle: layers 1 2 3 1 2 3, as in paper A; immediate: 1 1 2 2 3 3"
    )
    own: Literal["none", "norms", "adapters"] = Field(
        "none",
        description="parameters of each application: none; biases and norms; a low-rank matrix for each shared matrix",
    )
    rank: PositiveInt = Field(8, description="rank of the matrices of own: adapters")


class PretrainedConfig(ModelConfig):
    """A pretrained text encoder and its changes. Missing sizes are read from the source."""

    folders: ClassVar[tuple[str, ...]] = ("source",)
    later: ClassVar[tuple[str, ...]] = ("position_padding",)

    kind: Literal["pretrained"]
    source: str = Field(description="folder of a Hugging Face model (config.json, model.safetensors), or its hub name")
    architecture: dict[str, Any] = Field(description="the source's config.json; read from the source if missing")
    weights_sha256: str | None = Field(None, description="checksum of the source's weights; computed if missing")
    pooling: Pooling | None = Field(
        None, description="state of [CLS], or mean or maximum of the tokens' states; default: as in the source"
    )
    normalize: bool = Field(False, description="scale embeddings, or the pooled vector of a classifier, to length 1")
    dimensions: PositiveInt | None = Field(
        None, description="keep only the first numbers of an embedding, so many; default: all"
    )
    pairs: bool = Field(False, description="texts may be pairs: token types, as the tokenizer states them, are read")
    separator: int | None = Field(
        None, description="runs of earlier versions: in pairs, the tokens behind this one have the second type"
    )
    position_padding: int | None = Field(
        None,
        description="RoBERTa, XLM-R, MPNet: token that counts no position; read from the source. Absent in runs of "
        "earlier versions: every token counts",
    )
    dropout: Probability | None = Field(None, description="default: as in the source")
    attention_dropout: Probability | None = Field(None, description="default: as in the source")
    fold: FoldConfig | None = Field(None, description="replace the layers by fewer shared ones")

    @property
    def sizes(self) -> EncoderFile:
        """Sizes of the source, from ``architecture``."""
        return EncoderFile.model_validate(self.architecture)

    @property
    def reads_types(self) -> bool:
        return self.pairs and self.separator is None and self.sizes.token_types > 1

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        try:
            sizes = self.sizes
        except ValidationError as error:
            raise ValueError(
                f"architecture: {first_problem(error)}; remove the key to read it from the source"
            ) from None
        if self.max_positions > sizes.positions:
            raise ValueError(f"max_positions: must be at most {sizes.positions}, the limit of the source")
        if self.position_padding not in (None, sizes.position_padding):
            raise ValueError(f"position_padding: is {sizes.position_padding} in the source; remove the key")
        if self.fold is not None and self.fold.layers > sizes.depth:
            raise ValueError(f"fold.layers: must be at most {sizes.depth}, the layers of the source")
        if self.fold is not None and sizes.model_type in ("albert", "modernbert"):
            raise ValueError(
                f"fold: not possible with {sizes.model_type}: albert shares its layers already, and the layers of "
                "modernbert differ in their attention; use another source"
            )
        return self

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        if isinstance(data, SpanData) and (self.pooling is not None or self.pairs):
            raise ValueError(
                "model.pooling and model.pairs: a token classifier answers for every token of one text; leave them out"
            )
        if self.fold is not None and self.fold.weights == "teacher" and getattr(training, "teacher", None) is None:
            raise ValueError(
                "model.fold.weights: teacher needs training.teacher: a run that was fine-tuned from this source"
            )
        if getattr(training, "start", "source") == "frozen" and self.pooling is None:
            raise ValueError(
                "training.start: frozen needs model.pooling, such as mean: the head reads the pooled vector"
            )


class Pretrained(ModelSpec):
    kind = "pretrained"
    tasks = ("classification", "multi-label-classification", "token-classification", "regression", "embedding")
    config_type = PretrainedConfig
    model_type = "edgeformer-pretrained"
    architecture = "PretrainedEncoder"
    adapter_module = "edgeformer.models.pretrained.adapter"
    tags = ("edge", "onnx")
    completed = ("tokenizer", "model.architecture", "model.vocab_size", "model.max_positions")

    def complete(self, document: dict[str, Any]) -> None:
        """Read tokenizer, architecture, sizes and checksum from the source, if the recipe omits them.

        A frozen start has a head on vectors of length 1, pooled as in the source, and the task's metric to choose by.
        """
        model, training = document.get("model"), document.get("training")
        if not isinstance(model, dict) or not isinstance(model.get("source"), str):
            return
        is_frozen = isinstance(training, dict) and training.get("start") == "frozen"
        if isinstance(training, dict) and is_frozen and document.get("task") in _SELECT_BY:
            training.setdefault("select_by", _SELECT_BY[document["task"]])
            model.setdefault("normalize", True)
        name = model["source"]
        document.setdefault("tokenizer", {"kind": "source", "name": name})
        if "architecture" in model:
            return
        source = open_source(name)
        model["architecture"] = dict(source.config)
        model.setdefault("weights_sha256", weights_sha256(source.folder))
        model.setdefault("vocab_size", embedding_rows(source.tokenizer))
        model.setdefault("max_positions", source.max_positions)
        model.setdefault("position_padding", source.sizes.position_padding)
        if is_frozen:
            model.setdefault("pooling", source.pooling or "mean")

    def loops(self, config: PretrainedConfig) -> int:
        return config.fold.iterations if config.fold is not None else config.sizes.depth

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        fields = {key: config[key] for key in PretrainedConfig.model_fields if key in config}
        parsed = PretrainedConfig.model_validate({"kind": self.kind, **fields}, strict=False)
        fold, sizes = parsed.fold, parsed.sizes
        return text_client_config(
            config, precision, layers=fold.layers * fold.iterations if fold is not None else sizes.depth,
            heads=sizes.heads, hidden_size=sizes.width, iterations=self.loops(parsed),
        )  # fmt: skip

    def card_line(self, config: PretrainedConfig) -> str:
        sizes, fold = config.sizes, config.fold
        line = f"{sizes.model_type}, {sizes.depth} layers, width {sizes.width}, from {config.source}"
        if fold is not None:
            parts = {"none": "nothing", "norms": "biases and norms", "adapters": f"adapters of rank {fold.rank}"}
            layers = "1 layer" if fold.layers == 1 else f"{fold.layers} layers"
            line += (
                f"; folded into {layers} × {fold.iterations} iterations ({fold.order}, {fold.init}), "
                f"each application's own: {parts[fold.own]}"
            )
        return line


MODEL = Pretrained()
