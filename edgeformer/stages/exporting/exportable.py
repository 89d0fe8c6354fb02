"""What export needs to know of a trained model, whatever its task."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.families.exit_graphs import CRTExits, EncoderExits
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import replacing, write_json
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.scores import ClassificationScore, LanguageScore
from edgeformer.stages.exporting.hub_config import hub_config

Array = NDArray[Any]
Logits = NDArray[np.float32]
T = TypeVar("T")
COMPANIONS = ("tokenizer.json", "tokenizer_config.json")


class Scoring(Protocol):
    """How good logits are on the golden inputs."""

    def __call__(
        self, exit_: int, logits: Logits, rows: NDArray[np.int64] | None = None
    ) -> ClassificationScore | LanguageScore:
        """Score logits [n, C] of an exit. ``rows``: which golden rows or tokens they are of; None: all."""
        ...


@dataclass(frozen=True)
class Exportable:
    """A model in evaluation mode on the CPU, and what its graphs are checked against.

    Attributes:
        model: the model itself; the step and decode graphs are made of it.
        exits: all of its exits and the states after every loop as one module, ``inputs`` in their order.
        parameters: of the whole model, each counted once.
        needed: exit → parameters that its graph needs; the last exit is the full graph.
        inputs: real validation inputs, int64 [n, S] each.
        references: exit → torch FP32 logits of the inputs, float32 [rows or tokens, C].
        states: loop → torch FP32 hidden states, float32 [n, S, d].
        score: how good logits like ``references``, or some rows of them, are.
        golden: what golden.npz holds.
        facts: what bundle.json says of this kind of model: labels, exits, leaks, max_length, pad_id.
    """

    recipe: AnyRecipe
    model: EncoderClassifier | CRT
    exits: EncoderExits | CRTExits
    parameters: int
    needed: dict[int, int]
    inputs: dict[str, NDArray[np.int64]]
    references: dict[int, Logits]
    states: dict[int, Logits]
    score: Scoring
    golden: dict[str, Array]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last exit: that of the full graph."""
        return self.exits.exits[-1]

    def rows(self, logits: Logits) -> Logits:
        """A session's logits in the shape of ``references``."""
        return logits.reshape(-1, logits.shape[-1])


@torch.inference_mode()
def run_exits(
    exits: EncoderExits | CRTExits, inputs: dict[str, NDArray[np.int64]]
) -> tuple[dict[int, Tensor], dict[int, Logits]]:
    """Logits of every exit, as the model gives them, and the states after every loop."""
    outputs = exits(*map(torch.from_numpy, inputs.values()))
    count = len(exits.exits)
    states = {loop: state.numpy() for loop, state in enumerate(outputs[count:], start=1)}
    return dict(zip(exits.exits, outputs[:count], strict=True)), states


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


def from_config(run: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """What ``take`` makes of the model's config.json. Raises ArtifactError."""
    path = run / "model" / "config.json"
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


def token_id(run: Path, key: str) -> int:
    """A token's number from the model's config.json. Raises ArtifactError."""
    return from_config(run, lambda config: int(config[key]))


def write_companions(folder: Path, run: Path, golden: dict[str, Array]) -> None:
    """Everything beside the graphs: tokenizer, configuration, model card, golden inputs."""
    for name in COMPANIONS:
        source = run / "model" / name
        if not source.is_file():
            raise ArtifactError(f"{source}: missing; train the run again")
        shutil.copyfile(source, folder / name)
    write_json(folder / "config.json", from_config(run, hub_config))
    card = run / "model" / "README.md"
    if card.is_file():
        shutil.copyfile(card, folder / "README.md")
    with replacing(folder / "golden.npz") as temporary:
        np.savez(temporary, **golden)  # type: ignore[arg-type]
