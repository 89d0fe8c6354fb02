"""How often does the promise of `edgeformer exits` hold? Held-out rows are split again and again, and judged.

python benchmarks/exit_guarantee.py BUNDLE [--split sst-test | --data FILE] [--json FILE]

Every row is answered at every exit once. Then, for each of several promises: half of the rows, drawn at random,
choose thresholds, and the other half shows what early exit really costs there. That half is a sample itself, on which
a promise that holds can look broken; what the promise is about is texts of the same source. So a second count takes
all rows for that source: as many rows as half of them are drawn with replacement, and the loss is that on all of them.
Both draw 100 times; where a draw promises nothing, everything goes through all loops and nothing is lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import SILENT
from edgeformer.inference.evaluate import EvaluateOptions, Evaluator
from edgeformer.inference.predict import select_candidates
from edgeformer.run import locate
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.tasks.early_exit import first_exits
from edgeformer.tasks.risk_control import METHOD, THRESHOLDS, choose_thresholds

PROMISES = ((0.005, 0.05), (0.01, 0.05), (0.01, 0.1), (0.02, 0.05), (0.02, 0.1), (0.05, 0.05))
"""ε and δ."""

Answers = tuple[tuple[int, ...], NDArray[Any], NDArray[Any]]
"""Exits, and of every row at each of them: top probability, and whether it is right."""


def answers_of(arguments: argparse.Namespace) -> tuple[str, str, str, Answers]:
    """Run, artifact, set, and what it answers."""
    location = locate(arguments.bundle, Path("artifacts"))
    steps = location.open_bundle().built("step")
    (candidate,) = select_candidates(location, arguments.artifact or steps[0].id)
    options = EvaluateOptions(candidate.id, arguments.split, arguments.data, text=arguments.text, label=arguments.label)
    evaluator = Evaluator(options, SILENT)
    notes = evaluator.record_exits(candidate)[1]
    return (
        location.name,
        candidate.id,
        evaluator.set_name(candidate),
        (notes.exits, notes.stacked("confidence"), notes.stacked("right")),
    )


def lost_by(answers: Answers, thresholds: dict[int, float]) -> tuple[float, float]:
    """What early exit costs in accuracy on these rows, and the mean number of loops."""
    exits, sure, right = answers
    leaving = first_exits(exits, sure, thresholds)
    early = right[leaving, np.arange(right.shape[1])]
    return float(right[-1].mean() - early.mean()), float(np.take(exits, leaving).mean())


def some(answers: Answers, rows: NDArray[np.integer]) -> Answers:
    """The same of these rows."""
    return answers[0], answers[1][:, rows], answers[2][:, rows]


def try_promise(answers: Answers, limits: tuple[float, float], draws: int, *, resampled: bool) -> dict[str, Any]:
    """Promise from half of the rows, and judge: by the other half, or with ``again`` (replacement) by all."""
    drawn, count = np.random.default_rng(16), answers[1].shape[1]
    losses, loops, promised = [], [], 0
    for _ in range(draws):
        order = drawn.permutation(count)
        chosen = drawn.integers(count, size=count // 2) if resampled else order[: count // 2]
        results = choose_thresholds(*some(answers, chosen), *limits)
        thresholds = results.thresholds if results is not None else {}
        promised += bool(thresholds)
        loss, mean_loops = lost_by(answers if resampled else some(answers, order[count // 2 :]), thresholds)
        losses.append(loss)
        loops.append(mean_loops)
    kept = int(np.sum(np.array(losses) <= limits[0] + 1e-12))
    return {
        "draws": draws,
        "promised": promised,
        "kept": kept,
        "mean_loss": float(np.mean(losses)),
        "largest_loss": float(np.max(losses)),
        "mean_loops": float(np.mean(loops)),
    }


def curve(answers: Answers) -> list[dict[str, float]]:
    """Every threshold that is tried, at all exits, on all rows."""
    results = []
    for threshold in THRESHOLDS:
        loss, loops = lost_by(answers, dict.fromkeys(answers[0][:-1], threshold))
        results.append({"threshold": threshold, "loss": loss, "mean_loops": loops})
    return results


def tell(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        halves, source = row["other_half"], row["whole_source"]
        print(
            f"ε {row['max_drop']:.1%}, δ {row['risk']:.0%}: kept in {halves['kept']} of {halves['draws']} resplits "
            f"({halves['promised']} promised, {halves['mean_loops']:.2f} loops); of the source in {source['kept']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="a run or a bundle with a step artifact")
    parser.add_argument("--artifact")
    parser.add_argument("--split", default="sst-test")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--label")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run, artifact, name, answers = answers_of(arguments)
    exits, _, right = answers
    rows = []
    for max_drop, risk in PROMISES:
        half, source = (
            try_promise(answers, (max_drop, risk), arguments.draws, resampled=resampled) for resampled in (False, True)
        )
        rows.append({"max_drop": max_drop, "risk": risk, "other_half": half, "whole_source": source})
    tell(rows)
    accuracy = {str(loop): float(row.mean()) for loop, row in zip(exits, right, strict=True)}
    document: dict[str, Any] = {"created": now(), "host": describe_host(), "code_version": code_version(), "run": run}
    document |= {"artifact": artifact, "set": name, "rows": right.shape[1], "accuracy": accuracy, "method": METHOD}
    document |= {"promises": rows, "curve": curve(answers)}
    if arguments.json is not None:
        write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
