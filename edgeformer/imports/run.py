"""Folder of a finished run of a model that was trained elsewhere, as training would write it."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TextConfig
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.manifest import Causality, DataSummary, ImportProof, RunManifest
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import MODEL_FOLDER, NEW_RUN, RECIPE_FILE, RUN_FILE, TOKENIZER_FILE, free_folder
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.sources import local_parts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import BEGIN_IDS, TextBounds, fingerprint, load_language_tokenizer
from edgeformer.models import load_recipe, model_spec_of, recipe_type
from edgeformer.models.adapter import count_parameters
from edgeformer.models.blocks.causal import probe_causality
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import save_model
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder
from edgeformer.tasks import Origin, TextReader, get_task

_UNKNOWN_DATA = DataSummary(split="unknown", synthetic=False, rows={}, fingerprint="unknown")


@dataclass(frozen=True)
class ImportOptions:
    """Where the run is written, and what the checkpoint does not hold itself.

    Attributes:
        tokenizer: a tokenizer.json; None: GPT-2's from the hub, which the public code uses.
        data: a folder with train and validation text; None: WikiText-103 from the hub, which is not read now.
        unproven: as in :class:`HfOptions`.
    """

    artifacts: Path
    name: str | None = None
    tokenizer: Path | None = None
    data: Path | None = None
    unproven: bool = False


def reserve_name(artifacts: Path, name: str | None, source: str) -> tuple[str, Callable[[], Path]]:
    """Return the recipe's name for a run of ``source``, and a function that returns the run's folder.

    ``name``: of the run; None: the recipe's. Raises InputError if it is taken.
    """
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", source).lstrip("._-")[:60] or "imported"
    free = partial(free_folder, artifacts, name, slug, or_else="")
    free()
    return slug, free


def write_run(
    free_folder: Callable[[], Path], recipe: Recipe, model: nn.Module, prepared: Prepared[Any], *,
    origin: str, sha256: str | None, golden_origin: str, leaks: bool = False,
    causality: Causality | None = None, proof: ImportProof | None = None,
) -> Path:  # fmt: skip
    """Write the run's folder, which appears when it is complete, and return it. Raises InputError.

    Args:
        prepared: its tokenizer, and the rows that golden inputs are drawn from.
        origin: name of the file or model that it was imported from.
        sha256: of that file; None: there are several.
        golden_origin: where the golden inputs come from.
        causality: result of the probe; None for a model that is meant to see the whole text.
        proof: comparison with the library that the model came from; None: of no known library.
    """
    moment, checksum = now(), f" (sha256 {sha256})" if sha256 is not None else ""

    def write(folder: Path) -> None:
        manifest = RunManifest(
            run=folder.name, status="finished", task=recipe.task, recipe=recipe.name,
            reason=f"imported from {origin}{checksum}; golden inputs {golden_origin}",
            recipe_sha256=recipe.fingerprint(), started=moment, finished=moment, parameters=count_parameters(model),
            vocabulary=recipe.model.vocab_size, precision="unknown", data=prepared.summary,
            tokenizer_fingerprint=fingerprint(prepared.tokenizer), leaks=leaks, causality=causality, proof=proof,
            versions=library_versions(), code_version=code_version(),
            host={**describe_host(), "threads": torch.get_num_threads()},
        )  # fmt: skip
        (folder / MODEL_FOLDER).mkdir()
        save_model(folder / MODEL_FOLDER, model, recipe, prepared)
        write_text(folder / MODEL_FOLDER / CARD_FILE, model_card(manifest, recipe))
        header = f"# Imported from {origin}. Golden inputs: {golden_origin}.\n"
        write_text(folder / RECIPE_FILE, header + recipe.to_yaml())
        write_json(folder / RUN_FILE, manifest)

    return new_folder(NEW_RUN, free_folder, write)


def write_language_run(
    free: Callable[[], Path], base: str, name: str, model: Any, options: ImportOptions, progress: Progress, *,
    description: str, origin: str, sha256: str, tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] = MappingProxyType({}), proof: ImportProof | None = None,
) -> Path:  # fmt: skip
    """Write the run of a language model, with the data and the training of the shipped recipe ``base``.

    Args:
        free: returns the run's folder.
        name, description: of the run's own recipe.
        tokenizer: None: the one of ``options``.
        tokenizer_config: further keys of tokenizer_config.json.
        origin, sha256, proof: as of :func:`write_run`.

    Raises InputError: data or tokenizer do not fit; ArtifactError: the weights are degenerate.
    """
    # 1. Write a recipe
    config, published = model.config, load_recipe(base).model_dump()
    length = min(published["data"]["sequence_length"], config.max_positions)
    data, notes = TextConfig.model_validate({**published["data"], "sequence_length": length}), list[str]()
    if options.data is not None:
        section, notes = local_parts(data, options.data)
        data = cast("TextConfig", section)
    if BEGIN_IDS in tokenizer_config:  # packed rows put no token but the boundary in front of a document
        data = data.model_copy(update={"mode": "paragraphs"})
    source: FileTokenizer | HubTokenizer = HubTokenizer(kind="hub", name="gpt2")
    if options.tokenizer is not None or tokenizer is not None:
        file = options.tokenizer.resolve() if options.tokenizer is not None else free() / MODEL_FOLDER / TOKENIZER_FILE
        source = FileTokenizer(kind="file", path=str(file))
    if len(model.exits) == 1:
        published["training"]["exit_weight"] = 0.0
    document = {
        **published, "name": name, "description": description, "allow_leak": False, "data": data.model_dump(),
        "tokenizer": source.model_dump(), "model": config.model_dump(),
    }  # fmt: skip
    recipe = recipe_type(published["task"], config.kind).model_validate(document)
    for note in notes:
        progress.message(note)

    # 2. Choose golden inputs
    if tokenizer is None:
        tokenizer = load_language_tokenizer(recipe.tokenizer, vocab_size=config.vocab_size, training_texts=None)
    bounds = TextBounds.of(tokenizer, tokenizer_config)
    plain = PlainText(tokenizer, bounds)
    if options.data is not None:
        task, reader = get_task(recipe.task), TextReader(tokenizer, plain.boundary, config.vocab_size, bounds)
        rows = task.rows.read_set(recipe.data, reader, "validation", Origin(as_trained=True))
        golden_origin = "from the validation text"
    else:
        between = bounds.begin or (plain.boundary,)
        encoded = [[*between, *plain.encode(paragraph).ids] for paragraph in PARAGRAPHS]
        ids = np.array([*itertools.chain.from_iterable(encoded), plain.boundary], dtype=np.int32)
        words = sum(len(paragraph.split()) + 1 for paragraph in PARAGRAPHS)
        ends = np.array([0, len(ids)], dtype=np.int64)
        rows = TextRows(ids, ends, len(ids) - 1, words, 0)
        golden_origin = "from a built-in English text"

    # 3. Probe the model, and write the run
    try:
        causality = probe_causality(model)
    except ValueError as error:
        raise ArtifactError(f"{origin}: the causality probe cannot judge this model: {error}") from None
    prepared = Prepared(tokenizer, plain.boundary, rows, rows, {}, _UNKNOWN_DATA, tokenizer_config=tokenizer_config)
    leaks = causality.leaks or model_spec_of(recipe).leaks(config)  # the architecture, whatever the probe measured
    return write_run(
        free, recipe, model, prepared, origin=origin, sha256=sha256, golden_origin=golden_origin, leaks=leaks,
        causality=causality, proof=proof,
    )  # fmt: skip
