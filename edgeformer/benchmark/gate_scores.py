"""Score check of the gate: baseline and candidate answer the same rows, and the two are compared row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.gate import GateCheck
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.workspace import TOKENIZER_FILE
from edgeformer.benchmark.gate_checks import ArtifactPair
from edgeformer.bundle import Bundle
from edgeformer.data.rows import LabelledTexts, alike
from edgeformer.runtimes import OpenOptions, cannot_run, provider_facts
from edgeformer.tasks.metric import Array, Metric
from edgeformer.tasks.risk_control import bootstrap_interval
from edgeformer.tasks.scoring import most_rows
from edgeformer.tasks.task import Float64s, Task

REMEDY = "name a labelled file that neither was trained on: --eval-data FILE"

_MOST_ROWS, _MOST_WORDS = 5000, 15_000
"""Rows (a language model: words of its text) that are scored; more would take minutes and decide nothing else."""
_BATCH = 32
_Z = 1.96  # a two-sided 95 % interval


@dataclass(frozen=True)
class CommonRows:
    """Rows that both models are scored on.

    Attributes:
        texts: with labels as indices into the baseline's labels.
        source: what they are, for a reason: "the file held_out.csv"; of no rows: why there are none.
    """

    texts: LabelledTexts
    source: str


def common_rows(baseline: Bundle, candidate: Bundle, eval_data: Path | None) -> CommonRows | str:
    """Find rows that baseline and candidate can both be scored on, or return the reason why there are none.

    Without a file these are the baseline's test rows, where the candidate's run had the same test set, else its test
    and validation rows; in both cases without those that the candidate was trained on.

    Args:
        eval_data: a file to score on instead; it is read with the baseline's columns and labels.

    Raises:
        DataError: the file, its columns or its rows.
    """
    task = baseline.task
    if eval_data is not None:
        return _limited(CommonRows(task.file_texts(baseline.data, eval_data), f"the file {eval_data.name}"), task)
    try:
        return _limited(_held_out_rows(baseline, candidate), task)
    except (InputError, MissingDependencyError) as error:
        return str(error)


def _held_out_rows(baseline: Bundle, candidate: Bundle) -> CommonRows:
    """Read the baseline's held-out rows that the candidate was not trained on.

    Raises:
        DataError: data changed or cannot be read, or what the candidate was trained on cannot be known.
    """
    task, recorded = baseline.task, baseline.trained_on
    test = task.set_name(baseline.data, "test")
    candidate_tests = {value for name, value in candidate.trained_on.items() if name not in ("train", "validation")}
    if test in recorded and recorded[test] in candidate_tests:
        names, source = [test], f"the test set {test!r} of both runs"
    else:
        # One name per fingerprint: an imported model may have one file for both sets.
        names = list({recorded[name]: name for name in ("validation", test) if name in recorded}.values())[::-1]
        if not names:
            raise DataError("the baseline's bundle does not record which rows it was tested on")
        source = f"the baseline's {' and '.join(names)} rows"
        if candidate.trained_on.get("validation") in [recorded[name] for name in names]:
            source += ", among them the candidate's validation set"
    texts = LabelledTexts.joined([_unchanged_set(baseline, "baseline", name) for name in names])
    size = 2 if task.predicts == "vectors" else 1  # texts of a row
    untrained = _rows_not_trained_on(texts, baseline, candidate)
    if not len(untrained):
        # No reason for the scores that export recorded either: the validation rows may be among these.
        return CommonRows(texts.take(untrained), f"the candidate was trained on all {len(texts) // size:,} of {source}")
    seen = (len(texts) - len(untrained)) // size
    without = f", without the {seen:,} that the candidate was trained on" if seen else ""
    return CommonRows(texts.take(untrained), source + without)


def _rows_not_trained_on(texts: LabelledTexts, baseline: Bundle, candidate: Bundle) -> NDArray[np.int64]:
    """Numbers of the rows that the candidate was not trained on; a scored pair is left out where either text was.

    Raises DataError where that cannot be known.
    """
    trained_on = candidate.trained_on.get("train")
    if trained_on is None:
        raise DataError("the candidate's bundle does not record what it was trained on")
    if trained_on == baseline.trained_on.get("train"):
        # Trained on the same rows, neither has an advantage; nothing has to be read.
        return np.arange(len(texts), dtype=np.int64)
    if getattr(candidate.data, "stream", False):
        raise DataError("the candidate's training set is streamed, so the baseline's rows are not looked up in it")
    training_texts = {alike(text) for text in _unchanged_set(candidate, "candidate", "train").texts}
    seen = np.array([alike(text) in training_texts for text in texts.texts], dtype=bool)
    if baseline.task.predicts == "vectors":
        seen = np.repeat(seen[::2] | seen[1::2], 2)
    return np.flatnonzero(~seen)


def _unchanged_set(bundle: Bundle, side: str, name: str) -> LabelledTexts:
    texts = bundle.task.set_texts(bundle.data, name)
    if texts.fingerprint() != bundle.trained_on[name]:
        raise DataError(f"the data of the {side} changed since its training: its {name} set is another one now")
    return texts


def _limited(rows: CommonRows, task: Task) -> CommonRows:
    """At most so many rows as decide something, evenly spaced; of running text the first ones."""
    texts, pairs = rows.texts, task.predicts == "vectors"
    if task.unit == "tokens":
        words = np.cumsum([len(str(text).split()) + 1 for text in texts.texts])
        taken = np.arange(min(len(texts), int(np.searchsorted(words, _MOST_WORDS)) + 1))
    else:
        count = len(texts) // 2 if pairs else len(texts)
        taken = np.unique(np.linspace(0, count - 1, min(count, _MOST_ROWS)).astype(np.int64))
        if pairs:
            taken = np.stack([2 * taken, 2 * taken + 1], axis=1).reshape(-1)
    if len(taken) == len(texts):
        return rows
    return CommonRows(texts.take(taken.astype(np.int64)), f"{len(taken):,} of the {len(texts):,} rows of {rows.source}")


def score_check(
    sides: tuple[Bundle, Bundle],
    both: ArtifactPair,
    provider: str | None,
    rows: CommonRows | str,
    most: float,
    progress: Progress,
) -> GateCheck:
    """Compare the scores of an artifact on the same rows.

    A loss of at most ``most`` passes, and a larger one fails where its 95 % interval holds no gain; else it may be
    chance, which is undecided. The reason states the interval, and says so where ``most`` lies inside it. Where one row
    is more than ``most``, only an interval that lies wholly beyond it decides.

    Args:
        sides: baseline and candidate.
        both: the artifact in the two.
        provider: what computes it; None: what fits.
        rows: from :func:`common_rows`; a reason why there are none: then the scores that export recorded are compared
            if they are of the same validation rows.
        most: the largest loss that is allowed, in the metric's unit where it is a share, else as a share of it.
        progress: is told of rows.
    """
    task = sides[1].task
    metric = task.metric
    facts: dict[str, object] = {"name": "score", "artifact": both.candidate.id, "unit": metric.name, "limit": most}

    def undecided(reason: str) -> GateCheck:
        return GateCheck.model_validate({**facts, "status": "undecided", "reason": reason})

    scored = [_scored_artifact(sides[0], both.baseline), _scored_artifact(sides[1], both.candidate)]
    if isinstance(rows, str):
        return _recorded(sides, scored, provider, facts, most, rows) or undecided(
            f"no rows to score both on: {rows}; {REMEDY}"
        )
    if not len(rows.texts):
        return undecided(f"no rows to score both on: {rows.source}; {REMEDY}")
    for side, artifact in zip(("baseline", "candidate"), scored, strict=True):
        if artifact is None:
            return undecided(f"the {side} has no full graph of this precision, by which decoding could be scored")
        if (refusal := cannot_run(artifact, provider)) is not None:
            return undecided(f"the {side} cannot be scored on this machine: {refusal}")
    if lacking := _labels_lacking(sides, rows.texts):
        return undecided(
            f"the candidate has no label {', '.join(map(repr, lacking))}, which rows of {rows.source} have; name a "
            "file with labels of both: --eval-data FILE"
        )
    results: list[tuple[Array, Float64s]] = []
    for side, bundle, artifact in zip(("baseline", "candidate"), sides, scored, strict=True):
        assert artifact is not None
        try:
            figures = _figures(bundle, artifact, provider, _relabelled(rows.texts, sides[0], bundle), progress, side)
        except EdgeformerError as error:
            status = "fail" if side == "candidate" else "undecided"
            reason = f"the {side} cannot be scored: {error}"
            return GateCheck.model_validate({**facts, "status": status, "reason": reason})
        results.append(figures)
    (lengths, first), (other_lengths, second) = results
    source = rows.source
    if task.unit == "tokens" and not np.array_equal(lengths, other_lengths):
        # Other tokens: perplexity per token does not compare, per word it does, where neither model cut the text.
        whole = np.ones(len(lengths), dtype=bool)
        for bundle, counts in zip(sides, (lengths, other_lengths), strict=True):
            whole &= counts < bundle.manifest.max_length
        if not whole.any():
            return undecided(f"the two make other tokens of {source}, and cut all of it; {REMEDY} with shorter texts")
        words = np.array([len(str(text).split()) + 1 for text in rows.texts.texts], dtype=np.float64)
        first, second = (np.stack([losses[:, 0], words], axis=1)[whole] for losses in (first, second))
        source = f"{source}, per word, because the two make other tokens of them"
    return _compared(task, facts, (first, second), most, source)


def _scored_artifact(bundle: Bundle, artifact: ArtifactManifest) -> ArtifactManifest | None:
    """The artifact itself; of one that decodes token by token the full graph with the same weights, if there is one."""
    if artifact.role != "decode":
        return artifact
    same = (artifact.precision, artifact.trimmed)
    graphs = [graph for graph in bundle.built("full") if graph.is_graph]
    return next((graph for graph in graphs if (graph.precision, graph.trimmed) == same), None)


def _labels_of(bundle: Bundle) -> tuple[str, ...]:
    return tuple(getattr(bundle.data, "labels", ()))


def _has_label_sets(bundle: Bundle) -> bool:
    return getattr(bundle.data, "separator", None) is not None


def _labels_lacking(sides: tuple[Bundle, Bundle], texts: LabelledTexts) -> list[str]:
    """Labels of the rows that the candidate does not have."""
    names, own = _labels_of(sides[0]), set(_labels_of(sides[1]))
    if _has_label_sets(sides[0]):
        used = [number for number in range(len(names)) if (texts.labels >> number & 1).any()]
    else:
        used = [int(number) for number in np.unique(texts.labels)] if names else []
    return [names[number] for number in used if names[number] not in own]


def _relabelled(texts: LabelledTexts, baseline: Bundle, bundle: Bundle) -> LabelledTexts:
    """The rows with labels as indices into those of ``bundle``: labels are matched by name."""
    names, own = _labels_of(baseline), _labels_of(bundle)
    if names == own:
        return texts
    place = {number: own.index(name) for number, name in enumerate(names) if name in own}
    if _has_label_sets(baseline):
        bits = [(texts.labels >> number & 1) << index for number, index in place.items()]
        return LabelledTexts(texts.texts, np.sum(bits, axis=0, dtype=np.int64))
    return LabelledTexts(texts.texts, np.array([place[int(number)] for number in texts.labels], dtype=np.int64))


def _figures(
    bundle: Bundle,
    artifact: ArtifactManifest,
    provider: str | None,
    texts: LabelledTexts,
    progress: Progress,
    side: str,
) -> tuple[Array, Float64s]:
    """Tokens [n] and figures [n, k] of every row. Raises EdgeformerError."""
    task, reader = bundle.task, bundle.reader(artifact)
    rows = task.encode_rows(bundle.data, reader, texts)
    batches = task.call_batches(rows, min(_BATCH, most_rows(artifact) or _BATCH), reader.vocabulary)
    answers: Array | None = None
    with (
        bar(progress, f"Scoring {artifact.id} of the {side}", len(rows), "rows"),
        bundle.session(artifact, OpenOptions(provider)) as session,
    ):
        for numbers in batches:
            batch = task.batch(rows, numbers, reader.pad)
            kept = task.row_answers(session.run(batch), batch)
            if answers is None:
                answers = np.empty((len(rows), *kept.shape[1:]), dtype=kept.dtype)
            answers[numbers] = kept
            progress.advance(len(numbers))
    assert answers is not None
    if not np.isfinite(answers).all():
        raise InputError("it answers with what is no finite number")
    return rows.lengths, task.row_figures(answers, rows, bundle.data)


def _compared(
    task: Task, facts: dict[str, object], figures: tuple[Float64s, Float64s], most: float, source: str
) -> GateCheck:
    metric, (first, second) = task.metric, figures
    before, after, count = task.metric_of(first), task.metric_of(second), len(first)
    low, high = _interval(task, first, second)
    loss = _loss(metric, before, after - before)
    least, largest = sorted(_loss(metric, before, change) for change in (low, high))
    reason = f"on {count:,} {'pairs' if task.predicts == 'vectors' else 'rows'}: {source}"
    if first.shape[1] == 1:
        worse, better = int((first > second).sum()), int((second > first).sum())
        reason += f"; {worse:,} right before and wrong now, {better:,} the other way"
    reason += f"; 95 % interval of the difference {low:+.4f} to {high:+.4f}"
    status = "pass" if loss <= most else "fail"
    if count < (2 if metric.highest is None or not most else 1 / most) and least <= most:
        status = "undecided"
        reason += f"; too few rows for a limit of {most:g}: {REMEDY}"
    elif status == "fail" and least <= 0:
        status = "undecided"
        reason += f"; more is lost than the {most:g} that is allowed, but this may be chance: {REMEDY} with more rows"
    elif least <= most < largest:
        reason += f"; the loss of {most:g} that is allowed lies inside it, so more rows could decide otherwise"
    return _check({**facts, "low": low, "high": high, "rows": count}, status, before, after, reason)


def _loss(metric: Metric, before: float, change: float) -> float:
    """A change for the worse is above 0: in the metric's unit where it is a share, else as a share of ``before``."""
    loss = -change if metric.higher_is_better else change
    return loss if metric.highest is not None else loss / max(abs(before), 1e-12)


def _check(facts: dict[str, object], status: str, before: float, after: float, reason: str) -> GateCheck:
    values = {"status": status, "baseline": before, "candidate": after, "change": after - before, "reason": reason}
    return GateCheck.model_validate({**facts, **values})


def _interval(task: Task, first: Float64s, second: Float64s) -> tuple[float, float]:
    """95 % interval of the metric's difference on the same rows.

    Of right and wrong answers that of Bonett and Price (2012) for paired proportions, which is not empty where all
    answers agree; else percentiles of resampled rows.
    """
    count = len(first)
    if first.shape[1] == 1:
        lost = (float((first > second).sum()) + 1) / (count + 2)
        won = (float((second > first).sum()) + 1) / (count + 2)
        half = _Z * sqrt((lost + won - (won - lost) ** 2) / (count + 2))
        return max(-1.0, won - lost - half), min(1.0, won - lost + half)
    return bootstrap_interval(lambda rows: task.metric_of(second[rows]) - task.metric_of(first[rows]), count)


def _recorded(
    sides: tuple[Bundle, Bundle],
    scored: Sequence[ArtifactManifest | None],
    provider: str | None,
    facts: dict[str, object],
    most: float,
    why: str,
) -> GateCheck | None:
    """The scores that export recorded, where they are of the same validation rows; None: they are not.

    None also for a provider that computes in fewer bits than export scored.
    """
    if provider is not None and provider_facts(provider).rounds_to is not None:
        return None
    manifests, metric = [bundle.manifest for bundle in sides], sides[1].task.metric
    scores = [artifact.validation if artifact is not None else None for artifact in scored]
    before, after = map(metric.of, scores)
    prints = {manifest.data_fingerprints.get("validation") for manifest in manifests}
    same = len(prints) == 1 and None not in prints and _labels_of(sides[0]) == _labels_of(sides[1])
    if sides[1].task.unit == "tokens":
        same = same and len({manifest.files.get(TOKENIZER_FILE) for manifest in manifests}) == 1
    if before is None or after is None or not same or scores[0].n != scores[1].n:  # type: ignore[union-attr]
        return None
    reason = (
        f"as export recorded it on the same {scores[1].n:,} validation {sides[1].task.unit}, without an interval, "  # type: ignore[union-attr]
        f"because the rows are not at hand: {why}"
    )
    loss = _loss(metric, before, after - before)
    return _check(facts, "fail" if loss > most else "pass", before, after, reason)
