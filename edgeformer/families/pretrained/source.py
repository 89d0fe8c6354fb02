"""A Hugging Face model's folder, or its name on the hub: what is read of it, without torch and without running code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgeformer.data.tokenization import tokenizer_from_file
from edgeformer.formats.errors import ArtifactError, InputError, needs_extra
from edgeformer.formats.files import read_at_most, sha256_of
from edgeformer.formats.workspace import CONFIG_FILE, MOST_JSON_BYTES, TOKENIZER_FILE

ARCHITECTURES = ("albert", "bert", "distilbert", "electra", "modernbert", "roberta")
"""``model_type`` of the encoders that can be taken apart; MiniLM's is ``bert``, or ``roberta``."""
WEIGHTS = "model.safetensors"
_FILES = (
    CONFIG_FILE, TOKENIZER_FILE, "tokenizer_config.json", "vocab.txt", "*.safetensors", "model.safetensors.index.json",
    "modules.json", "*_Pooling/config.json", "sentence_bert_config.json",
)  # fmt: skip
_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}


@dataclass(frozen=True)
class Source:
    """A model's folder.

    Attributes:
        name: as the user gave it.
        config: its config.json, without what says nothing of the model.
        pooling, normalize: of a sentence-transformers folder: how its embeddings are made; None and False: of none.
        max_length: tokens that a sentence-transformers folder cuts its texts to; None: it does not say.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
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
        return any("ForSequenceClassification" in str(name) for name in self.config.get("architectures") or ())

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


def positions_of(architecture: Mapping[str, Any]) -> int:
    """Tokens of the longest text, by a model's config.json."""
    positions = int(architecture["max_position_embeddings"])
    # RoBERTa's first rows are of padding, which stands at no position.
    return positions - int(architecture["pad_token_id"]) - 1 if architecture["model_type"] == "roberta" else positions


def missing_size(architecture: Mapping[str, Any]) -> str | None:
    """The first size that a config.json of a known ``model_type`` lacks, or has as no whole number; None: none."""
    older = architecture.get("model_type") == "distilbert"
    needed = ["max_position_embeddings", "vocab_size"]
    needed += ["n_layers", "n_heads", "dim"] if older else ["num_hidden_layers", "num_attention_heads", "hidden_size"]
    needed += ["pad_token_id"] if architecture.get("model_type") == "roberta" else []
    return next((name for name in needed if type(architecture.get(name)) is not int or architecture[name] < 0), None)


def open_source(name: str) -> Source:
    """The model in a folder, or by that name on the hub.

    Raises:
        InputError: no such folder or model, another architecture, or weights that only unpickling could read.
        ArtifactError: config.json is missing or damaged.
    """
    folder = Path(name) if Path(name).is_dir() else _from_hub(name)
    config = _read_json(folder / CONFIG_FILE)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise InputError(
            f"{folder / CONFIG_FILE}: model_type {kind!r} is not known here; it can be {', '.join(ARCHITECTURES)}"
        )
    if (lacking := missing_size(config)) is not None:
        raise ArtifactError(f"{folder / CONFIG_FILE}: {lacking} is missing, or no whole number")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder}: has no {WEIGHTS}; other formats could run code and are not read. Where you trust it: "
            "load it with transformers and write it again with save_pretrained(…, safe_serialization=True)"
        )
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if _least_bytes(config) > held:
        raise ArtifactError(
            f"{folder / CONFIG_FILE}: describes a model that is larger than the {held:,} bytes beside it"
        )
    if not (folder / TOKENIZER_FILE).is_file():
        raise InputError(
            f"{folder}: has no {TOKENIZER_FILE}; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    told = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
    return Source(name, folder, told, *_sentence_model(folder))


def _least_bytes(architecture: Mapping[str, Any]) -> int:
    """What the largest matrices take at one byte a number, so that nothing is made that no file backs."""
    width = int(architecture.get("hidden_size") or architecture["dim"])
    table = int(architecture["vocab_size"]) * int(architecture.get("embedding_size") or width)
    inner = int(architecture.get("intermediate_size") or architecture.get("hidden_dim") or 0)
    layers = 1 if architecture["model_type"] == "albert" else depth_of(architecture)
    return table + layers * (inner + width) * width


_SAYS_NOTHING = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "gradient_checkpointing")


def _sentence_model(folder: Path) -> tuple[str | None, bool, int | None]:
    """Pooling, normalisation and length of a sentence-transformers folder. Raises InputError for other modules."""
    if not (folder / "modules.json").is_file():
        return None, False, None
    pooling, normalize = None, False
    for module in _read_json(folder / "modules.json", list):
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if kind == "Pooling":
            told = _read_json(folder / Path(path).name / CONFIG_FILE)
            modes = [mode for key, mode in _POOLINGS.items() if told.get(key)]
            modes = modes or [mode for mode in _POOLINGS.values() if told.get("pooling_mode") == mode]
            if len(modes) != 1:
                raise InputError(f"{folder / path}: pooling must be one of {', '.join(_POOLINGS.values())}, not {told}")
            pooling = modes[0]
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise InputError(f"{folder / 'modules.json'}: has a module {kind!r}, which is not known here")
    length = folder / "sentence_bert_config.json"
    return pooling, normalize, _read_json(length).get("max_seq_length") if length.is_file() else None


def _read_json(path: Path, kind: type = dict) -> Any:
    try:
        content = json.loads(read_at_most(path, MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: missing or damaged: {error}") from None
    if not isinstance(content, kind):
        raise ArtifactError(f"{path}: damaged: no JSON {'object' if kind is dict else 'list'}")
    return content


def _from_hub(name: str) -> Path:
    with needs_extra("hf", "a model of the hub"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the client raises a dozen kinds, ValueError for a name that cannot be one among them
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name}: is no folder here, and cannot be had from the hub: {first[0]}") from None
