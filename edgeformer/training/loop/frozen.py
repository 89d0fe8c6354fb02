"""Models that training does not change: their outputs are kept in a file, and a head can be fitted to them."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.units import format_bytes
from edgeformer.data.batching import IGNORED, collate, cut_batches
from edgeformer.data.splits import content_hash
from edgeformer.models.adapter import run_scorer, sharing_copy
from edgeformer.models.linear.fitting import binary_cross_entropy, cross_entropy, minimize
from edgeformer.system.memory import host_free_bytes
from edgeformer.tasks import Prepared, get_task
from edgeformer.tasks.scoring import BATCH_ROWS

CPU = torch.device("cpu")
Compute = Callable[[NDArray[np.bool_]], Iterator[NDArray[np.float32]]]
"""(which texts, bool [n]) → their outputs in order, in pieces [k, width], each of which is saved."""
_TIMED_TEXTS = 256
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Values of C that are fitted."""
_ROWS_AT_ONCE = 4096
_MOST_ITERATIONS, _TOLERANCE = 100, 1e-7
_FIT_S = 7e-9
"""Seconds of the fit per row, dimension, class and value of C: 2e-9 with 77 classes, 1.5e-8 with 4, on two cores."""


@dataclass(frozen=True)
class CachedOutputs:
    """Outputs float32 [n, width] of texts, which have a key each. ``title`` describes them for people."""

    path: Path
    width: int
    title: str

    def complete(self, keys: NDArray[np.uint64], compute: Compute, progress: Progress) -> NDArray[np.float32]:
        """Return the outputs of all texts; those that the file lacks are computed and added to it."""
        stored_keys, stored = self._read(progress)
        is_missing = ~np.isin(keys, stored_keys)
        if is_missing.any():
            missing_keys = keys[is_missing]
            with bar(progress, f"Computing {self.title}", len(missing_keys), "texts"):
                for piece in compute(is_missing):
                    both_keys = np.concatenate([stored_keys, missing_keys[: len(piece)]])
                    missing_keys = missing_keys[len(piece) :]
                    stored_keys, places = np.unique(both_keys, return_index=True)
                    stored = np.concatenate([stored, piece])[places]
                    with replacing(self.path) as temporary, temporary.open("wb") as file:
                        np.savez(file, keys=stored_keys, outputs=stored)
        return stored[np.searchsorted(stored_keys, keys)]

    def seconds(self, keys: NDArray[np.uint64], compute: Compute, scored: int = 0) -> float:
        """Predict how long :meth:`complete` takes, and scoring ``scored`` texts, from some of the texts."""
        count = int((~np.isin(keys, self._read(SILENT)[0])).sum()) + scored
        if not count:
            return 0.0
        is_timed = np.arange(len(keys)) == 0
        list(compute(is_timed))  # loads the model
        is_timed[:: max(1, len(keys) // _TIMED_TEXTS)] = True
        started = time.perf_counter()
        list(compute(is_timed))
        return (time.perf_counter() - started) / int(is_timed.sum()) * count

    def _read(self, progress: Progress) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return the keys of the texts in the file, ascending, and their outputs."""
        if self.path.is_file():
            with (
                suppress(OSError, ValueError, KeyError, BadZipFile),
                self.path.open("rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                keys, outputs = arrays["keys"], arrays["outputs"]
                if outputs.shape == (len(keys), self.width):
                    return keys, outputs
            progress.message(f"{self.path}: is damaged, so {self.title} are computed again")
        return np.empty(0, np.uint64), np.empty((0, self.width), np.float32)


class FrozenStart:
    """The start of a training whose encoder does not change: ``cache`` keeps its vectors, and its head is fitted.

    Args:
        model: a :class:`~edgeformer.models.pretrained.model.PretrainedEncoder` with initial weights and a head.
        recipe, prepared: what it is trained on.
        device: where the vectors are computed.
    """

    def __init__(
        self, model: Any, recipe: Any, prepared: Prepared[Any], cache: Path, device: torch.device = CPU
    ) -> None:
        self._head, self._recipe, self._prepared, self._device = model.head.out, recipe, prepared, device
        self._encoder: Any = sharing_copy(model).eval()
        self._encoder.head.out = None
        settings = {"architecture", "pooling", "normalize", "fold", "pairs", "separator", "position_padding"}
        identity = hashlib.blake2b(recipe.model.model_dump_json(include=settings).encode(), digest_size=12)
        for name, tensor in self._encoder.state_dict().items():
            identity.update(name.encode())
            identity.update(memoryview(tensor.cpu().contiguous().numpy()))
        path = cache / f"vectors-{identity.hexdigest()}.npz"
        self._vectors = CachedOutputs(path, self._head.in_features, "the vectors of the encoder")
        train, classes = len(prepared.train), recipe.classes
        self.fit_bytes = 4 * self._head.in_features * (train + len(prepared.validation)) + 6 * 8 * classes * train
        """Predicted memory of :meth:`fit`: vectors, and logits, probabilities, targets and their temporary copies."""

    def fit(self, progress: Progress) -> None:
        """Set the weights of the head: those of the value in :data:`STRENGTHS` that validates best.

        Rows without a label are left out. Raises InputError if the vectors do not fit into memory.
        """
        training, validation = self._recipe.training, self._prepared.validation
        free, source = host_free_bytes()
        if self.fit_bytes > free:
            raise InputError(
                f"{self._recipe.name}: the frozen start takes {format_bytes(self.fit_bytes)} (predicted), and "
                f"{format_bytes(free)} are {source}; take fewer rows (data.rows), or leave training.start out"
            )
        sets = []  # vectors [n, d] and labels [n] or [n, C], of each
        for rows in (self._prepared.train, validation):
            keys, labels = self._inputs(rows)
            sets.append((self._vectors.complete(keys, partial(self._compute, rows, progress), progress), labels))
        (vectors, labels), (validation_vectors, validation_labels) = sets
        best, weights = (np.inf, np.inf), None
        task: Any = get_task(self._recipe.task)  # a classifier of texts
        message = ""
        with bar(progress, "Fitting the head", len(STRENGTHS), "values"):
            for strength in STRENGTHS:
                weights = fit_logistic(vectors, labels, self._recipe.classes, strength, weights)
                logits = validation_vectors @ weights[:, :-1].numpy().T + weights[:, -1].numpy()
                score: Any = task.score_rows(logits, validation_labels, self._recipe.data)
                value = (task.criterion(score, training), score.loss)
                if value < best:
                    best, message = value, f"head fitted with C {strength:g} of {STRENGTHS[0]:g} to {STRENGTHS[-1]:g}"
                    with torch.no_grad():
                        self._head.weight.copy_(weights[:, :-1])
                        self._head.bias.copy_(weights[:, -1])
                progress.advance(1, loss=score.loss)
        progress.message(message)

    def seconds(self) -> float:
        """Predict the time of the vectors that the cache lacks, of the fit, and of scoring the head."""
        train, validation, tests = self._prepared.train, self._prepared.validation, self._prepared.tests.values()
        scored = len(validation) + sum(map(len, tests)) * (self._recipe.training.epochs == 0)
        seconds: float = _FIT_S * self._head.weight.numel() * len(train) * len(STRENGTHS)
        for rows, further in ((train, scored), (validation, 0)):
            seconds += self._vectors.seconds(self._inputs(rows)[0], partial(self._compute, rows, SILENT), further)
        return seconds

    def _inputs(self, rows: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the keys of rows [n], and their labels [n] or [n, C]."""
        contents, labels = [], []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            loaded, places = rows.loaded(np.arange(start, min(start + _ROWS_AT_ONCE, len(rows))))
            for place in places.tolist():
                span = slice(loaded.offsets[place], loaded.offsets[place + 1])
                types = b"" if loaded.types is None else loaded.types[span].tobytes()
                contents.append(loaded.ids[span].tobytes() + types)
            labels.append(loaded.labels[places])
        return np.fromiter(map(content_hash, contents), np.uint64), np.concatenate(labels)

    def _compute(self, rows: Any, progress: Progress, is_computed: NDArray[np.bool_]) -> Iterator[NDArray[np.float32]]:
        encoder, numbers = self._encoder.to(self._device), np.flatnonzero(is_computed)
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            loaded, places = rows.loaded(numbers[start : start + _ROWS_AT_ONCE])
            vectors = np.empty((len(places), self._vectors.width), np.float32)
            for batch in cut_batches(loaded.sizes(places), BATCH_ROWS):
                arrays = collate(loaded, places[batch], self._prepared.pad)
                inputs = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
                with torch.inference_mode():
                    vectors[batch] = run_scorer(encoder, inputs)["logits"].cpu().numpy()
                progress.advance(len(batch))
            yield vectors


def fit_logistic(
    features: NDArray[np.float32], labels: NDArray[np.int64], classes: int, strength: float,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Minimise Σ cross-entropy + ‖weights‖² / 2C with L-BFGS, as scikit-learn does; return weights and bias [C, d + 1].

    Args:
        features: [n, d].
        labels: classes [n], of which rows without a label do not count; or 0 and 1 [n, classes] for a binary
            cross-entropy of each label.
        strength: C.
        start: weights and bias; None: zeros.
    """
    is_single, inputs = labels.ndim == 1, torch.from_numpy(features)
    targets = torch.from_numpy(labels)
    if is_single:
        inputs, targets = inputs[targets != IGNORED], F.one_hot(targets[targets != IGNORED], classes)
    targets = targets.float()
    loss = partial(cross_entropy, [(1.0, targets)]) if is_single else partial(binary_cross_entropy, targets)
    # scikit-learn fits one vector for two classes: the difference of the two here, whose squares sum to half of it. The
    # binary cross-entropy is a mean over the labels.
    penalty = (2 if is_single and classes == 2 else 1) / (strength * len(inputs) * (1 if is_single else classes))
    weights = torch.zeros(classes, features.shape[1] + 1) if start is None else start
    count = itertools.count(1)
    fitted = minimize(
        (inputs, inputs.T), loss, penalty, (weights[:, :-1].T, weights[:, -1]), _TOLERANCE,
        lambda loss: next(count) < _MOST_ITERATIONS,
    )  # fmt: skip
    return torch.cat([fitted[0].T, fitted[1][:, None]], dim=1)
