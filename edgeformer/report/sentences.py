"""Every sentence of a verdict, a choice and a guarantee, from the data of the decision.

This module needs only :mod:`edgeformer.artifacts`, and the type of a metric, so that every layer can write its notes
with it. It imports little, so that a command starts fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import quote

from edgeformer.artifacts.manifest import release
from edgeformer.artifacts.units import format_bytes, format_milliseconds, format_threads, markdown

if TYPE_CHECKING:
    from edgeformer.artifacts.manifest import (
        ArtifactManifest,
        ExitGuarantee,
        ExitTime,
        ImportProof,
        Lengths,
        Portability,
    )
    from edgeformer.artifacts.report import Choice, Figure, PublishedCheck, Report, Verdict
    from edgeformer.tasks import Metric

NO_REASON = "no reason is recorded"
Shape = tuple[int, int]

NOTES = {
    # of a profile
    "not opened": "{artifact}: left out, because {runtime} does not open it",
    "other provider": "{reason}, but {provider} measured the rows, and this device needs {needed}",
    "estimated instead": "{artifact}: {reason}; its figures for the device are estimated instead",
    "card": "measured on the card: {on_card}; measured on the processor: {on_cpu}; edgeformer doctor says how to run "
    "ONNX graphs on the card",
    "interrupted": "interrupted after {rows} rows of {measured} of {artifacts} artifacts; there is no verdict",
    "absent device": "{reason}: {measured}, {estimated}",
    "no measurement": "nothing was measured",
    "host times": "the measured times are those of this host",
    "no estimate": "nothing was estimated",
    "estimates": "the figures for the device are estimates",
    "unstable": "the measurement is unstable",
    "left out": "left out of the verdict, because no {device} can run it: {artifacts}: {reason}",
    "no rows": "no artifact can run on the device",
    "no limit": "no limit is set",
    "no limit of the profile": "the profile {profile} sets no limit",
    "nothing can run": "nothing was judged, because no artifact can run on this device",
    "synthetic": "the model was trained on synthetic text, so its scores say nothing about real text",
    "leaks": "leaks future tokens: the model sees the tokens that it predicts, so its scores are void",
    "early exit": "{artifact} with early exit: {guarantee}",
    "no budget": "the profile {profile} has no latency, size, memory or energy budget for a {task}",
    "memory budget": "the profile {profile} has no latency, size, memory or energy budget for a {task}; the memory "
    "limit is the usable memory of the device, {memory}",
    "unknown budget": "the profile {profile} has a budget for {task!r}, which is no task",
    "other rules": "measured with other stopping rules than usual: {rules}",
    "cut shape": "the shape of the budget is {shape}, but the model reads at most {tokens} tokens of a text",
    "shape": "judged at {shape}: {reason}",
    "command shapes": "the limits of the command line are judged at {shapes}",
    "all shapes": "the limits of the command line are judged at {shapes}, those of the profile at {shape}",
    "unbuilt": "{artifact}: {status}: {reason}",
    # of a score that a gate compares
    "compared rows": "on {count:,} {unit}: {source}{changed}; 95% interval of the difference {low:+.4f} to {high:+.4f}",
    "changed answers": "; {worse:,} answers changed from right to wrong and {better:,} from wrong to right",
    # of a report that is judged again
    "judged": "{file} is taken as measured on {device}; edgeformer cannot check where it was measured",
    "no row": "there is no row at {shape}, but at {shapes}",
    "no decode row": "decoding at {shape} was not measured",
    "no such row": "the report has no row at {shape}, but at {shapes}",
    "other kind": "measured with {labels} only, and the device is {kind}",
    # of the candidates of a choice
    "no figure": "there is no measurement or estimate at {shape}",
    "unknown figure": "its {figure} is unknown: {reason}",
    "not exported": "{variant}: add them with edgeformer export {option}",
    "not built": "it was not built",
    "no score": "it has no score",
    "no score: engine": "it has no score, because an engine runs only on its target: {remedy}",
    "no score: target": "{device} compared its outputs but did not score it on the validation split{detail}",
    "no score: metric": "it has no {metric}",
    "no score: rounded": "it has no score in {precision}; export on a machine that computes in {precision}",
    "no score: split": "it has no score on the validation split",
}


def note(kind: str, /, **facts: object) -> str:
    """Return the note or reason of a kind in :data:`NOTES` with its facts."""
    return NOTES[kind].format(**facts)


def unbuilt_notes(artifacts: Iterable[ArtifactManifest]) -> list[str]:
    """Return why some of the artifacts were not built."""
    unbuilt = (entry for entry in artifacts if entry.status != "built")
    return [note("unbuilt", artifact=e.id, status=e.status, reason=e.reason or NO_REASON) for e in unbuilt]


def shown(value: float | None, unit: str) -> str:
    """Format a quantity: ``12.3 MiB``, ``4.56 ms``."""
    return format_bytes(value) if unit == "bytes" else f"{format_milliseconds(value)} {unit}"


def listed(names: Sequence[str]) -> str:
    """``size``, ``size and memory``, ``size, latency and memory``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def names_by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group (name, reason) pairs by reason, in order; equal names count once."""
    groups: dict[str, dict[str, None]] = {}
    for name, reason in pairs:
        groups.setdefault(reason, {})[name] = None
    return {reason: [*names] for reason, names in groups.items()}


# Checks and verdicts


class Call(NamedTuple):
    """The call whose figure is compared with a limit."""

    shape: Shape
    shape_note: str | None = None  # why this is not the shape of the budget
    provider: str | None = None  # if other rows differ in it, or if it rounds
    rounds_to: str | None = None
    threads: int | None = None  # if other rows differ in them
    is_pass_per_token: bool = False  # a whole pass for each token


def check_reason(quantity: str, unit: str, figure: Figure, call: Call, *, is_undecided: bool) -> str | None:
    """Return what a figure is of, and why it decides nothing; None for the size of a file."""
    reason = figure.reason
    if quantity != "size" and figure.basis != "unavailable":
        passes = "of a whole pass, which a graph without caches needs for each token, "
        texts = {
            "latency": f"p50 {passes if call.is_pass_per_token else ''}",
            "memory": "peak ",
            "energy": "above idle, per call ",
        }
        where = f"at {call.shape[0]}×{call.shape[1]}" + (f": {call.shape_note}" if call.shape_note else "")
        if call.provider is not None:
            where += f", on {call.provider}"
            where += f", which rounds to {call.rounds_to}" if call.rounds_to is not None else ""
        where += f", with {format_threads(call.threads)}" if call.threads is not None else ""
        estimated = "estimated " if figure.basis == "estimated" else ""
        reason = f"{estimated}{texts[quantity]}{where}" + (f"; {reason}" if reason else "")
    if not is_undecided or figure.value is None:
        return reason
    if figure.low is None or figure.high is None:
        return f"{reason}; an estimate without a range gives no verdict"
    return f"{reason}; the limit lies within the range {shown(figure.low, unit)} to {shown(figure.high, unit)}"


def verdict_notes(verdict: Verdict, exempt: Sequence[str]) -> list[str]:
    """Return notes on what a verdict leaves out, with the options that set a limit.

    ``exempt``: graphs that no limit per decoded token concerns.
    """
    notes: list[str] = []
    flags = {"latency": "--max-latency", "memory": "--max-vram", "size": "--max-size"}
    checked = {check.name for check in verdict.checks}
    missing = [kind.name for kind in verdict.not_judged if kind.name in flags.keys() - checked]
    if not verdict.checks:
        notes.append(
            "nothing was judged, because neither the profile nor the command sets a limit; set one with --max-latency, "
            "--max-size or --max-vram"
        )
    elif missing:
        options = " and ".join(flags[name] for name in missing)
        notes.append(f"not judged: {' and '.join(missing)}; set a limit with {options}")
    if exempt:
        notes.append(f"latency per token is judged for the artifacts that decode only, not for {', '.join(exempt)}")
    return notes


def verdict_status(report: Report) -> str:
    """Return the status for headlines: ``fail``, ``pass (estimated)``, ``pass (size and memory only)``."""
    verdict = report.verdict
    remarks = [f"{listed(verdict.judged)} only"] if verdict.is_partial else []
    if verdict.status != "unknown" and any(check.basis == "estimated" for check in verdict.checks):
        remarks.append("estimated")
    return f"{verdict.status} ({', '.join(remarks)})" if remarks else verdict.status


def badge_markdown(report: Report, file: str) -> str:
    """Return a line of GitHub-flavoured Markdown that shows the badge; ``file``: its path relative to the document."""
    return f"![edgeformer {markdown(f'{report.device}: {verdict_status(report)}')}]({quote(file)})"


def verdict_sentence(report: Report) -> str:
    """Return the verdict in one or two sentences; after a choice, the verdict of its pick."""
    parts, checks, choice = [], report.verdict.checks, report.search
    for status, label in (("fail", "over budget"), ("unknown", "unknown"), ("pass", "within budget")):
        names: dict[str, bool] = {}  # → whether an estimate decides
        for check in checks:
            if check.status == status:
                name = f"{check.name} of {check.artifact}" if status == "fail" else check.name
                names[name] = names.get(name, False) or (check.basis == "estimated" and check.value is not None)
        if names:
            texts = (f"{name} (estimated)" if estimated else name for name, estimated in names.items())
            parts.append(f"{label}: {', '.join(texts)}")
    checked = {check.name for check in checks}
    not_judged = ((kind.name, kind.reason) for kind in report.verdict.not_judged if kind.name not in checked)
    for reason, kinds in names_by_reason(not_judged).items():
        parts.append(f"{listed(kinds)} {'was' if len(kinds) == 1 else 'were'} not judged: {reason}")
    sentence = "; ".join(parts if checks else ["no limit was checked", *parts])
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    if choice is not None and choice.pick is None:
        return f"The search picks no artifact: {choice.reason}."
    if choice is not None and choice.pick is not None:
        pick, bound = choice.candidates[choice.pick], ""
        if pick.bound_inside and choice.bound is not None:
            bound = f", but {pick.score_rows:,} rows are too few to decide whether its {choice.metric}"
            bound += f" is at least {choice.bound:g}"
        sentence = f"The search picks {pick.artifact}{bound}. {sentence}"
    if not report.left_out:
        return sentence
    is_all = report.left_out.keys() >= {row.artifact for row in report.rows}
    count = len(report.left_out)
    excluded = "every artifact" if is_all else f"{count} artifact{'s' if count != 1 else ''}"
    return f"{sentence} Left out: {excluded} that no {report.device_title} can run."


# Estimates

_ESTIMATING = "docs/explanation/estimating.md"


def published_sentence(check: PublishedCheck) -> str:
    """Return ``checked against 41 published measurements on …``."""
    sources = f"{check.sources} source{'s' if check.sources != 1 else ''}"
    return (
        f"checked against {check.rows:,} published measurements {check.subject} ({sources}): median error "
        f"{check.median_error:.0%}, {check.within:.0%} within the range"
    )


def checks_sentence(report: Report) -> str | None:
    """Return how the report's estimates compare with its measurements; None if it has none."""
    from statistics import median  # takes longer to import than the rest of this module

    checks = [check for check in report.estimate_checks if check.stable] or report.estimate_checks
    if not checks:
        return None
    errors = [abs(check.error) for check in checks]
    inside = sum(check.is_inside for check in checks)
    return (
        f"estimates beside {len(checks)} measured times: {inside} inside their ranges, median error "
        f"{median(errors):.0%}, worst {max(errors):.0%}"
    )


def estimate_note(report: Report) -> str | None:
    """Return how far the report's estimates can be trusted; None if it has none."""
    is_estimated = any("estimated" in (row.latency_ms.status, row.memory_bytes.status) for row in report.rows)
    if not is_estimated and not any(check.basis == "estimated" for check in report.verdict.checks):
        return None
    for record in report.estimate_evidence:
        if record.applies:
            models = f" of {record.models} models" if record.models is not None else ""
            cores = f", {record.cores} cores" if record.cores is not None else ""
            where = f"{record.cases} cases{models} on {record.processor}{cores}, {record.measured}; {record.source}"
            errors = f"median {record.median_error:.1%}, largest {record.worst_error:.1%}"
            return f"estimated, not measured; error of estimated times: {errors} ({where})"
    checks = [published_sentence(row.latency_ms.check) for row in report.rows if row.latency_ms.check is not None]
    if checks:
        return f"estimated, not measured; {'; '.join(dict.fromkeys(checks))}"
    device = "a GPU" if report.estimated_for == "cuda" else report.device_title
    return (
        f"estimated, not measured; estimates were never checked on {device}, so their error is unknown ({_ESTIMATING})"
    )


# Choices


def score_objection(score: float, bound: float, metric: Metric, interval: tuple[float, float] | None) -> str:
    """Return that a score misses its limit; ``interval``: of the score, if the limit lies inside it."""
    side = "below" if metric.higher_is_better else "above"
    text = f", inside its 95% interval {interval[0]:.4f} to {interval[1]:.4f}" if interval is not None else ""
    return f"{metric.name} {score:.4f} is {side} {bound:g}{text}"


def limit_objection(name: str, value: float | None, limit: float, unit: str, shape: Shape | None) -> str:
    """Return that a figure exceeds its limit; ``shape``: named if limits are judged at several."""
    place = f" at {shape[0]}×{shape[1]}" if shape is not None else ""
    return f"{name} {shown(value, unit)}{place} is over {shown(limit, unit)}"


class Tie(NamedTuple):
    """Why two costs are no different: overlapping ranges of estimates, or values that differ by less than noise."""

    kind: Literal["ranges", "times", "values"]
    tolerance: float = 0.0
    instant_ms: float = 0.0


class Decision(NamedTuple):
    """Which candidate is picked, and why; candidates are named by their positions."""

    eligible: tuple[int, ...]
    costs: Sequence[Figure]  # the quantity to minimize, of every candidate
    unit: str
    pick: int | None = None
    cheapest: int | None = None
    tie: Tie | None = None  # why the pick is as good as the cheapest, if it is not the cheapest
    runner_up: int | None = None  # the cheapest of the others
    best_score: float | None = None  # eligible are only artifacts of the model with this score …
    score_loss: float = 0.0  # … that lose at most this much of it


def pick_reason(choice: Choice, decision: Decision, metric: Metric, labels: Mapping[str, str]) -> str:
    """Return why the candidate is picked, or why none is; ``labels``: provider → its name for people."""
    candidates, minimize, bound, positions = choice.candidates, choice.minimize, choice.bound, decision.eligible
    demands = "break no limit"
    if decision.best_score is not None:
        loss = f"lose at most one standard error ({decision.score_loss:.4f})" if decision.score_loss else "keep it"
        demands = f"come from the model with the best {metric.name} ({metric.text(decision.best_score)}) and {loss}"
    if bound is not None:
        demands = f"have {metric.name} {'≥' if metric.higher_is_better else '≤'} {bound:g} and {demands}"
    # 1. No pick: the best score says how far the limit is away.
    if decision.pick is None or decision.cheapest is None:
        if not candidates:
            return "nothing was profiled"
        reason = f"none of {len(candidates)} candidates is known to {demands}"
        scores = [(c.score, c.artifact) for c in candidates if c.score is not None]
        if bound is None or not scores:
            return reason
        score, artifact = max(scores) if metric.higher_is_better else min(scores)
        misses = score < bound if metric.higher_is_better else score > bound
        return f"{reason}; best {metric.name}: {score:.4f} ({artifact})" if misses else reason

    def cost_text(position: int) -> str:
        cost = decision.costs[position]
        return ("≈ " if cost.basis == "estimated" else "") + shown(cost.value, decision.unit)

    def label(position: int) -> str:
        """Return the artifact, with runtime and threads if its candidates differ in them."""
        candidate = candidates[position]
        variants = [other for other in candidates if other.artifact == candidate.artifact]
        text = candidate.artifact
        if len({other.provider for other in variants}) > 1:
            text += f" on {labels[candidate.provider]}"
        if len({other.threads for other in variants}) > 1 and candidate.threads is not None:
            text += f" with {format_threads(candidate.threads)}"
        return text

    # 2. The costs of the pick, and of the next candidate.
    pick, cheapest = decision.pick, decision.cheapest
    picked = candidates[pick]
    among = f"of {len(positions)} that {demands}" if len(positions) > 1 else f"the only candidate known to {demands}"
    if (tie := decision.tie) is not None:
        kind, instant = ("measured times", f" or {tie.instant_ms:g} ms") if tie.kind == "times" else ("values", "")
        why = f"a tie: {kind} that differ by less than {tie.tolerance * 100:g}%{instant} are no different"
        why = "their ranges overlap" if tie.kind == "ranges" else why
        advantage = "fewer threads" if minimize == "latency" else "shorter time"
        if picked.size_bytes < candidates[cheapest].size_bytes:
            advantage = f"smaller file ({format_bytes(picked.size_bytes)})"
        reason = (
            f"{label(pick)}: {minimize} {cost_text(pick)}, equal to the smallest ({cost_text(cheapest)}, "
            f"{label(cheapest)}) {among}: {why}, and it has the {advantage}"
        )
    elif len(positions) > 1:
        reason = f"{label(pick)}: smallest {minimize} ({cost_text(pick)}) {among}"
    else:
        reason = f"{label(pick)}: {among} ({minimize} {cost_text(pick)})"
    if decision.runner_up is not None:
        reason += f"; next: {label(decision.runner_up)}, {cost_text(decision.runner_up)}"
    # 3. The uncertainty of its figures.
    unstable = sum(candidates[position].stable is False for position in positions)
    if unstable and minimize in ("latency", "energy"):
        reason += f". {unstable} of the {len(positions)} measurements are unstable: measure again on an idle machine"
    if bound is not None and picked.score_low is not None and picked.score_high is not None:
        low, high = metric.text(picked.score_low), metric.text(picked.score_high)
        reason += f". {metric.name[0].upper()}{metric.name[1:]} {metric.text(picked.score)} on {picked.score_rows:,} "
        reason += f"rows, 95% interval {low} to {high}"
        if picked.bound_inside:
            reason += f": the limit {bound:g} lies inside it, so these rows do not decide whether it is met"
    if picked.unknown:
        reason += f". Unknown: whether it keeps the limit of {' and '.join(picked.unknown)}"
    if choice.basis == "host":
        reason += ". Ranked by the times of this host, because there are none of the device"
    elif picked.latency_status == "estimated":
        reason += ". Its time is an estimate"
    return reason


# Gates

MORE_ROWS = "give a labelled file that neither model was trained on: --eval-data FILE"
"""Remedy for a score that cannot be decided."""
NOT_COMPARABLE = "the baseline or the candidate has no comparable figure"


def paired_rounds(
    rounds: int, fewest: int, longest_s: float, needs_s: float | None, unsettled: int, failures: Sequence[str], *,
    is_undecided: bool, is_most: bool,
) -> str:  # fmt: skip
    """Return how two artifacts were timed, why that did not decide, and what was wrong with single processes.

    Args:
        fewest: rounds that a decision needs; ``needs_s``: seconds that they would take, if that is too long.
        longest_s: seconds after which no round begins.
        unsettled: number of processes that did not settle; ``failures``: why rounds were repeated.
        is_most: more rounds are never measured.
    """
    text = f"{rounds} rounds of two fresh processes"
    if needs_s is not None:
        text = (
            f"a decision needs at least {fewest} rounds, which would take about {needs_s / 60:.0f} minutes at the pace "
            f"of the first {rounds}; use a smaller --seq or --batch"
        )
    elif is_undecided:
        bound = "the most that are measured" if is_most else f"all that fit into {longest_s:.0f} s"
        bound = "the fewest that a decision needs" if rounds <= fewest else bound
        text += (
            f", {bound}, did not decide: the machine is too noisy, or the change is close to the limit; run the gate "
            "again on an idle machine"
        )
    text += f"; {unsettled} of {2 * rounds} processes did not settle" if unsettled else ""
    return text + (f"; one round was repeated after a failure: {', '.join(failures)}" if failures else "")


GATE = {
    "pass": "Every check is within its limit.",
    "fail": "A check is beyond its limit.",
    "undecided": "No check is known to be beyond its limit, but one or more are undecided; the notes say why.",
}
"""Status of a gate → its sentence."""
DRIFT = {
    "unknown": "the bundle of the {} records no difference from torch FP32; export it again",
    "beyond the tolerance": "above its tolerance of {:g}",
    "doubled": "more than twice that of the baseline",
    "loops": "RMS error of the worst loop",
    "outputs": "largest error of an output",
}
"""How the difference from torch FP32 has changed, with the sides or the tolerance."""


SCORE_DOUBT = {
    "too few rows": f"too few rows for a limit of {{:g}}: {MORE_ROWS}",
    "may be chance": f"the loss exceeds the limit of {{:g}}, but may be chance: {MORE_ROWS} with more rows",
    "inside the interval": "the limit of {:g} lies inside the interval, so more rows could change the result",
}
"""Why a score does not decide, or may decide otherwise with more rows; with the limit."""


# Artifacts, data and imports

_MANY = 1e-4  # share of denormal numbers above which a note is written


def portability_notes(audit: Portability) -> list[str]:
    """Return warnings to read before shipping an artifact; empty if nothing is unusual."""
    risks, numbers, saturation = [], audit.denormals, audit.saturation
    for kind, count, total in (
        ("weights", numbers.weights, numbers.of_weights),
        ("activations on golden inputs", numbers.activations or 0, numbers.of_activations or 0),
    ):
        if count > _MANY * max(1, total):
            remedy = "where that is slow, set ONNX Runtime's session.set_denormal_as_zero to 1"
            risks.append(f"{count:,} of {total:,} FP32 {kind} are denormal; {remedy}")
    if saturation is not None and saturation.at_risk:
        at_risk = f"{saturation.at_risk:,} of {saturation.pairs:,} pairs of INT8 weights"
        measured = ""
        if saturation.sums is not None:
            measured = f"; on golden inputs this happens in {saturation.saturated or 0:,} of {saturation.sums:,} sums"
        risks.append(f"{at_risk} can overflow 16 bits on x86 processors with AVX2 and without VNNI{measured}")
    for problem, operators in (
        ("operators outside the ONNX standard, which other runtimes may lack", audit.other_operators),
        ("control flow, which runtimes implement differently", audit.control_flow),
    ):
        if operators:
            risks.append(f"{problem}: {', '.join(f'{name} ({count})' for name, count in operators.items())}")
    return risks


def portability_notes_here(audit: Portability, onnxruntime: str, flags: frozenset[str] | None) -> list[str]:
    """Return warnings for this version of ONNX Runtime and these processor features (None: unknown)."""
    risks = []
    if audit.needs is not None and release(onnxruntime) < release(audit.needs):
        other = ", non-standard operators" if audit.other_operators else ""
        risks.append(
            f"needs ONNX Runtime {audit.needs} (opset {audit.opset}, IR {audit.ir_version}{other}); {onnxruntime} is "
            "installed"
        )
    if audit.saturation is not None and audit.saturation.at_risk:
        if flags is None:
            risks.append(
                "INT8 sums may be wrong on this machine: it is unknown whether its processor has VNNI, without which "
                "16-bit sums saturate"
            )
        elif "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni"}:
            risks.append(
                "INT8 sums may be wrong on this machine: its processor has AVX2 and no VNNI, so 16-bit sums saturate"
            )
    return risks


def exit_time(time: ExitTime) -> str:
    """Compare the time of early exit with that of all loops."""
    if time.quickest_ratio is None or time.ratio_low is None or time.ratio_high is None:
        return "its time was not compared with that of the full graph; run edgeformer exits again"
    means = [time.full_ms["mean"], *([time.full_graph_ms["mean"]] if time.full_graph_ms else [])]
    verdict = {
        True: "early exit is faster",
        False: f"early exit is slower here; use {time.quickest}",
        None: f"{time.rows:,} texts are too few to decide whether early exit is faster",
    }[time.pays]
    return (
        f"one text takes {time.early_ms['mean']:.3g} ms with early exit, {min(means):.3g} ms with all loops of "
        f"{time.quickest} ({time.quickest_ratio:.2f}×, 95% interval {time.ratio_low:.2f} to {time.ratio_high:.2f}): "
        f"{verdict}"
    )


def exit_guarantee(guarantee: ExitGuarantee) -> str:
    """Return the guarantee of early exit."""
    exit_shares = ", ".join(f"{share:.1%} after loop {loop}" for loop, share in guarantee.share.items() if share)
    reused = "; these rows also chose the epoch or judged the artifact, so the guarantee is not independent"
    return (
        f"accuracy drops by at most {guarantee.max_drop:.1%} (absolute) with {100 * guarantee.confidence:.4g}% "
        f"confidence on texts like the {guarantee.rows:,} rows of {guarantee.split} (exits: {exit_shares})"
        f"{reused if guarantee.reused else ''}"
    )


def import_proof(proof: ImportProof) -> str:
    """Return how an imported model compares with its library, for a card or a report."""
    if proof.reason is not None or proof.largest_difference is None:
        return f"the import is not proven: {proof.reason}"
    return (
        f"answers {proof.texts} probe texts as {proof.library}; largest difference {proof.largest_difference:.1e}, "
        f"tolerance {proof.tolerance:.0e}"
    )


def text_lengths(lengths: Lengths, unit: str) -> str:
    """Return the distribution with a histogram, as in paper A, Figure 3; ``unit``: words or tokens."""
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, 8 * count // max(lengths.texts))] for count in lengths.texts)
    histogram = f"{bars} (bins of {lengths.edges[1]})"
    return f"{lengths.min} to {lengths.max} {unit}, half of them at most {lengths.median:g} {histogram}"
