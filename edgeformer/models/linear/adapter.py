"""The linear classifier's torch half: counting n-grams, logistic regression, ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax

from edgeformer.artifacts.command_results import MemoryBreakdown
from edgeformer.artifacts.recipe import FitConfig
from edgeformer.data.batching import IGNORED, collate, ordered_batches
from edgeformer.models.adapter import FitSize, FittedAdapter
from edgeformer.models.linear.model import LinearClassifier, NgramTable
from edgeformer.models.tracing import Exits, Graphs, export_graph, text_spec
from edgeformer.tasks import Prepared

_BASE = 2**12
_PLACES = np.array([_BASE**3, _BASE**2, _BASE, 1])
"""The four residues of an n-gram as digits of one number."""
_HISTORY = 10
"""Steps that L-BFGS remembers: two vectors of the weights' size each."""


class LinearAdapter(FittedAdapter):
    """See :class:`~edgeformer.models.adapter.FittedAdapter`."""

    def build(self, recipe: Any) -> LinearClassifier:
        has_reference = recipe.task == "classification"  # probabilities depend on the differences of logits only
        return LinearClassifier(recipe.model, recipe.classes, recipe.classes - has_reference)

    def sized(self, recipe: Any, prepared: Prepared) -> tuple[Any, LinearClassifier]:
        """Store the n-grams that occur in enough training texts."""
        counter = LinearClassifier(recipe.model, recipe.classes, 1)
        keys = []
        for ids, mask, _, _ in _training_batches(prepared):
            residues, is_real = (tensor.numpy().astype(np.int64) for tensor in counter.residues(ids, mask))
            texts = np.sort(np.where(is_real, residues @ _PLACES, -1), axis=1)
            is_first = np.diff(texts, axis=1, prepend=-1) != 0  # an n-gram counts once per text; -1 is padding
            keys.append(texts[is_first])
        values, counts = np.unique(np.concatenate(keys), return_counts=True)
        stored = values[counts >= min(recipe.model.minimum_count, len(prepared.train))]
        table = NgramTable.build(np.stack([stored // place % _BASE for place in _PLACES], axis=1))
        model = recipe.model.model_copy(update={"slots": len(table.fingerprints)})
        recipe = recipe.model_copy(update={"model": model})
        sized_model = self.build(recipe)
        sized_model.fill(table)
        return recipe, sized_model

    def fit(
        self, model: Any, recipe: Any, prepared: Prepared, iterations: int, advance: Callable[[float], bool]
    ) -> None:
        """Minimise Σ loss + ‖weights‖² / 2C over all rows with L-BFGS, in float64.

        The loss is the cross-entropy, or that of distillation as in
        :func:`~edgeformer.models.distillation.classification_loss`, less the entropy of the teacher's answers.
        Features are TF-IDF / √(n-grams of the text), scaled so that their mean square is that of unit vectors.
        """
        counts, labels, order = _count_ngrams(model, prepared)
        rows, slots = counts.shape
        document_frequency = np.bincount(counts.indices, minlength=slots)
        idf = np.log((1 + rows) / (1 + document_frequency)) + 1
        occurrences = counts.sum(axis=0)
        idf /= np.sqrt((occurrences @ idf**2) / max(1.0, occurrences.sum()))
        scales = 1 / np.sqrt(np.maximum(counts.sum(axis=1), 1))
        features = sparse.csr_array(sparse.diags_array(scales) @ counts @ sparse.diags_array(idf))
        transposed = sparse.csr_array(features.T)
        classes = recipe.classes
        is_single = labels.ndim == 1
        targets = labels.astype(np.float64)
        losses: list[tuple[float, NDArray[np.float64]]] = []  # temperature, and weighted probabilities [rows, C]
        if is_single:
            is_labelled = (labels != IGNORED)[:, None]
            targets = np.where(is_labelled, np.eye(classes)[np.where(labels == IGNORED, 0, labels)], 0.0)
            losses = [(1.0, targets)]
        if prepared.teacher_logits is not None:
            config = recipe.training.distillation
            answers = softmax(prepared.teacher_logits[order].astype(np.float64) / config.temperature, axis=1)
            losses = [(1.0, (1 - config.weight) * targets)] if config.weight < 1 else []
            losses.append((config.temperature, np.where(is_labelled, config.weight, 1.0) * answers))
        # For two classes scikit-learn fits one vector: the difference of the two here, whose squares sum to half of it.
        penalty = (2 if is_single and classes == 2 else 1) / (recipe.training.regularization * rows)

        def objective(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            """Return the mean loss per row, and its gradient; values: weights [slots, C], then biases [C]."""
            weights, bias = values[:-classes].reshape(slots, classes), values[-classes:]
            logits = features @ weights + bias
            if is_single:
                loss, errors = 0.0, np.zeros_like(logits)
                for temperature, weighted in losses:
                    log_p = log_softmax(logits / temperature, axis=1)
                    loss -= float((weighted * log_p).sum()) * temperature**2
                    errors += (np.exp(log_p) * weighted.sum(axis=1, keepdims=True) - weighted) * temperature
            else:
                loss = float((np.logaddexp(0, logits) - targets * logits).sum()) / classes
                errors = (expit(logits) - targets) / classes
            gradient = transposed @ errors / rows + penalty * weights
            total = loss / rows + penalty / 2 * float(np.vdot(weights, weights))
            return total, np.concatenate([gradient.ravel(), errors.sum(axis=0) / rows])

        def after_iteration(intermediate_result: Any) -> None:
            if not advance(float(intermediate_result.fun)):
                raise StopIteration

        start = np.zeros((slots + 1) * classes)
        options = {"maxiter": iterations, "ftol": recipe.training.tolerance, "gtol": 0.0, "maxcor": _HISTORY}
        solution = minimize(objective, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options).x
        weights, bias = solution[:-classes].reshape(slots, classes) * idf[:, None], solution[-classes:]
        if is_single:
            weights = weights[:, 1:] - weights[:, :1]
        with torch.no_grad():
            model.weights.copy_(torch.from_numpy(weights))
            model.readout.bias.copy_(torch.from_numpy(bias))

    def fit_size(self, recipe: Any, rows: int, tokens: int) -> FitSize:
        """Predict from the sizes of the arrays; until n-grams are counted, there are as many as tokens suffice for."""
        shortest, longest = recipe.model.ngrams
        ngrams = tokens * (longest - shortest + 1)
        parameters = (recipe.model.slots or ngrams // recipe.model.minimum_count) * recipe.classes
        vector = 8 * parameters
        memory = MemoryBreakdown(
            weights=2 * vector, gradients=2 * vector, optimizer=2 * _HISTORY * vector,
            activations=2 * 12 * ngrams + 6 * 8 * rows * recipe.classes, temporary=2 * 12 * ngrams, reserve=0,
        )  # fmt: skip
        return FitSize(parameters, ngrams * recipe.classes, memory)

    def trace(
        self, model: LinearClassifier, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None
    ) -> Graphs:
        """Trace the only graph: there is no loop that a host could run."""
        exits = Exits(model)
        return Graphs(export_graph(text_spec(exits, inputs, model.max_positions, exits.outputs)))


def _training_batches(
    prepared: Prepared,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield token numbers and mask [B, S] of all training rows, their labels [B, …] and their numbers [B]."""
    train: Any = prepared.train
    for numbers in ordered_batches(train.sizes(np.arange(len(train))), FitConfig.effective_batch):
        loaded, places = train.loaded(numbers)
        arrays = collate(loaded, places, prepared.pad)
        ids, mask = (torch.from_numpy(arrays[name]) for name in ("input_ids", "attention_mask"))
        yield ids, mask, loaded.labels[places], numbers


def _count_ngrams(
    model: LinearClassifier, prepared: Prepared
) -> tuple[sparse.csr_array, NDArray[np.int64], NDArray[np.int64]]:
    """Return the occurrences of each stored n-gram in each training row, and the rows' labels and numbers."""
    rows, columns, labels, order = [], [], [], []
    done = 0
    for ids, mask, batch_labels, numbers in _training_batches(prepared):
        slots, is_stored = (tensor.numpy() for tensor in model.look_up(*model.residues(ids, mask)))
        row, place = np.nonzero(is_stored)
        rows.append((row + done).astype(np.int32))
        columns.append(slots[row, place].astype(np.int32))
        labels.append(batch_labels)
        order.append(numbers)
        done += len(ids)
    places = np.concatenate(rows), np.concatenate(columns)
    counts = sparse.coo_array((np.ones(len(places[0])), places), shape=(done, model.slots)).tocsr()
    return counts, np.concatenate(labels), np.concatenate(order)


ADAPTER = LinearAdapter()
