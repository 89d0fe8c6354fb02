"""The teacher of a training: the run that ``training.teacher`` names, and its logits for all training texts."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.artifacts.files import replacing, sha256_of
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import MODEL_FOLDER, TOKENIZER_FILE
from edgeformer.data.batching import cut_batches
from edgeformer.data.encoding import Prepared, encode_texts
from edgeformer.data.rows import Text
from edgeformer.data.tokenization import special_ids, tokenizer_from_file
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import run_scorer
from edgeformer.models.weights import WEIGHTS, load_model
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
    fold: Any = getattr(model, "fold", None)
    if getattr(fold, "weights", None) == "teacher":
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
        self._identity = hashlib.sha256(" ".join([teacher.fingerprint(), *checksums]).encode()).hexdigest()[:24]

    def logits(self, prepared: Prepared[Any], cache: Path, progress: Progress) -> NDArray[np.float32]:
        """Return the logits of all training texts, float32 [n, C].

        A file in ``cache`` keeps those of every text, for other students and for a training that is started again.
        """
        path, texts = cache / f"teacher-{self._identity}.npz", prepared.train_texts
        assert texts is not None
        known_keys, known = self._read(path, progress)
        keys = _text_keys(texts())
        is_missing = ~np.isin(keys, known_keys)
        count = int(is_missing.sum())
        if count:
            missing_keys, missing = keys[is_missing], itertools.compress(texts(), is_missing)
            scorer = self._scorer()
            with bar(progress, f"Computing the logits of the teacher {self._folder.name}", count, "texts"):
                for start in range(0, count, _TEXTS_AT_ONCE):
                    computed = self._compute(scorer, list(itertools.islice(missing, _TEXTS_AT_ONCE)), progress)
                    known_keys = np.concatenate([known_keys, missing_keys[start : start + _TEXTS_AT_ONCE]])
                    known_keys, places = np.unique(known_keys, return_index=True)
                    known = np.concatenate([known, computed])[places]
                    with replacing(path) as temporary, temporary.open("wb") as file:
                        np.savez(file, keys=known_keys, logits=known)
        return known[np.searchsorted(known_keys, keys)]

    def seconds(self, prepared: Prepared[Any], cache: Path) -> float:
        """Predict how long :meth:`logits` takes, from some of the texts; 0: the logits of all are in ``cache``."""
        assert prepared.train_texts is not None
        known_keys, _ = self._read(cache / f"teacher-{self._identity}.npz", SILENT)
        is_missing = ~np.isin(_text_keys(prepared.train_texts()), known_keys)
        count = int(is_missing.sum())
        if not count:
            return 0.0
        missing = itertools.compress(prepared.train_texts(), is_missing)
        some = list(itertools.islice(missing, 0, None, max(1, count // _TIMED_TEXTS)))
        scorer = self._scorer()
        started = time.perf_counter()
        self._compute(scorer, some, SILENT)
        return (time.perf_counter() - started) / len(some) * count

    def _read(self, path: Path, progress: Progress) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return the keys of the texts in a file, ascending, and their logits."""
        if path.is_file():
            with (
                suppress(OSError, ValueError, KeyError, BadZipFile),
                path.open("rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                keys, logits = arrays["keys"], arrays["logits"]
                if logits.shape == (len(keys), self._recipe.classes):
                    return keys, logits
            progress.message(f"{path}: is damaged, so the teacher's logits are computed again")
        return np.empty(0, np.uint64), np.empty((0, self._recipe.classes), np.float32)

    def _scorer(self) -> Any:
        model = load_model(self._folder).to(self._device)
        return model_spec_of(self._recipe).adapter.scorer(model).eval()

    def _compute(self, scorer: Any, texts: list[Text], progress: Progress) -> NDArray[np.float32]:
        """Return the logits of the texts, with progress."""

        def run(inputs: Arrays) -> Arrays:
            with torch.inference_mode():
                outputs = run_scorer(
                    scorer, {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
                )
            progress.advance(len(inputs["input_ids"]))
            return {"logits": outputs["logits"].float().cpu().numpy()}

        encoded, _ = encode_texts(self._tokenizer, texts, self._recipe.data.max_length)
        batches = cut_batches(encoded.lengths, BATCH_ROWS, BATCH_TOKENS)
        logits: NDArray[np.float32] = answer_rows(run, encoded, special_ids(self._tokenizer).pad, batches)["logits"]
        return logits


def _text_keys(texts: Iterator[Text]) -> NDArray[np.uint64]:
    """Return a hash of each text."""
    contents = ((text if isinstance(text, str) else "\0".join(text)).encode("utf-8") for text in texts)
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64)
