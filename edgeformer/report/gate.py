"""A gate for people and for CI: the terminal, a Markdown summary, and JUnit XML that build servers read."""

from __future__ import annotations

from math import inf
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.console import Console
from rich.text import Text

from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.gate import Gate, GateCheck
from edgeformer.artifacts.units import format_bytes, format_milliseconds, markdown, markdown_line, visible
from edgeformer.report.columns import DASH, Column, Columns, coloured
from edgeformer.runtimes import provider_facts

_WORST_FIRST = ("fail", "undecided", "pass")
_MEANINGS = {
    "pass": "Nothing is worse than it may be.",
    "fail": "Something is worse than it may be.",
    "undecided": "Nothing is known to be worse than it may be, but not everything could be decided: the notes say what "
    "is missing.",
}


def print_gate(gate: Gate, console: Console) -> None:
    """Print the checks, the worst first, and the verdict.

    Args:
        gate: what `gate` found.
        console: of the terminal.
    """
    title = f"{gate.candidate}\nagainst {gate.baseline}"
    if gate.checks:
        console.print(_columns(gate).terminal(title, _ordered(gate)))
    console.print(Text.assemble(("Gate: ", "bold"), coloured(gate.status), f". {_MEANINGS[gate.status]}\n"))
    for note in (*_reasons(gate), *gate.notes):
        console.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)


def markdown_summary(gate: Gate) -> str:
    """GitHub-flavoured Markdown, as a workflow's summary shows it."""
    table = _columns(gate).markdown(_ordered(gate), strong=lambda check: check.status in ("fail", "undecided"))
    notes = "".join(f"- {markdown_line(note)}\n" for note in (*_reasons(gate), *gate.notes))
    return (
        f"## edgeformer gate: {gate.status}\n\n{_MEANINGS[gate.status]}\n\n"
        f"{markdown(gate.candidate)} against {markdown(gate.baseline)}, on {markdown(str(gate.host.get('cpu')))}, "
        f"{gate.seconds:.0f} s.\n\n{table}\n\n{notes}"
    )


def junit_xml(gate: Gate) -> str:
    """Render one test case per check. JUnit has no word for undecided: it calls a test without a result an error."""
    tags = {"fail": "failure", "undecided": "error"}
    counts = {tag: sum(tags.get(check.status) == tag for check in gate.checks) for tag in tags.values()}
    suite = Xml.Element(
        "testsuite",
        name="edgeformer gate",
        tests=str(len(gate.checks)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped="0",
        time=f"{gate.seconds:.3f}",
        timestamp=gate.created,
    )
    for check in gate.checks:
        name = " ".join(filter(None, (check.name, _at(check), _with(check) and f"with {_with(check)}")))
        case = Xml.SubElement(suite, "testcase", classname=visible(check.artifact), name=name)
        said = visible(f"{_sentence(check)}{f' ({check.reason})' if check.reason else ''}")
        if check.status in tags:
            Xml.SubElement(case, tags[check.status], message=said)
        else:
            Xml.SubElement(case, "system-out").text = said
    Xml.indent(suite)
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def write_junit(gate: Gate, path: Path) -> None:
    """Write :func:`junit_xml`; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, junit_xml(gate))


def append_summary(gate: Gate, path: Path) -> None:
    """Add :func:`markdown_summary` to a file, as a workflow's summary is written by all of its steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown_summary(gate))


def _ordered(gate: Gate) -> list[GateCheck]:
    return sorted(gate.checks, key=lambda check: _WORST_FIRST.index(check.status))


def _at(check: GateCheck) -> str:
    if check.batch is None:
        return ""
    return f"{check.batch} × {check.seq}{' per token' if check.phase == 'decode' else ''}"


def _with(check: GateCheck) -> str:
    """The runtime, where one was named."""
    return "" if check.provider is None else provider_facts(check.provider).label


def _written(value: float | None, check: GateCheck) -> str:
    if value is None:
        return DASH
    if check.unit == "bytes":
        return format_bytes(value)
    return f"{format_milliseconds(value)} ms" if check.unit == "ms" else f"{value:.4g}"


def _change(check: GateCheck) -> str:
    """``+3.1 %``; of a score the difference in its own unit."""
    if check.change is None:
        return DASH
    return f"{check.change:+.4f}" if check.name == "score" else f"{check.change:+.1%}"


def _range(check: GateCheck) -> str:
    if check.low is None or check.high is None or check.high == inf:
        return ""
    places = "+.4f" if check.name == "score" else "+.1%"
    return f"{check.low:{places}} to {check.high:{places}}"


def _limit(check: GateCheck) -> str:
    if check.limit is None:
        return DASH
    return f"-{check.limit:.4f}" if check.name == "score" else f"+{check.limit:.1%}"


def _sentence(check: GateCheck) -> str:
    known = f"{_written(check.baseline, check)} before, {_written(check.candidate, check)} now, {_change(check)}"
    found = "whether faster or slower is not known" if check.found == "not known" else check.found or ""
    parts = [known, _range(check), found, f"allowed {_limit(check)}"]
    return "; ".join(part for part in parts if part) if check.limit is not None else check.reason


def _reasons(gate: Gate) -> list[str]:
    """Reasons of the checks that did not pass, and of all scores (their uncertainty); equal ones once."""
    found: dict[str, list[str]] = {}
    for check in _ordered(gate):
        if check.reason and (check.status != "pass" or check.name == "score"):
            runtime = _with(check) and f" with {_with(check)}"
            found.setdefault(check.reason, []).append(f"{check.name} of {check.artifact}{runtime}")
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]


def _columns(gate: Gate) -> Columns[GateCheck]:
    return CHECKS.pick(*_SHOWN).known_in(gate.checks, "with")


_SHOWN = ("result", "check", "artifact", "at", "with", "before", "now", "change", "range", "allowed")
CHECKS: Columns[GateCheck] = Columns(
    [
        Column("result", attrgetter("status"), mark=True),
        Column("check", attrgetter("name")),
        Column("artifact", attrgetter("artifact")),
        Column("at", _at, text=_at, leaves=3),
        Column("with", attrgetter("provider"), text=_with, leaves=4),
        Column("before", attrgetter("baseline"), text=lambda c: _written(c.baseline, c), number=True, leaves=2),
        Column("now", attrgetter("candidate"), text=lambda c: _written(c.candidate, c), number=True, leaves=2),
        Column("change", attrgetter("change"), text=_change, number=True),
        Column("range", attrgetter("low"), text=_range, number=True),
        Column("allowed", attrgetter("limit"), text=_limit, number=True),
    ]
)
