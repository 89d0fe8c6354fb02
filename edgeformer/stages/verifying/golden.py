"""golden.npz: real inputs with torch FP32's answers, and how far an artifact's answers are from them."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import Parity, Precision
from edgeformer.tasks.language_modeling.scoring import token_losses
from edgeformer.tasks.parity import TOLERANCES, measure_parity

Logits = NDArray[np.float32]
_INPUTS = ("input_ids", "attention_mask")


class GoldenError(ArtifactError):
    """golden.npz cannot answer: no artifact is to blame."""


@dataclass(frozen=True)
class Golden:
    """Arrays of a bundle's golden.npz (of its ``trimmed`` folder's for trimmed artifacts)."""

    path: Path
    arrays: dict[str, NDArray[Any]]

    @property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """What goes into the graphs, int64 [n, S] each."""
        return {name: self.arrays[name] for name in _INPUTS if name in self.arrays}

    def parity(self, logits: Logits, exit_: int | None, precision: Precision, provider: str) -> Parity:
        """Compare an artifact's logits, computed with ``provider``, with torch FP32's.

        Of a language model golden.npz keeps the largest logits of every token and the log-sum-exp of all: a wrong
        logit shows in one of the two, unless it is a small one that became even smaller.

        Args:
            logits: [n, C] of a classifier; [n, S, V] of a language model, or [n, s, V] for the last s positions.
            exit_: the loop that answered; None: the last one of a classifier.

        Raises:
            GoldenError: golden.npz lacks what is needed.
        """
        if logits.ndim == 3:
            return self._language_parity(logits, exit_, precision, provider)
        reference = self._take("logits" if exit_ is None else f"logits_exit{exit_}")
        if reference.shape != logits.shape:
            raise GoldenError(f"{self.path}: has logits {reference.shape}, the artifact computes {logits.shape}")
        return measure_parity(logits, reference, precision, provider)

    def _language_parity(self, logits: Logits, exit_: int | None, precision: Precision, provider: str) -> Parity:
        count, last = logits.shape[-1], logits.shape[1]
        values, indices, log_sum, spread = (
            self._take(f"{name}_exit{exit_}") for name in ("top_values", "top_indices", "log_sum_exp", "logits_std")
        )
        if indices.shape[:1] != logits.shape[:1] or indices.shape[1] < last or indices.max() >= count:
            raise GoldenError(f"{self.path}: its tokens {indices.shape} do not fit the logits {logits.shape}")
        values, indices, log_sum = values[:, -last:], indices[:, -last:], log_sum[:, -last:]
        found = np.take_along_axis(logits, indices, axis=-1)
        likeliest = indices[..., 0].reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is reported as such
            losses = token_losses(logits.reshape(-1, count), likeliest).reshape(log_sum.shape)
            error = np.append(np.abs(found - values), np.abs(losses + found[..., 0] - log_sum)[..., None], axis=-1)
        finite = bool(np.isfinite(error).all() and np.isfinite(logits).all())
        kind, tolerance = TOLERANCES[precision]
        return Parity(
            status="measured",
            n=len(likeliest),
            provider=provider,
            max_abs_error=float(error.max()) if finite else None,
            mean_abs_error=float(error.mean()) if finite else None,
            relative_error=float(error.max() / spread) if finite and spread else None,
            top1_agreement=float((logits.argmax(-1).reshape(-1) == likeliest).mean()),
            tolerance=tolerance,
            tolerance_kind=kind,
        )

    def _take(self, name: str) -> NDArray[Any]:
        if name not in self.arrays:
            raise GoldenError(f"{self.path}: holds no {name!r}; it is of an older version: export the run again")
        return self.arrays[name]


def read_golden(path: Path) -> Golden:
    """Read a golden.npz. Raises GoldenError."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            golden = Golden(path, {name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GoldenError(f"{path}: missing or damaged ({error}); copy the whole bundle again") from None
    if "input_ids" not in golden.arrays or any(0 in array.shape for array in golden.inputs.values()):
        raise GoldenError(f"{path}: damaged (input_ids with rows are expected); copy the whole bundle again")
    return golden
