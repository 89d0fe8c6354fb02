"""The teacher of a training: the run that ``training.teacher`` names, and its logits for all training texts."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.artifacts.files import replacing, sha256_of
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import TOKENIZER_FILE
from edgeformer.data.batching import cut_batches
from edgeformer.data.encoding import Prepared, encode_texts
from edgeformer.data.rows import Text
from edgeformer.data.tokenization import special_ids, tokenizer_from_file
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import run_scorer
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS, load_model
from edgeformer.run import Run, locate
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.scoring import BATCH_ROWS, BATCH_TOKENS, answer_rows

CPU = torch.device("cpu")
_TEXTS_AT_ONCE = 8192
_TIMED_TEXTS = 256


def with_teacher(recipe: Recipe, artifacts: Path) -> Recipe:
    """Return ``recipe`` with the folder and the weights' checksum of its teacher; unchanged if it names none.

    The run then records its teacher, whose name refers to the folder of runs, and is resumed with the same one only.
    Raises RecipeError for no such run, an unfinished one, or other weights than the recipe was made for.
    """
    training: Any = recipe.training
    name = getattr(training, "teacher", None)
    if name is None:
        return recipe
    key = f"training.teacher: {name}"
    try:
        folder = locate(name, artifacts).require_run()
        Run.open(folder).require_finished()
    except ArtifactError as error:
        raise RecipeError(f"{key}: {error}; give a finished run or its folder") from None
    weights = folder / MODEL_FOLDER / WEIGHTS
    if not weights.is_file():
        raise RecipeError(f"{key}: has no weights ({weights}); copy the whole run again")
    sha256 = sha256_of(weights)
    if training.teacher_sha256 not in (None, sha256):
        raise RecipeError(
            f"{key}: its weights changed since the recipe was made (training.teacher_sha256); remove that key to use "
            "them anyway"
        )
    changed = training.model_copy(update={"teacher": str(folder.resolve()), "teacher_sha256": sha256})
    return recipe.model_copy(update={"training": changed})


def without_teacher(recipe: Recipe) -> Recipe:
    """Return ``recipe`` without its teacher, for planning where the teacher is not available.

    A student that starts with layers of its teacher starts with those of the source, which have the same size.
    """
    model: Any = recipe.model
    fold = getattr(model, "fold", None)
    if fold is not None and fold.weights == "teacher":
        model = model.model_copy(update={"fold": fold.model_copy(update={"weights": "source"})})
    training = recipe.training.model_copy(update={"teacher": None})
    return recipe.model_copy(update={"model": model, "training": training})


class Teacher:
    """The teacher of a recipe that :func:`with_teacher` returned. It reads raw texts with its own tokenizer.

    Raises RecipeError if its labels are not those of the student.
    """

    def __init__(self, recipe: Any, device: torch.device = CPU) -> None:
        folder = Path(recipe.training.teacher)
        teacher: Any = read_run_recipe(folder)
        if teacher.task != recipe.task or teacher.data.labels != recipe.data.labels:
            raise RecipeError(
                f"training.teacher: {folder}: its labels differ from those of this recipe "
                f"({', '.join(recipe.data.labels)}); use the same labels in the same order"
            )
        self._recipe, self._folder, self._device = teacher, folder, device
        tokenizer_file = folder / MODEL_FOLDER / TOKENIZER_FILE
        self._tokenizer = tokenizer_from_file(tokenizer_file)
        checksums = [sha256_of(path) for path in (folder / MODEL_FOLDER / WEIGHTS, tokenizer_file)]
        self._identity = " ".join([teacher.fingerprint(), *checksums])

    def logits(self, prepared: Prepared[Any], cache: Path, progress: Progress) -> NDArray[np.float32]:
        """Return the logits of all training texts, float32 [n, C].

        A file in ``cache`` keeps them for other students of the same teacher on the same texts.
        """
        path, count = self.file(prepared, cache), len(prepared.train)
        if path.is_file():
            with suppress(OSError, ValueError):
                stored: NDArray[np.float32] = np.load(path, allow_pickle=False)
                if stored.shape == (count, self._recipe.classes) and stored.dtype == np.float32:
                    return stored
            progress.message(f"{path}: is damaged, so the teacher's logits are computed again")
        assert prepared.train_texts is not None
        with bar(progress, f"Computing the logits of the teacher {self._folder.name}", count, "texts"):
            computed = self._compute(prepared.train_texts(), progress)
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, computed)
        return computed

    def file(self, prepared: Prepared[Any], cache: Path) -> Path:
        """Return the file in ``cache`` for the logits of all training texts."""
        identity = f"{self._identity} {prepared.summary.fingerprints['train']}"
        return cache / f"teacher-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.npy"

    def seconds(self, prepared: Prepared[Any]) -> float:
        """Predict how long :meth:`logits` takes, from some of the texts."""
        assert prepared.train_texts is not None
        count = len(prepared.train)
        some = list(itertools.islice(prepared.train_texts(), 0, None, max(1, count // _TIMED_TEXTS)))
        started = time.perf_counter()
        self._compute(iter(some), SILENT)
        return (time.perf_counter() - started) / len(some) * count

    def _compute(self, texts: Iterator[Text], progress: Progress) -> NDArray[np.float32]:
        """Return the logits of the texts, with progress."""
        model = load_model(self._folder).to(self._device)
        scorer = model_spec_of(self._recipe).adapter.scorer(model).eval()

        def run(inputs: Arrays) -> Arrays:
            with torch.inference_mode():
                outputs = run_scorer(
                    scorer, {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
                )
            progress.advance(len(inputs["input_ids"]))
            return {"logits": outputs["logits"].float().cpu().numpy()}

        pieces, pad = [], special_ids(self._tokenizer).pad
        while window := list(itertools.islice(texts, _TEXTS_AT_ONCE)):
            encoded, _ = encode_texts(self._tokenizer, window, self._recipe.data.max_length)
            batches = cut_batches(encoded.lengths, BATCH_ROWS, BATCH_TOKENS)
            pieces.append(answer_rows(run, encoded, pad, batches)["logits"])
        return np.concatenate(pieces)
