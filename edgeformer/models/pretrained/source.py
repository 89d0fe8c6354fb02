"""What the JSON files of a Hugging Face folder may say: strangers wrote them, so each is checked once, before use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator, model_validator
from tokenizers import Tokenizer
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, sha256_of
from edgeformer.artifacts.workspace import CONFIG_FILE, MOST_JSON_BYTES, TOKENIZER_FILE
from edgeformer.data.tokenization import tokenizer_from_file

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


# A Hugging Face model's folder, or its name on the hub: what is read of it, without torch and without running code.


ARCHITECTURES = ("albert", "bert", "distilbert", "electra", "modernbert", "roberta")
"""``model_type`` of the encoders that can be taken apart; MiniLM's is ``bert``, or ``roberta``."""
WEIGHTS = "model.safetensors"
_FILES = (
    CONFIG_FILE, TOKENIZER_FILE, "tokenizer_config.json", "vocab.txt", "*.safetensors", "model.safetensors.index.json",
    "modules.json", "*_Pooling/config.json", "sentence_bert_config.json",
)  # fmt: skip
_SAYS_NOTHING = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "gradient_checkpointing")
_OLDER = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_KNOWN = re.compile("(Model|ForMaskedLM|ForPreTraining|ForSequenceClassification)$")
_OTHER = re.compile("(LMHead|Decoder)Model$")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_FILE_ENDS = (".safetensors", ".bin", ".json")


@dataclass(frozen=True)
class Source:
    """A model's folder.

    Attributes:
        name: as the user gave it.
        config: its config.json, without what says nothing of the model.
        has_code: config.json names code of its own, which is not run.
        pooling, normalize: of a sentence-transformers folder: how its embeddings are made; None and False: of none.
        max_length: tokens that a sentence-transformers folder cuts its texts to; None: it does not say.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    has_code: bool = False
    pooling: str | None = None
    normalize: bool = False
    max_length: int | None = None

    @property
    def tokenizer(self) -> Path:
        """Its tokenizer.json."""
        return self.folder / TOKENIZER_FILE

    @property
    def max_positions(self) -> int:
        """Tokens of the longest text."""
        return positions_of(self.config)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its classes, in order; empty: its config.json names none."""
        named = self.config.get("id2label") or {}
        return tuple(str(named[key]) for key in sorted(named, key=int))

    @property
    def classifies(self) -> bool:
        """Whether its weights are those of a sequence classifier."""
        return any("ForSequenceClassification" in name for name in self.config.get("architectures") or ())

    @property
    def other_head(self) -> str | None:
        """What it is, where that is neither a bare or a pretraining encoder nor a sequence classifier.

        A sentence-transformers folder has its encoder used without any head.
        """
        names = self.config.get("architectures") or () if self.pooling is None else ()
        return next((name for name in names if _OTHER.search(name) or not _KNOWN.search(name)), None)

    def vocabulary(self) -> int:
        """Tokens of its tokenizer; the weights may have more rows. Raises DataError."""
        numbers = self._tokenizer().get_vocab(with_added_tokens=True).values()
        return max(numbers, default=0) + 1

    def separator(self) -> int:
        """The token between the texts of a pair. Raises InputError where its tokenizer takes no pairs."""
        tokenizer = self._tokenizer()
        single, pair = (tokenizer.encode(*texts) for texts in (("a",), ("a", "b")))
        if len(pair.ids) <= len(single.ids) or not single.special_tokens_mask[-1]:
            raise InputError(f"{self.tokenizer}: puts no separator between the texts of a pair; use pairs: false")
        return int(single.ids[-1])

    def weights_sha256(self) -> str:
        """Of the file that holds the weights; where there are several, of the list of their checksums."""
        path = self.folder / WEIGHTS
        if path.is_file():
            return sha256_of(path)
        lines = [f"{sha256_of(part)} {part.name}\n" for part in sorted(self.folder.glob("*.safetensors"))]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _tokenizer(self) -> Tokenizer:
        tokenizer = tokenizer_from_file(self.tokenizer)
        tokenizer.no_padding()  # what a file may carry would stand behind the last separator
        tokenizer.no_truncation()
        return tokenizer


def depth_of(architecture: Mapping[str, Any]) -> int:
    """How many layers a text goes through, by a model's config.json."""
    return int(architecture.get("num_hidden_layers") or architecture.get("n_layers") or 0)


def width_of(architecture: Mapping[str, Any]) -> int:
    """Width of a layer's state, by a model's config.json."""
    return int(architecture.get("hidden_size") or architecture["dim"])


def positions_of(architecture: Mapping[str, Any]) -> int:
    """Tokens of the longest text, by a model's config.json."""
    positions = int(architecture["max_position_embeddings"])
    # RoBERTa's first rows are of padding, which stands at no position.
    return positions - int(architecture["pad_token_id"]) - 1 if architecture["model_type"] == "roberta" else positions


def missing_size(architecture: Mapping[str, Any]) -> str | None:
    """The first size that a config.json of a known ``model_type`` lacks, or has as no whole number from 1 on."""
    older = architecture.get("model_type") == "distilbert"
    needed = ["max_position_embeddings", "vocab_size"]
    needed += [_OLDER[name] if older else name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    found = next((name for name in needed if type(architecture.get(name)) is not int or architecture[name] < 1), None)
    padding = architecture.get("pad_token_id")
    if found is None and architecture.get("model_type") == "roberta" and (type(padding) is not int or padding < 0):
        return "pad_token_id"
    return found


def open_source(name: str) -> Source:
    """The model in a folder, or by that name on the hub.

    Raises:
        InputError: no such folder or model, another architecture, weights that only unpickling could read, or a model
            that computes something which is not computed here.
        ArtifactError: a file is missing or damaged, or says of the weights what they are not.
    """
    folder = _folder(name)
    place = folder / CONFIG_FILE
    config = read_object(place)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise InputError(f"{place}: model_type {kind!r} is not known here; it can be {allowed}; {AS_ONNX}")
    if (lacking := missing_size(config)) is not None:
        raise ArtifactError(f"{place}: {lacking} is missing, or no whole number that a model can have")
    told = checked(Encoder, config, place)
    refuse_other_computations(told, config, place)
    files = _weights(folder)
    held = sum(path.stat().st_size for path in files)
    if told.least_bytes() > held:
        raise ArtifactError(f"{place}: describes a model that is larger than the {held:,} bytes beside it")
    check_tables(told, files, place)
    if not (folder / TOKENIZER_FILE).is_file():
        raise InputError(
            f"{folder}: has no {TOKENIZER_FILE}; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    known = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
    return Source(name, folder, known, "auto_map" in config, *_sentence_model(folder))


def _weights(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises InputError where there are none in safetensors."""
    whole = folder / WEIGHTS
    if found := [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
        return found
    raise InputError(
        f"{folder}: has no {WEIGHTS}; other formats could run code and are not read. Where you trust it: "
        "load it with transformers and write it again with save_pretrained(…, safe_serialization=True)"
    )


def _sentence_model(folder: Path) -> tuple[str | None, bool, int | None]:
    """Pooling, normalisation and length of a sentence-transformers folder. Raises InputError for other modules."""
    listed = folder / "modules.json"
    if not listed.is_file():
        return None, False, None
    pooling, normalize = None, False
    for module in checked(Modules, read_json(listed), listed).root:
        if module.kind == "Pooling":
            if not _FOLDER_NAME.fullmatch(module.path):
                raise InputError(f"{listed}: path {module.path[:60]!r} must be the name of a folder beside it")
            pooling = pooling_of(folder / module.path / CONFIG_FILE)
        elif module.kind == "Normalize":
            normalize = True
        elif module.kind != "Transformer":
            raise InputError(f"{listed}: has a module {module.kind[:60]!r}, which is not known here; {AS_ONNX}")
    settings = folder / "sentence_bert_config.json"
    texts = checked(Texts, read_object(settings), settings) if settings.is_file() else Texts()
    if texts.do_lower_case and not _lowers(folder / TOKENIZER_FILE):
        raise InputError(
            f"{settings}: do_lower_case is true, but {TOKENIZER_FILE} does not lower texts, and nothing else here "
            "would; give its normalizer a Lowercase"
        )
    return pooling, normalize, texts.max_seq_length


def _lowers(path: Path) -> bool:
    """Whether a tokenizer takes capital letters for small ones. Raises DataError."""
    normalizer, capitals = tokenizer_from_file(path).normalizer, "ABXYZÀÉÖЖ"
    if normalizer is None:
        return False
    return bool(normalizer.normalize_str(capitals) == normalizer.normalize_str(capitals.lower()))


def _folder(name: str) -> Path:
    """The folder of that name, or the hub's copy. Raises InputError."""
    path = Path(name)
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # too long, for instance
        raise InputError(f"{name[:60]}…: is no folder: {error.__class__.__name__}") from None
    if is_file:
        raise InputError(f"{name}: is a file; name the folder that it is in, {path.parent}")
    if not _HUB_NAME.fullmatch(name) or name.endswith(_FILE_ENDS):
        raise InputError(f"{name}: is no folder here, and no name of the hub's, which are OWNER/NAME")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    with needs_extra("hf", "a model of the hub"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the client raises a dozen kinds, ValueError for a name that cannot be one among them
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name}: is no folder here, and cannot be had from the hub: {first[0]}") from None
