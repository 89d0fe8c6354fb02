"""Pages on speed: targets with their verdicts, and a page per machine, from the JSON files that `make bench` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, SESSION
from benchmarks.frame import markdown
from benchmarks.results_page.provenance import Affected, Change, marks, superseded
from benchmarks.results_page.tables import spread


def machines(folder: Path = RESULTS) -> list[Machine]:
    """Return every machine with results, each in a folder of its own."""
    return [Machine.read(path.parent) for path in sorted(folder.glob(f"*/{SESSION}"))]


def targets() -> str:
    """Return every target with a column of verdicts per machine."""
    columns = machines()
    bars = [machine.bars() for machine in columns]
    cells = [
        [_label(label), target, *(_verdict(of_machine.get((label, target))) for of_machine in bars)]
        for label, target in dict.fromkeys(key for of_machine in bars for key in of_machine)
    ]
    return markdown(["", "target", *(machine.name for machine in columns)], cells)


def summary() -> str:
    """Return how many targets of each group every machine meets, with a link to the machine's page."""
    columns = machines()
    header = ["", *(f"[{machine.name}](machines/{machine.folder.name}.md)" for machine in columns)]
    return markdown(header, [[title, *(met(machine, name) for machine in columns)] for name, title in _GROUPS.items()])


def met(machine: Machine, script: str = "") -> str:
    """Return ``MET of JUDGED`` targets of a script, or of all."""
    names = [script] if script else [*machine.results]
    verdicts = [bar["verdict"] for name in names for bar in machine.results.get(name, {}).get("bars", [])]
    judged = [verdict for verdict in verdicts if verdict in ("met", "not met")]
    return f"{judged.count('met')} of {len(judged)}" if judged else "not measured"


def machine_pages() -> dict[str, str]:
    """Return a page per machine by its path below docs/results."""
    return {f"machines/{m.folder.name}.md": "\n\n".join(section(m)) + "\n" for m in machines()}


@dataclass(frozen=True)
class Machine:
    """Results of `make bench` on a machine: content of session.json, and the JSON of each script that ended."""

    folder: Path
    session: dict[str, Any]
    results: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Machine:
        session = json.loads((folder / SESSION).read_text(encoding="utf-8"))
        done = [name for name, case in session["cases"].items() if case["status"] in ("done", "incomplete")]
        files = {name: folder / f"{name}.json" for name in _TITLES if name in done}
        outcome = {k: json.loads(v.read_text(encoding="utf-8")) for k, v in files.items() if v.is_file()}
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

    def closed(self, name: str) -> str:
        """Return the section of a former script, as it was written last."""
        return (self.folder / f"{name}.md").read_text(encoding="utf-8").rstrip()

    def bars(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return (comparison, target) → the judged bar."""
        bars = [
            bar | ({"superseded": True} if self.superseded(name) else {})
            for name, script in self.results.items()
            for bar in script.get("bars", [])
        ]
        return {(bar["what"], f"{bar['sense']} {bar['wanted']:g}"): bar for bar in bars}


def _label(comparison: str) -> str:
    """Return a comparison as the page words it."""
    for old, new in _LABELS.items():
        comparison = comparison.replace(old, new)
    return comparison


def _verdict(bar: dict[str, Any] | None) -> str:
    """Return the figure and the verdict of a machine."""
    if bar is None:
        return "not measured"
    outcome = spread(bar, " s" if bar["what"].endswith(", s") else "×") if "median" in bar else "–"
    mark = ", superseded" if bar.get("superseded") else ""
    return f"{outcome} {bar['verdict']}{': ' + bar['reason'] if 'reason' in bar else ''}{mark}"


def section(machine: Machine) -> list[str]:
    """Return the parts of a machine's page: a table per script, and the scripts that did not run."""
    session = machine.session
    cases = {name: session["cases"][name] for name in machine.results}
    days = sorted(
        {case.get("measured", session["measured"])[:10] for case in cases.values()} or {session["measured"][:10]}
    )
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    versions: dict[str, list[str]] = {}
    for name, case in cases.items():
        versions.setdefault(case.get("code_version", session["code_version"]), []).append(f"`{name}`")
    measured = "; ".join(f"{version} ({', '.join(names)})" for version, names in versions.items())
    parts = [
        f"# Speed: {machine.name}",
        f"**{met(machine)} targets are met.**",
        f"{session['threads']} threads, {when}. All variants of a comparison take turns in one session; a ratio "
        f"divides medians. Code: {measured}. Raw data: `benchmarks/results/bench/{machine.folder.name}/`.",
    ]
    for name, title in _TITLES.items():
        if name in machine.results:
            text = _BUILT[name](machine.results[name]) if name in _BUILT else machine.closed(name)
            parts += [f"## {title}", text, *marks(machine.superseded(name))]
    skipped = {name: case for name, case in session["cases"].items() if name not in cases}
    reasons = [f"- `{name}`: {case['reason']}" for name, case in skipped.items()]
    return [*parts, *(["## Not measured", "\n".join(reasons)] if reasons else [])]


def _waiting(session: dict[str, Any]) -> str:
    rows = [
        [name, f"{row['median']:.2f} ({row['least']:.2f}–{row['most']:.2f})", f"{row['bar']:g}"]
        for name, row in session["seconds"].items()
    ]
    return markdown(["command", "s", "target"], rows)


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
    header = ["bundle", "batch × tokens", "precision", "fastest runtime", "time ÷ lower bound", "target"]
    return (
        "The lower bound is the least time that this processor needs for the operations and the weights of a call, at "
        f"the rates that it reached beside the measurement.\n\n{markdown(header, rows)}"
    )


def _trainer(session: dict[str, Any]) -> str:
    rows = [[way, spread(row), f"{row['bar']:g}×"] for way, row in session["ratios"].items()]
    words = f"Texts per second against Hugging Face's `Trainer`, in {session['precision']}:"
    return f"{words}\n\n" + markdown(["batches of Trainer", "edgeformer ÷ Trainer", "target"], rows)


_TITLES = {
    "waiting": "Time of commands",
    "floors": "Inference against the lower bound",
    "openvino_speed": "Precisions and runtimes",
    "peers": "Inference against other libraries",
    "decode": "Decoding",
    "hugging_face_trainer": "Training against Hugging Face's Trainer",
    "crt_training_step": "Training step of a language model",
    "predict_start": "Time to the first answer",
    "loop_int8": "Quantized loops",
}
"""Script → heading of its section. Those without a function below are closed: NAME.md has what a page says of them."""

_BUILT: dict[str, Callable[[dict[str, Any]], str]] = {
    "waiting": _waiting, "floors": _floors, "hugging_face_trainer": _trainer,
}  # fmt: skip
_GROUPS = {name: _TITLES[name] for name in ("waiting", "floors", "peers", "decode", "hugging_face_trainer")}
"""Scripts with targets."""

_LABELS = {
    " over its floor": " ÷ lower bound",
    " over ours": " ÷ edgeformer",
    "both ours": "both in edgeformer",
    "openvino: ": "openvino ",
}
"""Words of the JSON files → words of the page."""
