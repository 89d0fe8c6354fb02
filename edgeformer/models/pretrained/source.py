"""Folders and hub names of Hugging Face models, read without torch and without running their code.

The JSON files come from strangers, so what is read of them is validated before use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen, first_problem
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, sha256_of
from edgeformer.artifacts.workspace import CONFIG_FILE, MOST_JSON_BYTES, TOKENIZER_FILE
from edgeformer.data.tokenization import tokenizer_from_file

M = TypeVar("M", bound=BaseModel)
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Architecture = Literal[
    "albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"
]
"""Supported values of ``model_type``; MiniLM's is ``bert`` or ``roberta``, DeBERTa-v3's ``deberta-v2``."""
_PADDED_POSITIONS = ("roberta", "xlm-roberta")
_TOKEN_TYPES = dict.fromkeys(("albert", "bert", "electra", *_PADDED_POSITIONS), 2) | {"deberta-v2": 0}
"""Families with token types → their number if config.json does not state it."""
WEIGHTS = "model.safetensors"
AS_ONNX = (
    "to measure it anyway, export it to ONNX (optimum-cli export onnx --model MODEL OUT, or torch.onnx.export), then "
    "run: edgeformer import onnx OUT/model.onnx -o BUNDLE"
)
"""Remedy for every model whose computation is not implemented."""
_FILES = (
    CONFIG_FILE, TOKENIZER_FILE, "tokenizer_config.json", "vocab.txt", "*.safetensors", "model.safetensors.index.json",
    "modules.json", "*_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "chat_template.jinja",
)  # fmt: skip
_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
_ACTIVATIONS: Mapping[str, Literal["identity", "sigmoid"]] = {
    "torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Sigmoid": "sigmoid",
}  # fmt: skip
"""Functions of sentence-transformers that make a score of a model's output."""
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_IGNORED_KEYS = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "gradient_checkpointing")
_ENCODER_CLASS = re.compile("(Model|ForMaskedLM|ForPreTraining|ForSequenceClassification|ForTokenClassification)$")
_DECODER_CLASS = re.compile("(LMHead|Decoder)Model$")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_FILE_ENDS = (".safetensors", ".bin", ".json")


class ConfigFile(Frozen):
    """Keys of a file that are read; other keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class EncoderFile(ConfigFile):
    """Keys of config.json that are read here. Transformers checks the other ones when it builds the model."""

    model_type: Architecture
    vocab_size: Size
    max_position_embeddings: Size
    depth: Size = Field(validation_alias=AliasChoices("num_hidden_layers", "n_layers"))
    heads: Size = Field(validation_alias=AliasChoices("num_attention_heads", "n_heads"))
    width: Size = Field(validation_alias=AliasChoices("hidden_size", "dim"))
    inner: Size | None = Field(None, validation_alias=AliasChoices("intermediate_size", "hidden_dim"))
    pad_token_id: int | None = None
    embedding_size: Size | None = None
    type_vocab_size: Annotated[int, Field(ge=0)] | None = None
    num_hidden_groups: Size | None = None
    inner_group_num: Size | None = None
    num_labels: Size | None = None
    layer_norm_eps: Positive | None = None
    norm_eps: Positive | None = None
    architectures: list[str] | None = None
    problem_type: str | None = None
    id2label: dict[str, str | int] | None = None
    is_decoder: bool | None = None
    add_cross_attention: bool | None = None
    position_embedding_type: str | None = None
    chunk_size_feed_forward: int | None = None
    relative_attention: bool | None = None
    relative_attention_num_buckets: int | None = None
    share_att_key: bool | None = None
    pos_att_type: str | list[str] | None = None
    position_buckets: int | None = None
    max_relative_positions: int | None = None
    conv_kernel_size: int | None = None
    attention_head_size: int | None = None
    quantization_config: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.id2label is not None and self.id2label.keys() != {str(n) for n in range(len(self.id2label))}:
            raise ValueError("id2label must name the classes 0, 1, 2 … without a gap")
        if self.model_type in _PADDED_POSITIONS and (self.pad_token_id is None or self.pad_token_id < 0):
            raise ValueError("pad_token_id is missing or negative")
        return self

    @property
    def position_padding(self) -> int | None:
        """Token that counts no position (RoBERTa, MPNet); its row in the table, and those before, belong to padding."""
        if self.model_type == "mpnet":
            return 1  # whatever pad_token_id is
        return self.pad_token_id if self.model_type in _PADDED_POSITIONS else None

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        padding = self.position_padding
        return self.max_position_embeddings - (0 if padding is None else padding + 1)

    @property
    def token_types(self) -> int:
        """Number of token types."""
        default = _TOKEN_TYPES.get(self.model_type, 0)
        return default if self.type_vocab_size is None or self.model_type not in _TOKEN_TYPES else self.type_vocab_size


class SentenceModule(ConfigFile):
    """An entry of modules.json of a sentence-transformers folder."""

    type: str
    path: str = ""


class SentenceFile(ConfigFile):
    """sentence_bert_config.json."""

    max_seq_length: Annotated[int, Field(ge=4)] | None = None
    do_lower_case: bool | None = None


class SentenceSettings(ConfigFile):
    """config_sentence_transformers.json.

    Attributes:
        model_type: ``CrossEncoder`` for a model that scores pairs.
        activation_fn: function that makes its scores.
        prompts: name → text that is put in front of a text.
    """

    model_type: str | None = None
    activation_fn: str | None = None
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_prompt_name and self.default_prompt_name not in (self.prompts or {}):
            raise ValueError(f"lacks its default prompt {self.default_prompt_name!r}; copy the model again")
        return self

    @property
    def default_prompt(self) -> str:
        """Text that sentence-transformers puts in front of every text."""
        return (self.prompts or {}).get(self.default_prompt_name or "", "")

    @property
    def retrieval_prompts(self) -> dict[str, str]:
        """Texts in front of a ``query`` and of a ``document``, as far as the file has them."""
        prompts = {name: prompt for name, prompt in (self.prompts or {}).items() if prompt}
        names = {"document": next((name for name in _DOCUMENT_PROMPTS if name in prompts), ""), "query": "query"}
        return {kind: prompts[name] for kind, name in names.items() if name in prompts}


def _validate(model: type[M], content: Any, path: Path) -> M:
    """Validate a file's content. Raises ArtifactError that names its first invalid key."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ArtifactError(f"{path}: {first_problem(error)}") from None


def read_object(path: Path, kind: type[Any] = dict) -> Any:
    """Read a JSON object, or a list, in UTF-8. Raises ArtifactError."""
    try:
        content = json.loads(read_at_most(path, MOST_JSON_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: missing or damaged: {error}") from None
    if not isinstance(content, kind):
        raise ArtifactError(f"{path}: damaged: not a JSON {'object' if kind is dict else 'list'}")
    return content


@dataclass(frozen=True)
class Source:
    """A model's folder, under its ``name`` as the user gave it.

    Attributes:
        config: its config.json without keys that do not describe the model; ``sizes``: what is read of it here.
        max_positions: tokens of the longest text.
        labels: names of its classes, in order; empty if its config.json names none.
        tags_tokens: it is a token classifier; ``classifies``: a sequence classifier.
        other_head: its class, if that is neither one of these, nor a bare encoder or a pretraining one.
        has_code: config.json names code, which is not run.
        pooling, normalize, max_length: how a sentence-transformers folder makes embeddings and cuts texts.
        settings: its prompts, and the activation function of a cross-encoder.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    sizes: EncoderFile
    tokenizer: Path
    max_positions: int
    labels: tuple[str, ...]
    classifies: bool
    tags_tokens: bool
    other_head: str | None
    has_code: bool
    pooling: str | None
    normalize: bool
    max_length: int | None
    settings: SentenceSettings

    @property
    def is_cross_encoder(self) -> bool:
        """Whether CrossEncoder of sentence-transformers saved the model."""
        named = ("sentence_transformers", "sbert_ce_default_activation_function")
        return self.settings.model_type == "CrossEncoder" or any(key in self.config for key in named)

    def activation(self) -> Literal["identity", "sigmoid"]:
        """Return the function that makes a score of the only output. Raises InputError for another function.

        Cross-encoders of sentence-transformers name it in one of three places, by version; a cross-encoder without one
        has a sigmoid, and any other model none.
        """
        section = self.config.get("sentence_transformers")
        named = self.settings.activation_fn or (section.get("activation_fn") if isinstance(section, dict) else None)
        named = named or self.config.get("sbert_ce_default_activation_function")
        if named is None:
            return "sigmoid" if self.settings.model_type == "CrossEncoder" else "identity"
        if named not in _ACTIVATIONS:
            raise InputError(
                f"{self.folder}: edgeformer does not compute the activation function {str(named)[:80]!r} of this "
                f"model, only {' and '.join(_ACTIVATIONS)}; {AS_ONNX}"
            )
        return _ACTIVATIONS[named]


def weights_sha256(folder: Path) -> str:
    """Return the checksum of the weights file in a folder; of several files, that of the list of their checksums."""
    path = folder / WEIGHTS
    if path.is_file():
        return sha256_of(path)
    lines = [f"{sha256_of(part)} {part.name}\n" for part in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_source(name: str) -> Source:
    """Open the model in a folder, or the one with that name on the hub.

    Raises:
        InputError: no such folder or model, an unsupported computation, or weights that only unpickling could read.
        ArtifactError: a file is missing or damaged, or contradicts the weights.
    """
    folder = find_folder(name)
    config_path = folder / CONFIG_FILE
    config: dict[str, Any] = read_object(config_path)
    kind = config.get("model_type")
    if kind not in get_args(Architecture):
        allowed = ", ".join(get_args(Architecture))
        raise InputError(f"{config_path}: model_type {kind!r} is not supported; supported are {allowed}; {AS_ONNX}")
    sizes = _validate(EncoderFile, config, config_path)
    unsupported = {
        "is_decoder": sizes.is_decoder,
        "add_cross_attention": sizes.add_cross_attention,
        "position_embedding_type": kind != "modernbert" and sizes.position_embedding_type not in (None, "absolute"),
        "chunk_size_feed_forward": sizes.chunk_size_feed_forward,
        "quantization_config": sizes.quantization_config,
    }
    if kind == "mpnet":
        unsupported["relative_attention_num_buckets"] = sizes.relative_attention_num_buckets not in (None, 32)
    if kind == "deberta-v2":
        terms = sizes.pos_att_type.split("|") if isinstance(sizes.pos_att_type, str) else sizes.pos_att_type or ()
        unsupported |= {
            "relative_attention": not sizes.relative_attention,
            "share_att_key": not sizes.share_att_key,
            "pos_att_type": {term.strip().lower() for term in terms} != {"c2p", "p2c"},
            "position_buckets": sizes.position_buckets == 1,
            "conv_kernel_size": sizes.conv_kernel_size,
            "embedding_size": sizes.embedding_size not in (None, sizes.width),
            "attention_head_size": sizes.attention_head_size not in (None, sizes.width // sizes.heads),
        }
    for key in (key for key, is_set in unsupported.items() if is_set):
        value = f"is {config.get(key)!r}" if key != "quantization_config" else "exists: the weights are quantised"
        raise InputError(f"{config_path}: {key} {value}, which is not supported; use another encoder; {AS_ONNX}")
    weights = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InputError(
            f"{folder}: has no {WEIGHTS}; other formats are not read, because they can run code; if you trust the "
            "model, load it with transformers and save it with save_pretrained(…, safe_serialization=True)"
        )
    # The largest tables and matrices, at one byte per number: no file may make the process allocate far more memory.
    weights_bytes = sum(path.stat().st_size for path in weights)
    rows = sizes.vocab_size + (sizes.type_vocab_size or 0)
    rows += 0 if kind == "modernbert" else sizes.max_position_embeddings
    rows += max(0, sizes.position_buckets or 0, sizes.max_relative_positions or 0) if kind == "deberta-v2" else 0
    layers = (sizes.num_hidden_groups or 1) * (sizes.inner_group_num or 1) if kind == "albert" else sizes.depth
    classes = max(len(sizes.id2label or ()), sizes.num_labels or 0)
    matrix_rows = layers * ((sizes.inner or 0) + sizes.width) + classes
    if rows * (sizes.embedding_size or sizes.width) + matrix_rows * sizes.width > weights_bytes:
        raise ArtifactError(f"{config_path}: describes a larger model than the {weights_bytes:,} bytes of its weights")
    if not (folder / TOKENIZER_FILE).is_file():
        raise InputError(
            f"{folder}: has no {TOKENIZER_FILE}; write it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    pooling, normalize, max_length = _read_sentence_model(folder)
    settings_path = folder / "config_sentence_transformers.json"
    settings = SentenceSettings()
    if settings_path.is_file():
        settings = _validate(SentenceSettings, read_object(settings_path), settings_path)
    heads, labels = sizes.architectures or [], sizes.id2label or {}
    other_heads = [head for head in heads if _DECODER_CLASS.search(head) or not _ENCODER_CLASS.search(head)]
    return Source(
        name=name,
        folder=folder,
        config={key: value for key, value in config.items() if key not in _IGNORED_KEYS},
        sizes=sizes,
        tokenizer=folder / TOKENIZER_FILE,
        max_positions=sizes.positions,
        labels=tuple(str(labels[key]) for key in sorted(labels, key=int)),
        classifies=any("ForSequenceClassification" in head for head in heads),
        tags_tokens=any("ForTokenClassification" in head for head in heads) and pooling is None,
        other_head=other_heads[0] if other_heads and pooling is None else None,  # sentence-transformers uses no head
        has_code="auto_map" in config,
        pooling=pooling,
        normalize=normalize,
        max_length=max_length,
        settings=settings,
    )


def _read_sentence_model(folder: Path) -> tuple[str | None, bool, int | None]:
    """Return pooling, normalisation and length of a sentence-transformers folder. Raises InputError, ArtifactError."""
    modules_path = folder / "modules.json"
    if not modules_path.is_file():
        return None, False, None
    pooling, normalize = None, False
    for module in _validate(RootModel[list[SentenceModule]], read_object(modules_path, list), modules_path).root:
        kind = module.type.rsplit(".", 1)[-1]
        if kind == "Normalize":
            normalize = True
        elif kind == "Pooling":
            if not _FOLDER_NAME.fullmatch(module.path):
                raise InputError(
                    f"{modules_path}: path {module.path[:60]!r} must be a folder in the folder of the model"
                )
            path = folder / module.path / CONFIG_FILE
            config, prefix = read_object(path), "pooling_mode_"
            flags = [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
            modes = {_POOLINGS.get(flag, flag) for flag in flags}
            if (mode := config.get("pooling_mode")) is not None:  # newer folders
                modes.add(str(mode))
            if len(modes) != 1 or not modes <= {*_POOLINGS.values()}:
                listed, allowed = ", ".join(sorted(mode[:60] for mode in modes)), ", ".join(_POOLINGS.values())
                raise InputError(f"{path}: pooling must be one of {allowed}, not {listed or 'none'}; {AS_ONNX}")
            pooling = modes.pop()
        elif kind != "Transformer":
            raise InputError(f"{modules_path}: the module {kind[:60]!r} is not supported; {AS_ONNX}")
    path = folder / "sentence_bert_config.json"
    settings = _validate(SentenceFile, read_object(path), path) if path.is_file() else SentenceFile()
    if settings.do_lower_case:
        normalizer, capitals = tokenizer_from_file(folder / TOKENIZER_FILE).normalizer, "ABXYZÀÉÖЖ"
        if normalizer is None or normalizer.normalize_str(capitals) != normalizer.normalize_str(capitals.lower()):
            raise InputError(
                f"{path}: do_lower_case is true, but {TOKENIZER_FILE} does not lower texts; add a Lowercase to its "
                "normalizer"
            )
    return pooling, normalize, settings.max_seq_length


def find_folder(name: str) -> Path:
    """Return the folder of that name, or the hub's copy. Raises InputError."""
    path = Path(name)
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # too long, for instance
        raise InputError(f"{name[:60]}…: not a folder: {error.__class__.__name__}") from None
    if is_file:
        raise InputError(f"{name}: is a file; give its folder {path.parent}")
    if not _HUB_NAME.fullmatch(name) or name.endswith(_FILE_ENDS):
        raise InputError(f"{name}: not a folder, and not a name on the hub (OWNER/NAME)")
    with needs_extra("hf", "a model of the hub"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the client raises many types, ValueError for an impossible name among them
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name}: not a folder, and the hub does not answer with it: {reason[0]}") from None
