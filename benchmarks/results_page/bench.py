"""The section on speed: a table for each JSON that `make bench` left, nothing where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, SESSION
from benchmarks.results_page.tables import markdown, spread


def bench(folder: Path = RESULTS) -> str:
    """A part per script that the session says was done, in the order of ``make bench``; empty where nothing was."""
    session = folder / SESSION
    if not session.is_file():
        return ""
    told = json.loads(session.read_text(encoding="utf-8"))
    done = {name: case for name, case in told["cases"].items() if case["status"] in ("done", "incomplete")}
    days = sorted({case.get("measured", told["measured"])[:10] for case in done.values()} or {told["measured"][:10]})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    parts = [f"{told['host']}, {told['threads']} threads, {when}. Ratios are of medians, in turns."]
    for name, made in _PARTS.items():
        path = folder / f"{name}.json"
        if name in done and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            parts += [made(found), *bars(found)]
    skipped = {name: case for name, case in told["cases"].items() if name not in done}
    parts += [f"`{name}` did not run: {case['reason']}." for name, case in skipped.items()]
    return "\n\n".join(parts)


def bars(told: dict[str, Any]) -> list[str]:
    """The verdicts of a script that has bars, as a table."""
    if not told.get("bars"):
        return []
    rows = [
        [
            bar["what"],
            spread(bar, " s" if bar["what"].endswith(", s") else "×") if "median" in bar else "–",
            f"{bar['sense']} {bar['wanted']:g}",
            f"{bar['verdict']}: {bar['reason']}" if "reason" in bar else bar["verdict"],
        ]
        for bar in told["bars"]
    ]
    return [markdown(["", "found", "bar", "verdict"], rows)]


def _waiting(told: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['median']:.2f} ({row['least']:.2f}–{row['most']:.2f})", f"{row['bar']:g}"]
        for name, row in told["seconds"].items()
    ]
    return "What one waits for:\n\n" + markdown(["", "s", "bar"], rows)


def _floors(told: dict[str, Any]) -> str:
    rows = [
        [
            name,
            shape,
            precision.upper(),
            best["way"],
            f"{best['floors']:.2f}",
            f"{best['bar']:g}" if best["bar"] else "",
        ]
        for name, shapes in told["bundles"].items()
        for shape, found in shapes.items()
        for precision, best in found["best"].items()
    ]
    header = ["bundle", "batch × tokens", "precision", "quickest way", "times its floor", "bar"]
    return "The quickest way in each precision, against what the processor could do at best:\n\n" + markdown(
        header, rows
    )


def _by_shape(words: str) -> Callable[[dict[str, Any]], str]:
    def made(told: dict[str, Any]) -> str:
        shapes = told["shapes"]
        ways = list(dict.fromkeys(way for rows in shapes.values() for way in rows))
        cells = [
            [way, *(f"{rows[way]['ratio']:.2f}×" if way in rows else "–" for rows in shapes.values())] for way in ways
        ]
        return f"{words}\n\n" + markdown(["", *shapes], cells)

    return made


def _decode(told: dict[str, Any]) -> str:
    rows = []
    for precision in ("fp32", "int8", "int4", "nbits8"):
        for name, value in told.get(precision, {}).items():
            several = {"": value} if "median" in value else value
            rows += [
                [precision.upper(), f"{name.replace('_', ' ')} {loop}".rstrip(), spread(one)]
                for loop, one in several.items()
            ]
    return f"Decoding, {told['recipe']}, context {told['context']}:\n\n" + markdown(["", "ratio", ""], rows)


def _trainer(told: dict[str, Any]) -> str:
    rows = [[way, spread(row), f"{row['bar']:g}×"] for way, row in told["ratios"].items()]
    words = f"Texts per second against Hugging Face's `Trainer`, in {told['precision']}:"
    return f"{words}\n\n" + markdown(["Trainer", "edgeformer", "bar"], rows)


def _training_step(told: dict[str, Any]) -> str:
    share = told["trainer"]["outside_of_computing"]
    return (
        f"A training step of `{told['recipe']}` takes plain torch {spread(told['plain_over_edgeformer'])} the time; of "
        f"the trainer's own {100 * share:.1f} % is no computing."
    )


def _predict_start(told: dict[str, Any]) -> str:
    rows = [[row["command"], f"{row['median_s']:.2f}", f"{row['beyond_import_s']:.2f}"] for row in told["rows"]]
    return "The first answer:\n\n" + markdown(["", "s", "beyond the import of ONNX Runtime"], rows)


def _loops(told: dict[str, Any]) -> str:
    from benchmarks.loop_int8 import table  # loads torch

    title = "`crt_mini` in INT8, activations with a scale per loop or found while running, and in INT4:"
    return f"{title}\n\n{table(told)}"


_PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "waiting": _waiting,
    "floors": _floors,
    "openvino_speed": _by_shape("Times over ONNX Runtime's FP32, by batch × tokens:"),
    "peers": _by_shape("Times over our quickest way with the same weights, by batch × tokens:"),
    "decode": _decode,
    "hugging_face_trainer": _trainer,
    "crt_training_step": _training_step,
    "predict_start": _predict_start,
    "loop_int8": _loops,
}
