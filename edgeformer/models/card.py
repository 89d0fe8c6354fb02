"""Model card of a run: model, training, data, scores and their limits."""

from typing import Any

from tabulate import tabulate

from edgeformer.artifacts.documents import to_yaml
from edgeformer.artifacts.manifest import LEAKS, UNPROVEN, BundleManifest, RunManifest
from edgeformer.artifacts.recipe import FitConfig, Recipe
from edgeformer.artifacts.units import format_bytes, format_duration, format_memory, markdown, markdown_line
from edgeformer.models import model_spec_of
from edgeformer.report.sentences import import_proof
from edgeformer.tasks import get_task

CARD_FILE = "README.md"
"""File name that model hubs expect, beside weights and graphs."""


def model_card(manifest: RunManifest, recipe: Recipe) -> str:
    """Write the card of a run as Markdown with the front matter that model hubs read."""
    # 1. Describe the front matter and warnings
    model_spec, task, data = model_spec_of(recipe), get_task(recipe.task), manifest.data
    front = {"library_name": "edgeformer", "pipeline_tag": task.pipeline_tag, "tags": list(model_spec.tags)}
    warnings = ""
    if manifest.leaks:
        warnings += (
            f"> **{LEAKS}.** This model sees the tokens that it predicts. Its loss and perplexity say "
            "nothing about how well it predicts text.\n\n"
        )
    if manifest.synthetic:
        warnings += (
            "> **Synthetic data.** This model was trained and tested on reviews written by a generator. "
            "Its scores say nothing about real text.\n\n"
        )
    proof = manifest.proof
    if proof is not None and proof.reason is not None:
        warnings += f"> **{UNPROVEN}:** {markdown(proof.reason)}.\n\n"

    # 2. List facts about model, training and data
    counts = ", ".join(
        f"{name} {count:,} rows" + (f" of {data.tokens[name]:,} tokens" if name in data.tokens else "")
        for name, count in data.rows.items()
    )
    facts = [f"**Model:** {model_spec.card_line(recipe.model)}; {manifest.parameters:,} parameters"]
    probe = manifest.causality
    if task.can_write and probe is None:
        facts.append("**Causality:** not probed")
    elif task.can_write and probe is not None:
        trials = f"{probe.trials} random places in texts of {', '.join(map(str, probe.lengths))} tokens, every exit"
        largest = max(probe.largest_change.values())
        result = f"later tokens change no output (probe: {trials}; largest change {largest:.1e} of an output's spread)"
        if probe.leaks:
            result = f"the probe ({trials}) saw outputs change with tokens up to {probe.reach} positions later"
        facts.append(f"**Causality:** {result}")
    if proof is not None and proof.reason is None:
        facts.append(f"**Import:** {markdown(import_proof(proof))}")
    facts += task.card_lines(recipe)
    training = f"not here; {markdown(str(manifest.reason))}"
    if manifest.steps:
        epoch = manifest.best_epoch
        weights = f"weights of epoch {epoch}" if epoch is not None else "weights of the last step, stopped in mid-epoch"
        training = (
            f"{manifest.epochs} epochs, {manifest.steps:,} steps, {format_duration(manifest.seconds)} in "
            f"{manifest.precision} on {markdown(str(manifest.host.get('cpu')))}; {weights}, chosen by validation "
            f"{getattr(recipe.training, 'select_by', 'loss')}; seed {recipe.seed}"
        )
    if getattr(recipe.training, "start", "source") == "frozen":
        training = "a head fitted to vectors of the unchanged encoder" + (
            f", then {training}" if manifest.steps else ""
        )
    if manifest.steps and isinstance(recipe.training, FitConfig):
        training = (
            f"fitted in {manifest.steps} iterations, {format_duration(manifest.seconds)} on "
            f"{markdown(str(manifest.host.get('cpu')))}"
        )
    facts += [f"**Training:** {training}", f"**Data:** split {markdown(data.split)}; {markdown(counts)}"]
    overlaps = [
        f"- {markdown(overlap.test_set)}: of {overlap.test_rows:,} texts, {overlap.duplicates:,} are also training "
        f"texts and {overlap.contained:,} more share a whole phrase with one.\n"
        for overlap in data.overlap
    ]

    # 3. Make the table of scores
    scores = {name: score for name, score in {"validation": manifest.validation, **manifest.tests}.items() if score}
    has_exits = any(score.by_exit for score in scores.values())
    rows = []  # one per set, or one per set and exit, in loop order, then one for early exit by confidence
    for name, score in scores.items():
        full = {column.name: getattr(score, column.name, None) for column in task.columns}
        results: dict[str, dict[str, Any]] = {f"loop {loop}": dict(result) for loop, result in score.by_exit.items()}
        if score.by_exit:
            results[f"loop {[*score.by_exit][-1]}"] = full
            if (early := score.leaving_early) is not None:
                results[f"by confidence ({early.mean_loops:.2f} loops)"] = dict(early)
        for answered_by, values in (results or {"": full}).items():
            cells = [column.text({"n": score.n, **values}.get(column.name)) for column in task.columns]
            rows.append([markdown(name), *([answered_by] if has_exits else []), *cells])
    header = ("set", *(("answered by",) if has_exits else ()), *(column.heading for column in task.columns))
    table = f"{tabulate(rows, header, tablefmt='github', disable_numparse=True)}\n\n{task.score_note}\n"
    return (
        f"---\n{to_yaml(front)}---\n\n# {markdown(manifest.run)}\n\n"
        f"{markdown_line(recipe.description)}.\n\n"
        f"{warnings}{''.join(f'- {fact}{chr(10)}' for fact in facts)}\n"
        f"## Scores\n\n{table if scores else 'None yet.' + chr(10)}\n"
        f"## Seen in training\n\n{''.join(overlaps) or 'Not counted.' + chr(10)}\n"
        "The exact recipe is `recipe.yaml` in the run's folder; every version and the host are in `run.json`.\n"
    )


def artifact_section(bundle: BundleManifest) -> str:
    """Write what export found out about each artifact of a bundle: sharing in file and memory, drift, errors."""
    rows = []
    for entry in bundle.artifacts:
        if entry.status != "built":
            continue
        parity, sharing, engine, drift = entry.parity, entry.sharing, entry.engine, entry.drift
        error = None if parity is None else parity.max_abs_error
        memory = coverage = last_drift = "–"
        if sharing is not None and sharing.resident_bytes is not None:
            memory = format_memory(sharing.resident_bytes, sharing.resident_ratio)
        if engine is not None and engine.delegated is not None:  # the runtime reports its accelerated operators
            coverage = f"{engine.delegated} of {engine.delegated + sum(engine.not_delegated.values())}"
        if drift is not None and (last := drift.loops[-1]).rms_error is not None:
            interval = last.rms_interval
            interval_text = f" ({interval[0]:.1e}–{interval[1]:.1e})" if interval is not None else ""
            last_drift = f"{last.rms_error:.1e}{interval_text}"
        rows.append([
            entry.id, entry.precision.upper(), format_bytes(entry.size_bytes),
            f"{sharing.stored_parameters:,}" if sharing else "–", memory, coverage, last_drift,
            "–" if error is None else f"{error:.1e}",
        ])  # fmt: skip
    headers = [
        "artifact", "precision", "file", "stored parameters", "memory", "accelerated operators",
        "drift after the last loop", "largest error",
    ]  # fmt: skip
    if not any(entry.engine and entry.engine.delegated for entry in bundle.artifacts):
        column = headers.index("accelerated operators")
        for row in (headers, *rows):
            del row[column]
    return (
        f"## Artifacts\n\n{tabulate(rows, headers, tablefmt='github', disable_numparse=True)}\n\n"
        f"The model has {bundle.parameters:,} parameters, each counted once. Memory is that of the opened artifact on "
        "the exporting machine, and how many times the bytes of its weights that is. Drift (with a 95% interval) and "
        "error compare with torch in FP32 on the golden inputs; drift is a share of the states' root mean square. "
        "`edgeformer verify` repeats the comparison on your device.\n"
    )
