"""Score check of the gate: baseline and candidate answer the same rows, and the two are compared row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np

from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Figure
from edgeformer.artifacts.workspace import TOKENIZER_FILE
from edgeformer.benchmark.gate_result import GateCheck, GateStatus
from edgeformer.benchmark.limits import compare
from edgeformer.bundle import Bundle
from edgeformer.data.rows import LabelledTexts, comparison_key
from edgeformer.report import sentences
from edgeformer.report.sentences import MORE_ROWS, note
from edgeformer.runtimes import OpenOptions, cannot_run, provider_facts
from edgeformer.tasks.arrays import Array, Float64s, Int64s
from edgeformer.tasks.risk_control import bootstrap_interval
from edgeformer.tasks.scoring import max_batch_rows
from edgeformer.tasks.task import Task

_MAX_ROWS, _MAX_WORDS = 5000, 15_000
"""Rows (language models: words of the text) that are scored; more would take minutes and decide nothing else."""
_BATCH = 32
_Z = 1.96  # a two-sided 95% interval
_SIDES = ("baseline", "candidate")


@dataclass(frozen=True)
class ArtifactPair:
    """An artifact in the two bundles."""

    baseline: ArtifactManifest
    candidate: ArtifactManifest


@dataclass(frozen=True)
class CommonRows:
    """Rows that both models are scored on."""

    texts: LabelledTexts  # with labels as indices into the baseline's labels
    source: str  # for a reason: "the file held_out.csv"; without rows: why there are none


def common_rows(baseline: Bundle, candidate: Bundle, eval_data: Path | None) -> CommonRows | str:
    """Find rows that baseline and candidate can both be scored on, or return the reason why there are none.

    Without a file these are the baseline's test rows, if the candidate's run had the same test set, else its test
    and validation rows; in both cases without those that the candidate was trained on. At most ``_MAX_ROWS`` rows are
    kept, evenly spaced; of running text the first ``_MAX_WORDS`` words. Raises DataError: the file cannot be used.
    """
    task = baseline.task.rows
    if eval_data is not None:
        texts, source = task.file_texts(baseline.data, eval_data), f"the file {eval_data.name}"
    else:
        try:
            # 1. The baseline's held-out rows
            test, recorded = task.set_name(baseline.data, "test"), baseline.trained_on
            tests = {value for name, value in candidate.trained_on.items() if name not in ("train", "validation")}
            if test in recorded and recorded[test] in tests:
                names, source = [test], f"the test set {test!r} of both runs"
            else:
                # One name per fingerprint: an imported model may have one file for both sets.
                names = list({recorded[name]: name for name in ("validation", test) if name in recorded}.values())[::-1]
                if not names:
                    raise DataError("the bundle of the baseline does not record its test rows")
                source = f"the baseline's {' and '.join(names)} rows"
                if candidate.trained_on.get("validation") in [recorded[name] for name in names]:
                    source += ", which include the candidate's validation set"
            texts = LabelledTexts.joined([_unchanged_set(baseline, "baseline", name) for name in names])
            # 2. Without those that the candidate was trained on
            trained_on, size = candidate.trained_on.get("train"), task.texts_per_row
            if trained_on is None:
                raise DataError("the bundle of the candidate does not record its training rows")
            # Trained on the same rows, neither has an advantage; nothing has to be read.
            if trained_on != recorded.get("train"):
                if getattr(candidate.data, "stream", False):
                    raise DataError(
                        "the candidate's training set is streamed and too large to search for the baseline's rows"
                    )
                training_texts = {
                    comparison_key(text) for text in _unchanged_set(candidate, "candidate", "train").texts
                }
                is_trained = np.array([comparison_key(text) in training_texts for text in texts.texts], dtype=bool)
                is_trained = np.repeat(is_trained.reshape(-1, size).any(axis=1), size)  # of a pair neither text
                texts, count = texts.take(np.flatnonzero(~is_trained)), int(is_trained.sum()) // size
                if not len(texts):
                    # Recorded scores do not help either: the validation rows may be among these.
                    source = f"the candidate was trained on all {count:,} rows of {source}"
                elif count:
                    source += f", without {count:,} rows that the candidate was trained on"
        except (InputError, MissingDependencyError) as error:
            return str(error)
    numbers = task.sampled_rows(texts, _MAX_ROWS, _MAX_WORDS)
    if len(numbers) < len(texts):
        texts, source = texts.take(numbers), f"{len(numbers):,} of the {len(texts):,} rows of {source}"
    return CommonRows(texts, source)


def _unchanged_set(bundle: Bundle, side: str, name: str) -> LabelledTexts:
    """Read a set. Raises DataError if it is not the one of training."""
    texts = bundle.task.rows.set_texts(bundle.data, name)
    if texts.fingerprint() != bundle.trained_on[name]:
        raise DataError(
            f"the data of the {side} changed after its training: its {name} set differs from the recorded one"
        )
    return texts


def score_check(
    sides: tuple[Bundle, Bundle], both: ArtifactPair, provider: str | None, rows: CommonRows | str, limit: float,
    progress: Progress,
) -> GateCheck:  # fmt: skip
    """Compare the scores of an artifact on the same rows.

    A loss of at most ``limit`` (in the metric's unit if it is a share, else as a share of it) passes. A larger one
    fails if its 95% interval holds no gain, else it is undecided. If one row is more than ``limit``, only an interval
    that lies wholly beyond it decides. Given the reason why there are no ``rows``, the scores that export recorded are
    compared if they are of the same validation rows.
    """
    baseline, candidate = sides
    task = candidate.task
    check = GateCheck(name="score", artifact=both.candidate.id, status="undecided", unit=task.metric.name, limit=limit)

    def undecided(reason: str) -> GateCheck:
        return check.model_copy(update={"reason": reason})

    # 1. Rows, artifacts and texts that both can be scored on.
    scored: list[ArtifactManifest | None] = [both.baseline, both.candidate]
    for number, compared in enumerate((both.baseline, both.candidate)):
        if compared.role == "decode":  # the full graph with the same weights has its score
            variant = (compared.precision, compared.trimmed)
            graphs = [graph for graph in sides[number].built("full") if graph.is_graph]
            scored[number] = next((graph for graph in graphs if (graph.precision, graph.trimmed) == variant), None)
    if isinstance(rows, str):
        recorded = _compare_recorded(check, sides, scored, provider, rows)
        return recorded or undecided(f"there are no rows to score both on: {rows}; {MORE_ROWS}")
    if not len(rows.texts):
        return undecided(f"there are no rows to score both on: {rows.source}; {MORE_ROWS}")
    for side, artifact in zip(_SIDES, scored, strict=True):
        if artifact is None:
            return undecided(f"the {side} has no full graph of this precision, which scores its decode graph")
        if (refusal := cannot_run(artifact, provider)) is not None:
            return undecided(f"the {side} cannot be scored on this machine: {refusal}")
    try:
        texts = rows.texts, _candidate_texts(baseline, candidate, rows)
    except InputError as error:
        return undecided(str(error))
    # 2. Answer them with both.
    lengths: list[Int64s] = []
    figures: list[Float64s] = []
    for side, bundle, artifact, side_texts in zip(_SIDES, sides, scored, texts, strict=True):
        assert artifact is not None
        try:
            reader, data, most = bundle.reader(artifact), bundle.data, min(_BATCH, max_batch_rows(artifact) or _BATCH)
            encoded = task.rows.encode_rows(data, reader, side_texts)
            batches = task.rows.call_batches(encoded, most, reader.vocabulary)
            answers: list[Array] = []
            with (
                bar(progress, f"Scoring {artifact.id} of the {side}", len(encoded), "rows"),
                bundle.session(artifact, OpenOptions(provider)) as session,
            ):
                for numbers in batches:
                    batch = task.rows.batch(encoded, numbers, reader.pad)
                    answers.append(task.row_answers(session.run(batch), batch, data))
                    progress.advance(len(numbers))
            in_order = np.concatenate(answers)[np.argsort(np.concatenate(batches))]
            if not np.isfinite(in_order).all():
                raise InputError("its outputs are not finite")
        except EdgeformerError as error:
            status = "fail" if side == "candidate" else "undecided"
            return check.model_copy(update={"status": status, "reason": f"the {side} cannot be scored: {error}"})
        lengths.append(encoded.lengths)
        figures.append(task.row_figures(in_order, encoded, data))
    # 3. Compare row by row.
    source = rows.source
    if task.can_write and not np.array_equal(lengths[0], lengths[1]):
        # With different tokens, perplexity compares per word only, and only if neither model truncated the text.
        is_complete = np.ones(len(lengths[0]), dtype=bool)
        for bundle, counts in zip(sides, lengths, strict=True):
            is_complete &= counts < bundle.manifest.max_length
        if not is_complete.any():
            return undecided(
                f"the two tokenizers differ, and every text of {source} is cut; {MORE_ROWS} with shorter texts"
            )
        words = np.array([len(str(text).split()) + 1 for text in rows.texts.texts], dtype=np.float64)
        figures = [np.stack([losses[:, 0], words], axis=1)[is_complete] for losses in figures]
        source = f"{source}, per word, because the two tokenizers differ"
    return compare_figures(task, check, figures[0], figures[1], source)


def _candidate_texts(baseline: Bundle, candidate: Bundle, rows: CommonRows) -> LabelledTexts:
    """Return the rows with labels, matched by name, as indices into the candidate's. Raises InputError."""
    texts = rows.texts
    names, candidate_names = (tuple(getattr(bundle.data, "labels", ())) for bundle in (baseline, candidate))
    if names == candidate_names:
        return texts
    has_label_sets, indices = getattr(baseline.data, "separator", None) is not None, np.arange(len(names))
    is_label = (texts.labels[:, None] >> indices & 1) if has_label_sets else texts.labels[:, None] == indices
    used = [name for name, any_row in zip(names, np.any(is_label, axis=0).tolist(), strict=True) if any_row]
    if missing := [name for name in used if name not in candidate_names]:
        raise InputError(
            f"the candidate lacks the label {', '.join(map(repr, missing))} of rows in {rows.source}; {MORE_ROWS}"
        )
    candidate_indices = np.array([candidate_names.index(name) if name in used else 0 for name in names])
    values = 1 << candidate_indices if has_label_sets else candidate_indices
    return LabelledTexts(texts.texts, (is_label * values).sum(axis=1))


def compare_figures(task: Task, check: GateCheck, baseline: Float64s, candidate: Float64s, source: str) -> GateCheck:
    """Compare figures [n, k] of the same rows by the limit of ``check``.

    The 95% interval of right and wrong answers is that of Bonett and Price (2012) for paired proportions, which is not
    empty if all answers agree; that of other figures consists of percentiles of resampled rows.
    """
    metric, limit = task.metric, check.limit or 0.0
    old, new, count = task.metric_of(baseline), task.metric_of(candidate), len(baseline)
    changed = ""
    if baseline.shape[1] == 1:
        worse, better = int((baseline > candidate).sum()), int((candidate > baseline).sum())
        changed = note("changed answers", worse=worse, better=better)
        worse_share, better_share = (worse + 1) / (count + 2), (better + 1) / (count + 2)
        half = _Z * sqrt((worse_share + better_share - (better_share - worse_share) ** 2) / (count + 2))
        low, high = max(-1.0, better_share - worse_share - half), min(1.0, better_share - worse_share + half)
    else:
        low, high = bootstrap_interval(
            lambda rows: task.metric_of(candidate[rows]) - task.metric_of(baseline[rows]), count
        )
    loss = metric.loss(old, new - old)
    least, largest = sorted(metric.loss(old, change) for change in (low, high))
    status: GateStatus = compare(Figure(loss), limit)
    doubt: str | None = None
    if count < (2 if metric.highest is None or not limit else 1 / limit) and least <= limit:
        status, doubt = "undecided", "too few rows"
    elif status == "fail" and least <= 0:
        status, doubt = "undecided", "may be chance"
    elif least <= limit < largest:
        doubt = "inside the interval"
    unit = task.rows.row_noun
    reasons = [note("compared rows", count=count, unit=unit, source=source, changed=changed, low=low, high=high)]
    reasons += [sentences.SCORE_DOUBT[doubt].format(limit)] if doubt is not None else []
    update = {"status": status, "baseline": old, "candidate": new, "change": new - old, "reason": "; ".join(reasons)}
    return check.model_copy(update={**update, "low": low, "high": high, "rows": count})


def _compare_recorded(
    check: GateCheck, sides: tuple[Bundle, Bundle], scored: Sequence[ArtifactManifest | None], provider: str | None,
    why_no_rows: str,
) -> GateCheck | None:  # fmt: skip
    """Compare the scores that export recorded; None if they are of other rows, or of a provider that rounds less."""
    if provider is not None and provider_facts(provider).rounds_to is not None:
        return None
    manifests, task = [bundle.manifest for bundle in sides], sides[1].task
    first, second = (artifact.validation if artifact is not None else None for artifact in scored)
    old, new = task.metric.of(first), task.metric.of(second)
    # Perplexity compares between equal tokenizers only.
    files = [manifest.files.get(TOKENIZER_FILE) if task.can_write else None for manifest in manifests]
    labels = [tuple(getattr(bundle.data, "labels", ())) for bundle in sides]
    fingerprints = [manifest.data_fingerprints.get("validation") for manifest in manifests]
    is_same = fingerprints[0] is not None and all(pair[0] == pair[1] for pair in (fingerprints, labels, files))
    if old is None or new is None or not is_same or first is None or second is None or first.n != second.n:
        return None
    reason = (
        f"scores recorded by export on the same {second.n:,} validation {task.unit}, without an interval, because the "
        f"rows are missing: {why_no_rows}"
    )
    status = compare(Figure(task.metric.loss(old, new - old)), check.limit or 0.0)
    update = {"status": status, "baseline": old, "candidate": new, "change": new - old, "reason": reason}
    return check.model_copy(update=update)
