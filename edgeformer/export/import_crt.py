"""import crt: a checkpoint of the public CRT code becomes a run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TextConfig
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import AttentionUse, DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import free_folder
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.language import prepare_text_set
from edgeformer.data.sources import local_text_parts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.export.imported_run import Imported, read_weights, write_run
from edgeformer.models import load_recipe, recipe_type
from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.adapter import build_crt, probe_causality
from edgeformer.models.crt.checkpoint import config_of, convert
from edgeformer.tasks.language_modeling import LanguageRecipe

_UNKNOWN = DataSummary(split="unknown", synthetic=False, rows={}, fingerprint="unknown")
_NAME, _PUBLISHED = "crt_imported", "crt_deep_published"


@dataclass(frozen=True)
class ImportOptions:
    """Where the run goes, and what the checkpoint does not hold itself.

    Attributes:
        tokenizer: a tokenizer.json; None: GPT-2's from the hub, which the public code uses.
        data: a folder with train and validation text; None: WikiText-103 from the hub, which is not read now.
    """

    artifacts: Path
    name: str | None = None
    tokenizer: Path | None = None
    data: Path | None = None


def import_crt(path: Path, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of ``path`` and return its folder.

    Raises:
        InputError: checkpoint, tokenizer, data or name cannot be used; nothing was written.
    """
    free = partial(free_folder, options.artifacts, options.name, _NAME, or_else="")
    free()  # before the work: the name may be taken
    weights = read_weights(path)
    config = config_of(weights, str(path))
    model = build_crt(config)
    model.load_state_dict(convert(weights, config, str(path)))
    model.eval()
    recipe, notes = _recipe(path, config, options)
    for note in notes:
        progress.message(note)
    tokenizer = load_language_tokenizer(recipe.tokenizer, vocab_size=config.vocab_size, training_texts=None)
    prepared, golden = _prepared(recipe, tokenizer, from_data=options.data is not None)
    try:
        causality = probe_causality(model)
    except ValueError as error:
        raise ArtifactError(f"{path}: cannot be probed for leaks: {error}") from None
    found = Imported(
        recipe=recipe,
        model=model,
        attention=AttentionUse(requested="sdpa", used="sdpa"),
        prepared=prepared,
        origin=path.name,
        sha256=sha256_of(path),
        golden=golden,
        # By its architecture, whatever the probe saw of it.
        leaks=causality.leaks or not model.causal,
        causality=causality,
    )
    return write_run(free, found)


def _recipe(path: Path, config: CRTConfig, options: ImportOptions) -> tuple[LanguageRecipe, list[str]]:
    """The published protocol around this model, and notes. Raises DataError."""
    published = load_recipe(_PUBLISHED).model_dump()
    length = min(published["data"]["sequence_length"], config.max_positions)
    data, notes = TextConfig.model_validate({**published["data"], "sequence_length": length}), list[str]()
    if options.data is not None:
        data, notes = local_text_parts(data, options.data)
    file = None if options.tokenizer is None else FileTokenizer(kind="file", path=str(options.tokenizer.resolve()))
    if not config.exits:
        published["training"]["exit_weight"] = 0.0
    document = {
        **published,
        "name": _NAME,
        "description": f"CRT-Deep, imported from {path.name}; looks ahead, so its perplexity means nothing",
        "allow_leak": False,
        "data": data.model_dump(),
        "tokenizer": (file or HubTokenizer(kind="hub", name="gpt2")).model_dump(),
        "model": config.model_dump(),
    }
    found: LanguageRecipe = recipe_type(published["task"], config.kind).model_validate(document)
    return found, notes


def _prepared(recipe: LanguageRecipe, tokenizer: Tokenizer, *, from_data: bool) -> tuple[Prepared[TextRows], str]:
    """Real text for the golden inputs, and what it is."""
    plain = PlainText(tokenizer)
    if from_data:
        rows, golden = prepare_text_set(recipe.data, tokenizer, None, "validation"), "from the validation text"
    else:
        encoded = [[*plain.encode(paragraph).ids, plain.boundary] for paragraph in PARAGRAPHS]
        ids = [plain.boundary, *itertools.chain.from_iterable(encoded)]
        words = sum(len(paragraph.split()) + 1 for paragraph in PARAGRAPHS)
        stream, ends = np.array(ids, dtype=np.int32), np.array([0, len(ids)], dtype=np.int64)
        rows = TextRows(stream, ends, None, len(ids) - 1, words, len(PARAGRAPHS), 0)
        golden = "from a short built-in English text, not from the model's own data"
    return Prepared(tokenizer, plain.boundary, rows, rows, {}, _UNKNOWN), golden
