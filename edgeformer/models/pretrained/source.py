"""Folders and hub names of Hugging Face models, read without torch and without running their code.

The JSON files come from strangers, so what is read of them is validated before use.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, Field, model_validator
from tokenizers import Tokenizer
from typing_extensions import Self

from edgeformer.artifacts.data_config import Similarity
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.workspace import CONFIG_FILE
from edgeformer.data.source_folder import ConfigFile, SourceFolder, read_object, refuse_keys, validate_file
from edgeformer.data.tokenization import source_tokenizer

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
_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
_ACTIVATIONS: Mapping[str, Literal["identity", "sigmoid"]] = {
    "torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Sigmoid": "sigmoid",
}  # fmt: skip
"""Functions of sentence-transformers that make a score of a model's output."""
_SETTINGS_WITHOUT_EFFECT = {"__version__", "requirements", "keep_in_fp32_modules"}
"""Keys of config_sentence_transformers.json that do not change what a model computes in FP32."""
_ORDER = ("Transformer", "Pooling", "Dropout", "Normalize")
"""Modules of sentence-transformers that compute here, in their order; Dropout has no effect."""
_ENCODER_CLASS = re.compile("(Model|ForMaskedLM|ForPreTraining|ForSequenceClassification|ForTokenClassification)$")
_DECODER_CLASS = re.compile("(LMHead|Decoder)Model$")

# Every key of config.json that transformers' configuration classes know is in a field of EncoderFile, in one of these
# two sets, or refused by `_unsupported`. Keys that the classes do not know change nothing there either.

TRANSFORMERS_KEYS = frozenset((
    "activation", "attention_bias", "attention_dropout", "attention_probs_dropout_prob", "classifier_activation",
    "classifier_bias", "classifier_dropout", "classifier_dropout_prob", "classifier_pooling", "dropout",
    "embedding_dropout", "global_attn_every_n_layers", "global_rope_theta", "hidden_act", "hidden_activation",
    "hidden_dropout_prob", "initializer_cutoff_factor", "initializer_range", "layer_types", "local_attention",
    "local_rope_theta", "mlp_bias", "mlp_dropout", "norm_bias", "norm_rel_ebd", "pooler_dropout", "pooler_hidden_act",
    "pooler_hidden_size", "position_biased_input", "rope_parameters", "seq_classif_dropout", "sinusoidal_pos_embds",
))  # fmt: skip
"""Keys that the layers and heads of transformers read, which compute here, too."""
IGNORED_KEYS = frozenset((
    "_name_or_path", "auto_map", "bos_token_id", "cls_token_id", "decoder_bias", "deterministic_flash_attn", "dtype",
    "eos_token_id", "gradient_checkpointing", "label2id", "legacy", "output_attentions", "output_hidden_states",
    "qa_dropout", "return_dict", "sep_token_id", "sparse_pred_ignore_index", "sparse_prediction", "summary_activation",
    "summary_last_dropout", "summary_type", "summary_use_proj", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
))  # fmt: skip
"""Keys that do not change what an encoder or a classifier computes."""


class EncoderFile(ConfigFile):
    """Keys of config.json that are read here. Transformers reads and checks ``TRANSFORMERS_KEYS``."""

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
    is_encoder_decoder: bool | None = None
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
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: Any = None
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
        default = _TOKEN_TYPES.get(self.model_type, 0)
        return default if self.type_vocab_size is None or self.model_type not in _TOKEN_TYPES else self.type_vocab_size


class PoolingFile(ConfigFile):
    """1_Pooling/config.json of sentence-transformers: ``pooling_mode``, or in older folders a flag per mode."""

    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True


class SentenceSettings(ConfigFile):
    """config_sentence_transformers.json."""

    model_type: Literal["SentenceTransformer", "CrossEncoder"] | None = None  # the second one scores pairs
    activation_fn: str | None = None  # makes its scores
    prompts: dict[str, str | None] | None = None  # name → text in front of a text
    default_prompt_name: str | None = None  # of texts that are neither a query nor a document
    similarity_fn_name: Similarity | None = None
    truncate_dim: Size | None = None  # first numbers of a vector that are kept

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_prompt_name and self.default_prompt_name not in (self.prompts or {}):
            raise ValueError(f"lacks its default prompt {self.default_prompt_name!r}; copy the model again")
        return self

    @property
    def used_prompts(self) -> dict[str, str]:
        """Texts in front of a ``query``, a ``document`` and, as ``default``, of any text; none is empty."""
        names = {"query": "query", "document": "document", "default": self.default_prompt_name or ""}
        prompts = {kind: (self.prompts or {}).get(name) for kind, name in names.items()}
        return {kind: prompt for kind, prompt in prompts.items() if prompt}


@dataclass(frozen=True)
class Source:
    """A model's folder, under its ``name`` as the user gave it."""

    name: str
    files: SourceFolder
    config: Mapping[str, Any]  # its config.json without keys that do not describe the model
    sizes: EncoderFile  # what is read of it here
    max_positions: int  # tokens of the longest text
    labels: tuple[str, ...]  # names of its classes, in order; empty if its config.json names none
    classifies: bool  # it is a sequence classifier
    tags_tokens: bool  # it is a token classifier
    other_head: str | None  # its class, if neither one of these, nor a bare encoder or a pretraining one
    has_code: bool  # config.json names code, which is not run
    pooling: str | None  # how a sentence-transformers folder makes embeddings
    normalize: bool
    pools_prompt: bool  # the prompt is pooled, too
    settings: SentenceSettings  # its prompts, and the activation function of a cross-encoder

    @property
    def folder(self) -> Path:
        """Folder of its configuration and weights."""
        return self.files.folder

    @cached_property
    def _tokenizer(self) -> tuple[Tokenizer, int | None]:
        return source_tokenizer(self.files)

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, as transformers builds it; see :func:`source_tokenizer`, also for errors."""
        return self._tokenizer[0]

    @property
    def max_length(self) -> int | None:
        """Tokens that its library cuts texts to; None: no file states a number, and transformers cuts none."""
        return self._tokenizer[1] or (self.max_positions if self.files.modules is not None else None)

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
    # 1. Read config.json, and refuse what is not computed
    files = SourceFolder.open(name)
    folder, config_path = files.folder, files.folder / CONFIG_FILE
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder / 'adapter_config.json'}: the model has an adapter, which is not supported; merge it into the "
            "weights (merge_and_unload of the package peft), and save the model again"
        )
    config: dict[str, Any] = read_object(config_path)
    kind = config.get("model_type")
    if kind not in get_args(Architecture):
        allowed = ", ".join(get_args(Architecture))
        raise InputError(f"{config_path}: model_type {kind!r} is not supported; supported are {allowed}; {AS_ONNX}")
    sizes = validate_file(EncoderFile, config, config_path)
    for key in (key for key, is_set in _unsupported(sizes).items() if is_set):
        value = f"is {config.get(key)!r}" if key != "quantization_config" else "exists: the weights are quantised"
        raise InputError(f"{config_path}: {key} {value}, which is not supported; use another encoder; {AS_ONNX}")

    # 2. Compare the sizes with the weights
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

    # 3. Read the settings of sentence-transformers
    settings_path = files.root / "config_sentence_transformers.json"
    settings = SentenceSettings()
    if files.modules is not None and settings_path.is_file():
        content = read_object(settings_path)
        refuse_keys(settings_path, content, {*SentenceSettings.model_fields, *_SETTINGS_WITHOUT_EFFECT})
        settings = validate_file(SentenceSettings, content, settings_path)
    pooling, normalize, pools_prompt, last = None, False, True, 0
    for module in files.modules or ():
        module_path = files.root / module.path / CONFIG_FILE
        if module.type not in _ORDER or _ORDER.index(module.type) < last:
            problem = "not supported" if module.type not in _ORDER else f"not supported behind {_ORDER[last]}"
            raise InputError(f"{files.root / 'modules.json'}: the module {module.type[:60]!r} is {problem}; {AS_ONNX}")
        last = _ORDER.index(module.type)
        if module.type == "Normalize":
            normalize = True
            module_file = read_object(module_path) if module.path and module_path.is_file() else {}
            unusual = {key: value for key, value in module_file.items() if value != "sentence_embedding"}
            refuse_keys(module_path, unusual, ())
        elif module.type == "Pooling":
            module_file, prefix = read_object(module_path), "pooling_mode_"
            pooling_file = validate_file(PoolingFile, module_file, module_path)
            flags = [key.removeprefix(prefix) for key in module_file if key.startswith(prefix)]
            modes = [_POOLINGS.get(flag, flag) for flag in flags if module_file[prefix + flag]] or ["mean"]
            if (stated := pooling_file.pooling_mode) is not None:  # newer folders
                modes = [stated] if isinstance(stated, str) else stated
            pooling_keys = {*PoolingFile.model_fields, "word_embedding_dimension", "embedding_dimension"}
            refuse_keys(module_path, module_file, pooling_keys | {prefix + flag for flag in flags})
            pools_prompt = pooling_file.include_prompt
            listed, known = ", ".join(mode[:60] for mode in modes), ", ".join(_POOLINGS.values())
            if len(modes) != 1 or modes[0] not in _POOLINGS.values():
                raise InputError(f"{module_path}: pooling must be one of {known}, not {listed or 'none'}; {AS_ONNX}")
            if not pools_prompt and modes == ["cls"]:
                problem = "include_prompt: false is not supported with the pooling cls"
                raise InputError(f"{module_path}: {problem}; {AS_ONNX}")
            pooling = modes[0]

    # 4. Describe the source
    heads, labels = sizes.architectures or [], sizes.id2label or {}
    other_heads = [head for head in heads if _DECODER_CLASS.search(head) or not _ENCODER_CLASS.search(head)]
    return Source(
        name=name, files=files, sizes=sizes, max_positions=sizes.positions,
        config={key: value for key, value in config.items() if key not in IGNORED_KEYS},
        labels=tuple(str(labels[key]) for key in sorted(labels, key=int)),
        classifies=any("ForSequenceClassification" in head for head in heads),
        tags_tokens=any("ForTokenClassification" in head for head in heads) and pooling is None,
        other_head=other_heads[0] if other_heads and pooling is None else None,  # sentence-transformers uses no head
        has_code="auto_map" in config, pooling=pooling, normalize=normalize, pools_prompt=pools_prompt,
        settings=settings,
    )  # fmt: skip


def _unsupported(sizes: EncoderFile) -> dict[str, bool]:
    """Return the keys of config.json that are refused, and whether each has such a value."""
    kind = sizes.model_type
    rope = [sizes.rope_parameters or {}, *(sizes.rope_parameters or {}).values()]  # of all layers, or of each kind
    unsupported = {
        "is_decoder": bool(sizes.is_decoder),
        "is_encoder_decoder": bool(sizes.is_encoder_decoder),
        "add_cross_attention": bool(sizes.add_cross_attention),
        "position_embedding_type": kind != "modernbert" and sizes.position_embedding_type not in (None, "absolute"),
        "chunk_size_feed_forward": bool(sizes.chunk_size_feed_forward),
        "rope_parameters": any(isinstance(p, dict) and p.get("rope_type", "default") != "default" for p in rope),
        "rope_scaling": sizes.rope_scaling is not None,
        "quantization_config": bool(sizes.quantization_config),
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
            "conv_kernel_size": bool(sizes.conv_kernel_size),
            "embedding_size": sizes.embedding_size not in (None, sizes.width),
            "attention_head_size": sizes.attention_head_size not in (None, sizes.width // sizes.heads),
        }
    return unsupported
