"""A Hugging Face model's folder, or its name on the hub: what is read of it, without torch and without running code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgeformer.data.tokenization import tokenizer_from_file
from edgeformer.families.pretrained.described import (
    AS_ONNX,
    Encoder,
    Modules,
    Texts,
    check_tables,
    checked,
    pooling_of,
    read_json,
    read_object,
    refuse_other_computations,
)
from edgeformer.formats.errors import ArtifactError, InputError, needs_extra
from edgeformer.formats.files import sha256_of
from edgeformer.formats.workspace import CONFIG_FILE, TOKENIZER_FILE

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
