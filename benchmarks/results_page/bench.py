"""The section on speed: a table for each JSON that `make bench` left, nothing where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, SESSION
from benchmarks.decode import with_speedups
from benchmarks.results_page.provenance import Affected, Change, marks, superseded
from benchmarks.results_page.tables import markdown, spread


def bench(folder: Path = RESULTS) -> str:
    """Every bar with what each machine found, then a section per machine, in the order of ``make bench``.

    Args:
        folder: of results; those of a machine lie in a folder of their own. Where there are none the answer is empty.
    """
    machines = [Machine.read(path.parent) for path in sorted(folder.glob(f"*/{SESSION}"))]
    judged = [bars(machines)] if any(machine.bars for machine in machines) else []
    return "\n\n".join([*judged, *(part for machine in machines for part in section(machine))])


@dataclass(frozen=True)
class Machine:
    """What `make bench` left of one.

    Attributes:
        folder: of its results.
        session: content of session.json.
        found: script → its JSON, of those that the session says were done.
    """

    folder: Path
    session: dict[str, Any]
    found: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Machine:
        """From its folder."""
        session = json.loads((folder / SESSION).read_text(encoding="utf-8"))
        done = [name for name, case in session["cases"].items() if case["status"] in ("done", "incomplete")]
        files = {name: folder / f"{name}.json" for name in _PARTS if name in done}
        outcome = {k: json.loads(v.read_text(encoding="utf-8")) for k, v in files.items() if v.is_file()}
        if "decode" in outcome:
            outcome["decode"] = with_speedups(outcome["decode"])
        return cls(folder, session, outcome)

    @property
    def name(self) -> str:
        """For headings: the processor, and what it multiplies in beside FP32."""
        kinds = self.session.get("kernels", [])
        return f"{self.session['host']} ({', '.join(kinds)})" if kinds else str(self.session["host"])

    def superseded(self, name: str) -> list[tuple[Change, Affected]]:
        """Return the changes of the code that a script's figures do not have."""
        day = self.session["cases"][name].get("measured", self.session["measured"])
        return superseded(f"bench/{self.folder.name}/{name}.json", day)

    @property
    def bars(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What is compared, and what was wanted of it → its bar."""
        outcome = [
            bar | ({"superseded": True} if self.superseded(name) else {})
            for name, script in self.found.items()
            for bar in script.get("bars", [])
        ]
        return {(bar["what"], f"{bar['sense']} {bar['wanted']:g}"): bar for bar in outcome}


def bars(machines: Sequence[Machine]) -> str:
    """The verdicts of all scripts that have bars, as a table: a column per machine."""
    rows = dict.fromkeys(key for machine in machines for key in machine.bars)
    cells = [
        [label, target, *(_verdict(machine.bars.get((label, target))) for machine in machines)]
        for label, target in rows
    ]
    return markdown(["", "bar", *(machine.name for machine in machines)], cells)


def _verdict(bar: dict[str, Any] | None) -> str:
    """Of one machine, with what it found."""
    if bar is None:
        return "not measured"
    outcome = spread(bar, " s" if bar["what"].endswith(", s") else "×") if "median" in bar else "–"
    mark = ", superseded" if bar.get("superseded") else ""
    return f"{outcome} {bar['verdict']}{': ' + bar['reason'] if 'reason' in bar else ''}{mark}"


def section(machine: Machine) -> list[str]:
    """A heading, and a part per script; what did not run, and why."""
    session = machine.session
    cases = {name: session["cases"][name] for name in machine.found}
    days = sorted(
        {case.get("measured", session["measured"])[:10] for case in cases.values()} or {session["measured"][:10]}
    )
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    versions: dict[str, list[str]] = {}
    for name, case in cases.items():
        versions.setdefault(case.get("code_version", session["code_version"]), []).append(f"`{name}`")
    measured = "; ".join(f"{version} ({', '.join(names)})" for version, names in versions.items())
    parts = [
        f"### {machine.name}",
        f"{session['threads']} threads, {when}. Ratios are of medians, in turns. By the code of {measured}.",
    ]
    for name, built in _PARTS.items():
        if name in machine.found:
            parts += [built(machine.found[name]), *marks(machine.superseded(name))]
    skipped = {name: case for name, case in session["cases"].items() if name not in cases}
    return [*parts, *(f"`{name}` did not run: {case['reason']}." for name, case in skipped.items())]


def _waiting(session: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['median']:.2f} ({row['least']:.2f}–{row['most']:.2f})", f"{row['bar']:g}"]
        for name, row in session["seconds"].items()
    ]
    return "What one waits for:\n\n" + markdown(["", "s", "bar"], rows)


def _floors(session: dict[str, Any]) -> str:
    rows = [
        [
            name,
            shape,
            precision.upper(),
            best["way"],
            f"{best['floors']:.2f}",
            f"{best['bar']:g}" if best["bar"] else "",
        ]
        for name, shapes in session["bundles"].items()
        for shape, outcome in shapes.items()
        for precision, best in outcome["best"].items()
    ]
    header = ["bundle", "batch × tokens", "precision", "quickest way", "times its floor", "bar"]
    return "The quickest way in each precision, against what the processor could do at best:\n\n" + markdown(
        header, rows
    )


def _by_shape(words: str) -> Callable[[dict[str, Any]], str]:
    def made(session: dict[str, Any]) -> str:
        shapes = session["shapes"]
        ways = list(dict.fromkeys(way for rows in shapes.values() for way in rows))
        cells = [
            [way, *(f"{rows[way]['ratio']:.2f}×" if way in rows else "–" for rows in shapes.values())] for way in ways
        ]
        if counted := session.get("operations"):
            cells.append(["light, operations of its products", *(f"{counted[item]:.2f}×" for item in shapes)])
        return f"{words}\n\n" + markdown(["", *shapes], cells)

    return made


_DECODE = {
    "all_loops_over_exit": "all loops over exit {loop}",
    "exits_share_of_loop_ratio": "loops only (embedding and head subtracted), exit {loop}: share of the loops' ratio",
}
"""Keys of ratios whose name says too little → what the page calls them."""


def _decode(session: dict[str, Any]) -> str:
    rows = []
    loops = max(int(name.rpartition(" ")[2]) for name in session["ms"] if " steps, exit " in name)
    for precision in ("fp32", "int8", "int4", "nbits8"):
        for name, value in session.get(precision, {}).items():
            several = {"": value} if "median" in value else value
            for loop, ratio in several.items():
                words = _DECODE.get(name, name.replace("_", " ")).format(loop=loop)
                displayed = spread(ratio)
                if name == "all_loops_over_exit":
                    maximum = loops / int(loop)
                    displayed = f"{displayed}, {100 * ratio['median'] / maximum:.0f} % of {maximum:.3g}"
                rows.append([precision.upper(), words, displayed])
        if reading := session["bandwidth"].get("torch_over_reading_weights", {}).get(precision):
            rows.append([precision.upper(), "torch over reading the weights at the memory's rate", spread(reading)])
    return f"Decoding, {session['recipe']}, context {session['context']}:\n\n" + markdown(["", "ratio", ""], rows)


def _trainer(session: dict[str, Any]) -> str:
    rows = [[way, spread(row), f"{row['bar']:g}×"] for way, row in session["ratios"].items()]
    words = f"Texts per second against Hugging Face's `Trainer`, in {session['precision']}:"
    return f"{words}\n\n" + markdown(["Trainer", "edgeformer", "bar"], rows)


def _training_step(session: dict[str, Any]) -> str:
    share = session["trainer"]["outside_of_computing"]
    return (
        f"A training step of `{session['recipe']}` takes plain torch {spread(session['plain_over_edgeformer'])} the "
        f"time; of the trainer's own {100 * share:.1f} % is no computing."
    )


def _predict_start(session: dict[str, Any]) -> str:
    rows = [[row["command"], f"{row['median_s']:.2f}", f"{row['beyond_import_s']:.2f}"] for row in session["rows"]]
    return "The first answer:\n\n" + markdown(["", "s", "beyond the import of ONNX Runtime"], rows)


def _loops(session: dict[str, Any]) -> str:
    from benchmarks.loop_int8 import table  # loads torch

    title = (
        "`crt_mini` in INT8, activations with a scale per loop or found while running, and in INT4; perplexity of the "
        f"first {session['tokens']:,} tokens of the validation text:"
    )
    return f"{title}\n\n{table(session)}"


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
