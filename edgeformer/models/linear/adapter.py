"""The linear classifier's torch half: counting n-grams, fitting their weights, ONNX graph."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize_scalar

from edgeformer.artifacts.plan import MemoryBreakdown
from edgeformer.artifacts.recipe import FitConfig
from edgeformer.data.batching import IGNORED, collate, cut_batches
from edgeformer.data.tokenization import WORD_BOUNDARY
from edgeformer.models.adapter import FitSize, FittedAdapter
from edgeformer.models.blocks.tracing import Exits, Graphs, export_graph, text_spec
from edgeformer.models.linear.fitting import HISTORY, Loss, binary_cross_entropy, cross_entropy, minimize, squared_hinge
from edgeformer.models.linear.model import LinearClassifier, NgramTable
from edgeformer.tasks import Prepared

_BASE = 2**12
_PLACES = np.array([_BASE**3, _BASE**2, _BASE, 1])
"""The four residues of an n-gram as digits of one number."""
_STRENGTHS = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Candidates of ``regularization: auto``, from the strongest penalty to the weakest."""
_LOG_SCALES = (-3.0, 3.0)
_SVM_STRENGTHS = (0.3, 1.0, 3.0)
_SVM_SHARES = (0.5, 1.0)
"""Candidates of ``svm_share: auto`` besides 0."""
_COUNTED_TOGETHER = 2**24
_NGRAMS_TOGETHER = 2**20
"""Largest numbers of n-grams that are counted, and looked up, at once."""


class LinearAdapter(FittedAdapter):
    def build(self, recipe: Any) -> LinearClassifier:
        has_reference = recipe.data.separator is None  # probabilities depend on the differences of logits only
        return LinearClassifier(recipe.model, recipe.classes, recipe.classes - has_reference)

    def sized(self, recipe: Any, prepared: Prepared) -> tuple[Any, LinearClassifier]:
        """Store the n-grams that occur in enough training texts, and of too many those in most texts."""
        config = recipe.model
        counter = LinearClassifier(config, recipe.classes, 1)
        is_characters = getattr(recipe.tokenizer, "algorithm", None) == "characters"
        boundary = prepared.tokenizer.token_to_id(WORD_BOUNDARY) if is_characters else None
        values, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        keys: list[NDArray[np.int64]] = []
        for ids, mask, *_ in _batches(prepared.train, prepared.pad, config.ngrams):
            residues, is_real = (tensor.numpy() for tensor in counter.residues(ids, mask))
            if boundary is not None:  # leave out n-grams longer than ``crossing`` with a boundary inside
                is_boundary = ids.numpy() == boundary
                width, parts = is_boundary.shape[1], []
                before = np.cumsum(np.pad(is_boundary, ((0, 0), (1, config.ngrams[1]))), axis=1)  # a position
                for order in range(config.ngrams[0], config.ngrams[1] + 1):
                    inside = before[:, order - 1 : order - 1 + width] > before[:, 1 : 1 + width]
                    parts.append(inside if order > config.crossing else np.zeros_like(is_boundary))
                is_real = is_real & ~np.concatenate(parts, axis=1)
            texts = np.sort(np.where(is_real, residues.astype(np.int64) @ _PLACES, -1), axis=1)
            is_first = np.diff(texts, axis=1, prepend=-1) != 0  # an n-gram counts once per text; -1 is padding
            keys.append(texts[is_first])
            if sum(map(len, keys)) > _COUNTED_TOGETHER:
                values, counts = _add_counts(values, counts, keys)
        values, counts = _add_counts(values, counts, keys)
        is_frequent = counts >= min(config.minimum_count, len(prepared.train))
        values, counts = values[is_frequent], counts[is_frequent]
        columns = self.build(recipe).weights.shape[1]
        limit = min(config.max_ngrams, config.max_weights // columns)
        stored = np.sort(values[np.argsort(-counts, kind="stable")[:limit]])
        table = NgramTable.build(np.stack([stored // place % _BASE for place in _PLACES], axis=1))
        recipe = recipe.model_copy(update={"model": config.model_copy(update={"slots": len(table.fingerprints)})})
        sized_model = self.build(recipe)
        sized_model.fill(table)
        return recipe, sized_model

    def fit(
        self, model: Any, recipe: Any, prepared: Prepared, iterations: int, advance: Callable[[float], bool]
    ) -> dict[str, float]:
        """Minimise Σ loss + ‖weights‖² / 2C over all rows.

        The loss is the cross-entropy, or that of distillation as in
        :func:`~edgeformer.models.distillation.classification_loss`, less the entropy of the teacher's answers; for a
        support vector machine see :func:`~edgeformer.models.linear.fitting.squared_hinge`.
        Features are TF-IDF / √(n-grams of the text), scaled so that their mean square is that of unit vectors.
        """
        training, classes, is_single = recipe.training, recipe.classes, recipe.data.separator is None

        # 1. Features of the training and the validation rows
        counts, labels, order = _count_ngrams(model, recipe.model, prepared.train, prepared.pad)
        rows, slots = counts.shape
        idf = np.log((1 + rows) / (1 + np.bincount(counts.indices, minlength=slots))) + 1
        occurrences = counts.sum(axis=0)
        idf /= np.sqrt((occurrences @ idf**2) / max(1.0, occurrences.sum()))
        features = _scaled(counts, idf)
        data = _to_torch(features), _to_torch(sparse.csr_array(features.T))
        counts, validation_labels, _ = _count_ngrams(model, recipe.model, prepared.validation, prepared.pad)
        validation, expected = _to_torch(_scaled(counts, idf)), torch.from_numpy(validation_labels)

        # 2. Targets: temperature of the logits, and probabilities float32 [rows, C] with the weight of their row
        targets = torch.from_numpy(labels).float()
        if is_single:
            is_labelled = labels != IGNORED
            targets = torch.zeros(rows, classes)
            targets[np.flatnonzero(is_labelled), labels[is_labelled]] = 1.0
        answers = [(1.0, targets)]
        if prepared.teacher_logits is not None:
            config = training.distillation
            logits = torch.from_numpy(prepared.teacher_logits[order].astype(np.float32))
            weight = torch.where(torch.from_numpy(is_labelled)[:, None], config.weight, 1.0)
            answers = [(1.0, (1 - config.weight) * targets)] if config.weight < 1 else []
            answers.append((config.temperature, weight * torch.softmax(logits / config.temperature, dim=1)))

        # 3. Logistic regression from the strongest to the weakest penalty, each from the solution of its predecessor
        # For two classes scikit-learn fits one vector: the difference of the two here, whose squares sum to half of it.
        penalty = (2 if is_single and classes == 2 else 1) / rows
        count = 0

        def after_iteration(loss: float) -> bool:
            nonlocal count
            count += 1
            return advance(loss) and count < iterations

        def calibrated(weights: torch.Tensor, bias: torch.Tensor, strength: float, svm_share: float = 0.0) -> _Solution:
            logits = validation @ weights + bias
            criterion: Any = F.cross_entropy if is_single else F.binary_cross_entropy_with_logits
            truth = expected if is_single else expected.float()
            found = minimize_scalar(
                lambda log_scale: float(criterion(logits * math.exp(log_scale), truth)), bounds=_LOG_SCALES,
                method="bounded",
            )  # fmt: skip
            hits = float((logits.argmax(1) == expected).float().mean()) if is_single else 0.0
            return _Solution(weights, bias, math.exp(found.x), found.fun, hits, strength, svm_share)

        def chosen(loss: Loss, penalty: float, strengths: Sequence[float]) -> _Solution:
            best = _Solution(torch.zeros(slots, classes), torch.zeros(classes))
            for strength in strengths:
                fitted = minimize(data, loss, penalty / strength, best[:2], training.tolerance, after_iteration)
                solution = calibrated(*fitted, strength)
                if solution.loss >= best.loss:
                    break
                best = solution
                if count >= iterations:
                    break
            return best

        is_chosen = training.regularization == "auto"
        loss = partial(cross_entropy, answers) if is_single else partial(binary_cross_entropy, targets)
        best = chosen(loss, penalty, _STRENGTHS if is_chosen else (training.regularization,))

        # 4. A support vector machine, and the mean of both
        shares = (0.0, *(_SVM_SHARES if is_chosen else ())) if training.svm_share == "auto" else (training.svm_share,)
        if is_single and prepared.teacher_logits is None and any(shares) and count < iterations:
            machine = chosen(squared_hinge(targets), 1 / rows, _SVM_STRENGTHS)
            candidates = [
                calibrated(
                    torch.lerp(best.scale * best.weights, machine.scale * machine.weights, share),
                    torch.lerp(best.scale * best.bias, machine.scale * machine.bias, share), best.strength, share,
                )
                for share in shares
            ]  # fmt: skip
            best = max(candidates, key=lambda candidate: (candidate.accuracy, -candidate.loss))
        scale = best.scale if is_chosen or best.svm_share else 1.0  # a stated C is that of scikit-learn
        weights = best.weights * torch.from_numpy(scale * idf).float()[:, None]
        with torch.no_grad():
            model.weights.copy_(weights[:, 1:] - weights[:, :1] if is_single else weights)
            model.readout.bias.copy_(scale * best.bias)
        return {"regularization": best.strength, "svm_share": best.svm_share}

    def fit_size(self, recipe: Any, rows: int, tokens: int) -> FitSize:
        """Predict from the sizes of the arrays; until n-grams are counted, there are as many as tokens suffice for."""
        config = recipe.model
        ngrams = tokens * (config.ngrams[1] - config.ngrams[0] + 1)
        slots = config.slots or min(ngrams // config.minimum_count, 2 * config.max_ngrams)
        vector = 4 * slots * recipe.classes
        memory = MemoryBreakdown(
            weights=5 * vector, gradients=3 * vector, optimizer=(2 * HISTORY + 4) * vector,
            activations=2 * 12 * ngrams + 8 * 4 * rows * recipe.classes, temporary=2 * 12 * ngrams, reserve=0,
        )  # fmt: skip
        return FitSize(slots * recipe.classes, memory)

    def trace(
        self, model: LinearClassifier, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None
    ) -> Graphs:
        """Trace the only graph: there is no loop that a host could run."""
        exits = Exits(model)
        return Graphs(export_graph(text_spec(exits, inputs, model.max_positions, exits.outputs)))


class _Solution(NamedTuple):
    """Weights float32 [slots, C] and biases [C] of a fit, its settings, and loss and accuracy of validation rows."""

    weights: torch.Tensor
    bias: torch.Tensor
    scale: float = 1.0  # of the logits with the lowest loss: a strong penalty makes probabilities too cautious
    loss: float = math.inf
    accuracy: float = 0.0
    strength: float = 0.0
    svm_share: float = 0.0


def _batches(rows: Any, pad: int, orders: tuple[int, int]) -> Iterator[tuple[torch.Tensor, torch.Tensor, Any, Any]]:
    """Yield token numbers and mask [B, S] of all rows, their labels [B, …] and their numbers [B]."""
    tokens = _NGRAMS_TOGETHER // (orders[1] - orders[0] + 1)
    for numbers in cut_batches(rows.sizes(np.arange(len(rows))), FitConfig.effective_batch, tokens):
        loaded, places = rows.loaded(numbers)
        arrays = collate(loaded, places, pad)
        ids, mask = (torch.from_numpy(arrays[name]) for name in ("input_ids", "attention_mask"))
        yield ids, mask, loaded.labels[places], numbers


def _add_counts(
    values: NDArray[np.int64], counts: NDArray[np.int64], keys: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count more occurrences of values, and empty the list of them."""
    ones = sum(map(len, keys))
    merged, places = np.unique(np.concatenate([values, *keys]), return_inverse=True)
    keys.clear()
    weights = np.concatenate([counts, np.ones(ones, dtype=np.int64)])
    return merged, np.bincount(places, weights, len(merged)).astype(np.int64)


def _count_ngrams(
    model: LinearClassifier, config: Any, rows: Any, pad: int
) -> tuple[sparse.csr_array, NDArray[np.int64], NDArray[np.int64]]:
    """Return the occurrences of each stored n-gram in each row, and the rows' labels and numbers."""
    places, columns, labels, order = [], [], [], []
    done = 0
    for ids, mask, batch_labels, numbers in _batches(rows, pad, config.ngrams):
        slots, is_stored = (tensor.numpy() for tensor in model.look_up(*model.residues(ids, mask)))
        row, position = np.nonzero(is_stored)
        places.append((row + done).astype(np.int32))
        columns.append(slots[row, position].astype(np.int32))
        labels.append(batch_labels)
        order.append(numbers)
        done += len(ids)
    pairs = np.concatenate(places), np.concatenate(columns)
    counts = sparse.coo_array((np.ones(len(pairs[0]), dtype=np.float32), pairs), shape=(done, model.slots)).tocsr()
    return counts, np.concatenate(labels), np.concatenate(order)


def _scaled(counts: sparse.csr_array, idf: NDArray[np.float64]) -> sparse.csr_array:
    """Return TF-IDF / √(n-grams of the row), float32."""
    scales = 1 / np.sqrt(np.maximum(counts.sum(axis=1), 1))
    features = sparse.diags_array(scales) @ counts @ sparse.diags_array(idf)
    return sparse.csr_array(features, dtype=np.float32)


def _to_torch(table: sparse.csr_array) -> torch.Tensor:
    """Return a sparse tensor on a copy of the indices, whose products are faster than SciPy's."""
    rows, columns = (torch.from_numpy(array.astype(np.int64)) for array in (table.indptr, table.indices))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return torch.sparse_csr_tensor(
            rows, columns, torch.from_numpy(table.data), size=table.shape, check_invariants=False
        )


ADAPTER = LinearAdapter()
