"""What export needs to know of a trained model, whatever its task."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from edgeformer.schema.errors import ArtifactError
from edgeformer.schema.files import replacing
from edgeformer.schema.recipes import AnyRecipe
from edgeformer.schema.scores import ClassificationScore, LanguageScore

Array = NDArray[Any]
Logits = NDArray[np.float32]
COMPANIONS = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Exportable:
    """A model in evaluation mode on the CPU, and what its graphs are checked against.

    Attributes:
        graph: the module to export: ``inputs`` in their order → logits float32 [batch, …, C].
        model_parameters: of the whole model, each counted once.
        graph_parameters: those of them that the graph needs; a language model's full graph has no early exit heads.
        inputs: real validation inputs, int64 [n, S] each.
        reference: torch FP32 logits of them, float32 [rows or tokens, C].
        score: logits like ``reference`` → how good they are.
        golden: what golden.npz holds.
        facts: what bundle.json says of this kind of model: labels, exits, leaks, max_length, pad_id.
    """

    recipe: AnyRecipe
    graph: nn.Module
    model_parameters: int
    graph_parameters: int
    inputs: dict[str, NDArray[np.int64]]
    reference: Logits
    score: Callable[[Logits], ClassificationScore | LanguageScore]
    golden: dict[str, Array]
    facts: dict[str, Any] = field(default_factory=dict)

    def rows(self, logits: Logits) -> Logits:
        """A session's logits in the shape of ``reference``."""
        return logits.reshape(-1, logits.shape[-1])


def read_golden_inputs(run: Path, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The arrays that training left for export, int64. Raises ArtifactError."""
    path = run / "model" / "golden_inputs.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None
    if any(array.dtype != np.int64 or 0 in array.shape for array in found.values()):
        raise ArtifactError(f"{path}: damaged (int64 arrays with rows are expected); train the run again")
    return found


def token_id(run: Path, key: str) -> int:
    """A token's number from the model's config.json. Raises ArtifactError."""
    path = run / "model" / "config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: missing or damaged ({key}: {error}); train the run again") from None


def write_companions(folder: Path, run: Path, golden: dict[str, Array]) -> None:
    """Everything beside the graphs: tokenizer, configuration, model card, golden inputs."""
    for name in COMPANIONS:
        source = run / "model" / name
        if not source.is_file():
            raise ArtifactError(f"{source}: missing; train the run again")
        shutil.copyfile(source, folder / name)
    card = run / "model" / "README.md"
    if card.is_file():
        shutil.copyfile(card, folder / "README.md")
    with replacing(folder / "golden.npz") as temporary:
        np.savez(temporary, **golden)  # type: ignore[arg-type]
