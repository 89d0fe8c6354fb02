"""The validation split, found again through the recipe: what an artifact's task score is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.language import TextRows, prepare_text_set
from edgeformer.data.prepare import prepare_test
from edgeformer.formats.errors import DataError, InputError, MissingDependencyError
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.manifest import Precision, RunManifest
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.scores import ClassificationScore, LanguageScore
from edgeformer.tasks.classification import score
from edgeformer.tasks.language_modeling import LanguageMeter
from edgeformer.tasks.scoring import LOGITS_BYTES, Run, cut_batches, run_rows, run_texts

Score = ClassificationScore | LanguageScore
CLASSIFIER_LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003}
"""Accuracy that an artifact of each precision may lose against FP32 on the same rows."""

TRIMMED_LOSS = 0.005
"""The same for one with a trimmed vocabulary, whatever its precision."""

LANGUAGE_LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.002, "int8": 0.02}
"""Share by which the perplexity of a language model may rise."""

LANGUAGE_TOKENS = 2048
"""Tokens of a language model's validation text that every artifact is scored on: enough to see a loss of 2 %."""

_BATCH = 32


@dataclass(frozen=True)
class Validation:
    """Scores artifacts; ``None`` in its place means that the split could not be found.

    Attributes:
        score: a session's ``run`` and the loop that answers → score.
    """

    rows: int
    score: Callable[[Run, int], Score]


def open_validation(
    recipe: AnyRecipe, manifest: RunManifest, cache: Path, tokenizer: tuple[Tokenizer, int], progress: Progress
) -> tuple[Validation | None, str | None]:
    """The split that training validated on, and why it cannot be found (None: it can).

    Args:
        tokenizer: the model's own, or the one of a trimmed vocabulary; and the token that fills up rows.
    """
    own, pad = tokenizer
    trained_on = manifest.data.fingerprints
    try:
        if isinstance(recipe, LanguageRecipe):
            config = recipe.data.model_copy(update={"mode": "paragraphs"})
            rows = prepare_text_set(config, own, cache, "validation", trained_on)
            return _texts(rows, pad, recipe.model.vocab_size, progress), None
        encoded = prepare_test(recipe.data, own, recipe.data.max_length, cache, "validation", trained_on)
    except (DataError, InputError, MissingDependencyError) as error:
        few = f"{CLASSIFIER_LOSS['int8']:.1%} of accuracy cannot be told from one row more or less there"
        if isinstance(recipe, LanguageRecipe):
            few = "they are few"
        return None, (
            f"the validation split cannot be read ({error}), so task scores and the bars on them are those of the "
            f"golden inputs; {few}"
        )

    def judge(run: Run, loop: int) -> Score:
        progress.start("Scoring on the validation split", len(encoded), "rows")
        try:
            logits, _ = run_rows(run, encoded, pad, _BATCH, progress.advance)
        finally:
            progress.finish()
        return score(logits, encoded.labels)

    return Validation(len(encoded), judge), None


def _texts(rows: TextRows, boundary: int, vocabulary: int, progress: Progress) -> Validation:
    most = max(1, LOGITS_BYTES // (4 * vocabulary))
    count = int(np.searchsorted(np.cumsum(rows.lengths), LANGUAGE_TOKENS)) + 1
    batches = cut_batches(rows.lengths[:count], _BATCH, most)
    used = sum(map(len, batches))

    def judge(run: Run, loop: int) -> Score:
        meter = LanguageMeter((loop,))
        progress.start("Scoring on the validation split", used, "rows")
        try:
            run_texts(run, rows, batches, meter, ((loop,), boundary), progress.advance)
        finally:
            progress.finish()
        return meter.score()

    return Validation(used, judge)


def lost(found: Score, reference: Score, precision: Precision, *, trimmed: bool) -> str | None:
    """What an artifact loses against FP32 on the same rows beyond its bar; None when it is within.

    On ``n`` rows one row more or less is no loss that could be told from chance, so that much is always allowed.
    """
    if isinstance(found, ClassificationScore) and isinstance(reference, ClassificationScore):
        drop = reference.accuracy - found.accuracy
        bar = max(TRIMMED_LOSS if trimmed else CLASSIFIER_LOSS[precision], 1.5 / reference.n)
        if drop > bar:
            most = f"at most {bar:.4f} may be lost"
            return f"accuracy {found.accuracy:.4f} is {drop:.4f} below FP32's on {found.n:,} rows; {most}"
        return None
    assert isinstance(found, LanguageScore) and isinstance(reference, LanguageScore)
    rise = found.perplexity / reference.perplexity - 1
    bar = LANGUAGE_LOSS[precision]
    if not rise <= bar:
        return f"perplexity {found.perplexity:.2f} is {rise:.2%} above FP32's; at most {bar:.1%} are allowed"
    return None
