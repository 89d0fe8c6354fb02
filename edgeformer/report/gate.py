"""A gate on the terminal, as a Markdown summary for CI, and as JUnit XML for build servers."""

from __future__ import annotations

from math import inf
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.console import Console
from rich.text import Text

from edgeformer.artifacts.command_results import Gate, GateCheck
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.units import markdown, markdown_line, visible
from edgeformer.report.columns import DASH, Column, Columns, coloured, format_value
from edgeformer.report.context import names_by_reason
from edgeformer.runtimes import provider_facts

_MEANINGS = {
    "pass": "Nothing is worse than it may be.",
    "fail": "Something is worse than it may be.",
    "undecided": "Nothing is known to be worse than it may be, but not everything could be decided: the notes say what "
    "is missing.",
}


def _shape(check: GateCheck) -> str:
    per_token = " per token" if check.phase == "decode" else ""
    return "" if check.batch is None else f"{check.batch} × {check.seq}{per_token}"


def _runtime(check: GateCheck) -> str:
    return "" if check.provider is None else provider_facts(check.provider).label


def _value(value: float | None, check: GateCheck) -> str:
    if value is None or check.unit == "bytes":
        return format_value(value, "bytes")
    return format_value(value, "ms") if check.unit == "ms" else f"{value:.4g}"


def _change(value: float | None, check: GateCheck) -> str:
    """``+3.1 %``; for a score the difference in its own unit."""
    if value is None:
        return DASH
    return f"{value:+.4f}" if check.name == "score" else f"{value:+.1%}"


def _range(check: GateCheck) -> str:
    if check.low is None or check.high is None or check.high == inf:
        return ""
    return f"{_change(check.low, check)} to {_change(check.high, check)}"


def _limit(check: GateCheck) -> str:
    return _change(-check.limit if check.name == "score" and check.limit is not None else check.limit, check)


_CHECKS: Columns[GateCheck] = Columns(
    [
        Column("result", "status", mark=True),
        Column("check", "name"),
        Column("artifact"),
        Column("at", _shape, leaves=3),
        Column("with", "provider", text=_runtime, leaves=4),
        Column("before", "baseline", text=lambda check: _value(check.baseline, check), number=True, leaves=2),
        Column("now", "candidate", text=lambda check: _value(check.candidate, check), number=True, leaves=2),
        Column("change", text=lambda check: _change(check.change, check), number=True),
        Column("range", "low", text=_range, number=True),
        Column("allowed", "limit", text=_limit, number=True),
    ]
)


def _sorted_checks(gate: Gate) -> list[GateCheck]:
    """Return the checks, worst first."""
    return sorted(gate.checks, key=lambda check: ("fail", "undecided", "pass").index(check.status))


def _notes(gate: Gate) -> list[str]:
    """Return reasons of checks that did not pass and of all scores, equal ones once, and the gate's notes."""
    reasons = names_by_reason(
        (f"{check.name} of {check.artifact}{f' with {_runtime(check)}' if _runtime(check) else ''}", check.reason)
        for check in _sorted_checks(gate)
        if check.reason and (check.status != "pass" or check.name == "score")
    )
    return [*(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()), *gate.notes]


def print_gate(gate: Gate, console: Console) -> None:
    """Print the checks, worst first, the verdict and the notes."""
    if gate.checks:
        title = f"{gate.candidate}\nagainst {gate.baseline}"
        console.print(_CHECKS.drop_empty(gate.checks, "with").terminal(title, _sorted_checks(gate)))
    console.print(Text.assemble(("Gate: ", "bold"), coloured(gate.status), f". {_MEANINGS[gate.status]}\n"))
    for note in _notes(gate):
        console.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)


def markdown_summary(gate: Gate) -> str:
    """Return GitHub-flavoured Markdown for a workflow's summary."""
    columns = _CHECKS.drop_empty(gate.checks, "with")
    table = columns.markdown(_sorted_checks(gate), bold=lambda check: check.status in ("fail", "undecided"))
    notes = "".join(f"- {markdown_line(note)}\n" for note in _notes(gate))
    return (
        f"## edgeformer gate: {gate.status}\n\n{_MEANINGS[gate.status]}\n\n"
        f"{markdown(gate.candidate)} against {markdown(gate.baseline)}, on {markdown(str(gate.host.get('cpu')))}, "
        f"{gate.seconds:.0f} s.\n\n{table}\n\n{notes}"
    )


def append_summary(gate: Gate, path: Path) -> None:
    """Append :func:`markdown_summary` to a file: all steps of a workflow write to one summary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown_summary(gate))


def junit_xml(gate: Gate) -> str:
    """Return a test case per check. An undecided check is an error, JUnit's word for a test without a result."""
    tags = {"fail": "failure", "undecided": "error"}
    counts = {tag: sum(tags.get(check.status) == tag for check in gate.checks) for tag in tags.values()}
    suite = Xml.Element(
        "testsuite", name="edgeformer gate", tests=str(len(gate.checks)), failures=str(counts["failure"]),
        errors=str(counts["error"]), skipped="0", time=f"{gate.seconds:.3f}", timestamp=gate.created,
    )  # fmt: skip
    for check in gate.checks:
        runtime = f"with {_runtime(check)}" if _runtime(check) else ""
        name = " ".join(filter(None, (check.name, _shape(check), runtime)))
        case = Xml.SubElement(suite, "testcase", classname=visible(check.artifact), name=name)
        sentence = check.reason
        if check.limit is not None:
            values = f"{_value(check.baseline, check)} before, {_value(check.candidate, check)} now"
            decision = "whether faster or slower is not known" if check.found == "not known" else check.found
            parts = (f"{values}, {_change(check.change, check)}", _range(check), decision, f"allowed {_limit(check)}")
            sentence = "; ".join(filter(None, parts))
        message = visible(f"{sentence}{f' ({check.reason})' if check.reason else ''}")
        if check.status in tags:
            Xml.SubElement(case, tags[check.status], message=message)
        else:
            Xml.SubElement(case, "system-out").text = message
    Xml.indent(suite)
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def write_junit(gate: Gate, path: Path) -> None:
    """Write :func:`junit_xml`; create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, junit_xml(gate))
