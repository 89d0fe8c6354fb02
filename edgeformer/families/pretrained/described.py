"""What the JSON files of a Hugging Face folder may say: strangers wrote them, so each is checked once, before use."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator, model_validator
from typing_extensions import Self

from edgeformer.formats.base import Frozen
from edgeformer.formats.errors import ArtifactError, InputError, needs_extra
from edgeformer.formats.files import read_at_most
from edgeformer.formats.workspace import MOST_JSON_BYTES

M = TypeVar("M", bound=BaseModel)

AS_ONNX = (
    "to measure it nevertheless, export it to ONNX (optimum-cli export onnx --model MODEL OUT, or torch.onnx.export), "
    "then run: edgeformer import onnx OUT/model.onnx -o BUNDLE"
)
"""Remedy of every refusal of a model whose computation is not implemented here."""
Size = Annotated[int, Field(ge=1)]
Small = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
_WITHIN = re.compile(r"(^|\.)(embeddings|embeddings_project|encoder|transformer|layers?|final_norm)\.")
_NO_WEIGHT = re.compile(r"\.(position_ids|token_type_ids|inv_freq)$")
_TABLES = {
    "vocab_size": ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight"),
    "max_position_embeddings": ("embeddings.position_embeddings.weight",),
    "type_vocab_size": ("embeddings.token_type_embeddings.weight",),
}


class _Told(Frozen):
    """What is read of a file; its other keys are left to whom they concern."""

    model_config = ConfigDict(extra="ignore")


class Encoder(_Told):
    """config.json. Which sizes a ``model_type`` needs, ``missing_size`` says."""

    model_type: str
    vocab_size: Size
    max_position_embeddings: Size
    hidden_size: Size | None = None
    dim: Size | None = None
    num_hidden_layers: Size | None = None
    n_layers: Size | None = None
    intermediate_size: Size | None = None
    hidden_dim: Size | None = None
    embedding_size: Size | None = None
    type_vocab_size: Size | None = None
    num_hidden_groups: Size | None = None
    inner_group_num: Size | None = None
    num_labels: Size | None = None
    pad_token_id: Annotated[int, Field(ge=-1)] | None = None
    layer_norm_eps: Small | None = None
    norm_eps: Small | None = None
    hidden_act: str | None = None
    architectures: list[str] | None = None
    problem_type: str | None = None
    id2label: dict[str, str | int] | None = None
    is_decoder: bool | None = None
    add_cross_attention: bool | None = None
    position_embedding_type: str | None = None
    chunk_size_feed_forward: int | None = None

    @field_validator("id2label")
    @classmethod
    def _numbered(cls, names: dict[str, str | int] | None) -> dict[str, str | int] | None:
        if names is not None and names.keys() != {str(number) for number in range(len(names))}:
            raise ValueError("must name the classes 0, 1, 2 … without a gap")
        return names

    @model_validator(mode="after")
    def _padding(self) -> Self:
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id: {self.pad_token_id} is no token of a vocabulary of {self.vocab_size}")
        return self

    def least_bytes(self) -> int:
        """What its largest tables and matrices take at one byte a number."""
        width = self.dim or 1 if self.model_type == "distilbert" else self.hidden_size or 1
        inner = (self.hidden_dim if self.model_type == "distilbert" else self.intermediate_size) or 0
        layers = (self.n_layers if self.model_type == "distilbert" else self.num_hidden_layers) or 1
        if self.model_type == "albert":
            layers = (self.num_hidden_groups or 1) * (self.inner_group_num or 1)
        rows = self.vocab_size + (self.type_vocab_size or 0)
        rows += 0 if self.model_type == "modernbert" else self.max_position_embeddings
        classes = max(len(self.id2label or ()), self.num_labels or 0)
        return rows * (self.embedding_size or width) + (layers * (inner + width) + classes) * width


class Module(_Told):
    """One of modules.json."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """Name of its class."""
        return self.type.rsplit(".", 1)[-1]


class Modules(RootModel[list[Module]]):
    """modules.json of a sentence-transformers folder."""


class Texts(_Told):
    """sentence_bert_config.json."""

    max_seq_length: Annotated[int, Field(ge=4)] | None = None
    do_lower_case: bool | None = None


def checked(model: type[M], content: Any, path: Path) -> M:
    """What a file says. Raises ArtifactError that names its first key that cannot be."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step)[:60] for step in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ArtifactError(f"{path}: {where + ': ' if where else ''}{said[:1].lower()}{said[1:]}") from None


def read_json(path: Path) -> Any:
    """A JSON file in UTF-8. Raises ArtifactError."""
    try:
        return json.loads(read_at_most(path, MOST_JSON_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: missing or damaged: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in UTF-8. Raises ArtifactError."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged: no JSON object")
    return content


def refuse_other_computations(told: Encoder, config: Mapping[str, Any], path: Path) -> None:
    """Raises InputError for a setting that changes what a model computes in a way that is not computed here."""
    other = {
        "is_decoder": told.is_decoder,
        "add_cross_attention": told.add_cross_attention,
        "position_embedding_type": told.position_embedding_type not in (None, "absolute"),
        "chunk_size_feed_forward": told.chunk_size_feed_forward,
        "quantization_config": config.get("quantization_config"),
    }
    for key in (key for key, differs in other.items() if differs):
        shown = f"is {config[key]!r}" if key != "quantization_config" else "is there: the weights are quantised"
        raise InputError(f"{path}: {key} {shown}, which is not computed here; take an encoder without it; {AS_ONNX}")


def pooling_of(path: Path) -> str:
    """``cls``, ``mean`` or ``max``, by the config.json of a Pooling module. Raises InputError for any other."""
    told = read_object(path)
    flagged = [key.removeprefix("pooling_mode_") for key in told if key.startswith("pooling_mode_") and told[key]]
    modes = {_POOLINGS.get(name, name) for name in flagged}
    if (newer := told.get("pooling_mode")) is not None:
        modes.add(str(newer))
    if len(modes) != 1 or not modes <= {*_POOLINGS.values()}:
        found = ", ".join(sorted(mode[:60] for mode in modes)) or "none"
        raise InputError(f"{path}: pooling must be one of {', '.join(_POOLINGS.values())}, not {found}; {AS_ONNX}")
    return modes.pop()


def refuse_unused(folder: Path, names: Iterable[str]) -> None:
    """Raises ArtifactError for weights within the encoder that it would not use: it computes something else then."""
    unused = sorted(name for name in names if _WITHIN.search(name) and not _NO_WEIGHT.search(name))
    if unused:
        raise ArtifactError(
            f"{folder}: has weights that no encoder of its config.json uses: {', '.join(unused[:4])}; it computes "
            "something that is not computed here, or its config.json is another model's"
        )


def check_tables(told: Encoder, files: Iterable[Path], config: Path) -> None:
    """Raises ArtifactError where the tables in the weights have other rows than config.json says, or are unreadable.

    Only the headers are read.
    """
    for path in files:
        for name, shape in _shapes(path).items():
            for key, tables in _TABLES.items():
                rows = getattr(told, key)
                if name.endswith(tables) and rows is not None and shape[:1] != [rows]:
                    raise ArtifactError(f"{config}: {key} is {rows}, but {name} in {path.name} has shape {shape}")


def _shapes(path: Path) -> dict[str, list[int]]:
    """Tensors of a safetensors file, of which only the header is read. Raises ArtifactError."""
    with needs_extra("hf", "a pretrained encoder"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: no safetensors file, or damaged: {error}; copy it again") from None
