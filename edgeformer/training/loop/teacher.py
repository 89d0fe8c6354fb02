"""The teacher of a training: the run that ``training.teacher`` names, and its logits for all training texts."""

import hashlib
import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import MODEL_FOLDER, TOKENIZER_FILE
from edgeformer.data.batching import cut_batches
from edgeformer.data.encoding import Prepared, encode_texts
from edgeformer.data.rows import text_parts
from edgeformer.data.splits import content_hash
from edgeformer.data.tokenization import special_ids, tokenizer_from_file
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import run_scorer
from edgeformer.models.weights import WEIGHTS, load_model
from edgeformer.run import Run, locate
from edgeformer.tasks.arrays import Arrays
from edgeformer.tasks.scoring import BATCH_ROWS, BATCH_TOKENS, answer_rows
from edgeformer.training.loop.frozen import CPU, CachedOutputs, Compute

_TEXTS_AT_ONCE = 8192


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

    A file in the folder ``cache`` keeps the logits of every text, for other students and for a training that is started
    again. Raises RecipeError if its labels are not those of the student.
    """

    def __init__(self, recipe: Any, cache: Path, device: torch.device = CPU) -> None:
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
        identity = hashlib.sha256(" ".join([teacher.fingerprint(), *checksums]).encode()).hexdigest()[:24]
        title = f"the logits of the teacher {folder.name}"
        self._cached = CachedOutputs(cache / f"teacher-logits-{identity}.npz", teacher.classes, title)

    def logits(self, prepared: Prepared[Any], progress: Progress) -> NDArray[np.float32]:
        """Return the logits of all training texts, float32 [n, C]."""
        return self._cached.complete(*self._inputs(prepared, progress), progress)

    def seconds(self, prepared: Prepared[Any]) -> float:
        """Predict how long :meth:`logits` takes, from some of the texts; 0: the logits of all are in the file."""
        return self._cached.seconds(*self._inputs(prepared, SILENT))

    def _inputs(self, prepared: Prepared[Any], progress: Progress) -> tuple[NDArray[np.uint64], Compute]:
        """Return the keys of the training texts, and the function that computes their logits."""
        texts = prepared.train_texts
        assert texts is not None
        contents = ("\0".join(text_parts(text)).encode() for text in texts())

        def run(inputs: Arrays) -> Arrays:
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
            with torch.inference_mode():
                outputs = run_scorer(self._scorer, tensors)
            progress.advance(len(inputs["input_ids"]))
            return {"logits": outputs["logits"].float().cpu().numpy()}

        def compute(is_computed: NDArray[np.bool_]) -> Iterator[NDArray[np.float32]]:
            missing, pad = itertools.compress(texts(), is_computed), special_ids(self._tokenizer).pad
            while some := list(itertools.islice(missing, _TEXTS_AT_ONCE)):
                encoded, _ = encode_texts(self._tokenizer, some, self._recipe.data.max_length)
                batches = cut_batches(encoded.lengths, BATCH_ROWS, BATCH_TOKENS)
                yield answer_rows(run, encoded, pad, batches)["logits"]

        return np.fromiter(map(content_hash, contents), np.uint64), compute

    @cached_property
    def _scorer(self) -> Any:
        model = load_model(self._folder).to(self._device)
        return model_spec_of(self._recipe).adapter.scorer(model).eval()
