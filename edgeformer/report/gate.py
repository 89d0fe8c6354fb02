"""A gate on the terminal, as a Markdown summary for CI, and as JUnit XML for build servers."""

from math import inf
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.console import Console
from rich.text import Text

from edgeformer.artifacts.units import markdown, markdown_line, visible
from edgeformer.benchmark.gate_result import Gate, GateCheck
from edgeformer.report.columns import CHECK_UNITS, DASH, Column, Record, TableColumns, coloured, format_value
from edgeformer.report.sentences import GATE, names_by_reason
from edgeformer.runtimes import provider_facts

_COLUMNS: TableColumns[Record] = TableColumns(
    Column("result", mark=True),
    Column("check"),
    Column("artifact"),
    Column("at", leaves=3),
    Column("with", lambda record: record["with"] or None, leaves=4, dash=""),
    *(Column(name, number=True, leaves=2) for name in ("before", "now")),
    *(Column(name, number=True) for name in ("change", "range", "allowed")),
)


def _change(value: float | None, check: GateCheck) -> str:
    """``+3.1%``; for a score the difference in its own unit."""
    if value is None:
        return DASH
    return f"{value:+.4f}" if check.name == "score" else f"{value:+.1%}"


def _records(gate: Gate) -> list[Record]:
    """Return the checks as text, worst first."""
    records = []
    for check in sorted(gate.checks, key=lambda check: ("fail", "undecided", "pass").index(check.status)):
        per_token = {"decode": " per token", "prefill": " of the prompt"}.get(check.phase or "", "")
        unit = CHECK_UNITS.get(check.unit, "")
        before, now = (
            format_value(value, unit) if value is None or unit else f"{value:.4g}"
            for value in (check.baseline, check.candidate)
        )
        ends = (check.low, check.high)
        has_range = None not in ends and check.high != inf
        limit = -check.limit if check.name == "score" and check.limit is not None else check.limit
        records.append({
            "result": check.status, "check": check.name, "artifact": check.artifact,
            "at": "" if check.batch is None else f"{check.batch} × {check.seq}{per_token}",
            "with": "" if check.provider is None else provider_facts(check.provider).label,
            "before": before, "now": now, "change": _change(check.change, check),
            "range": " to ".join(_change(end, check) for end in ends) if has_range else "",
            "allowed": _change(limit, check), "reason": check.reason,
            "found": "faster or slower is undecided" if check.found == "not known" else check.found or "",
        })  # fmt: skip
    return records


def _notes(gate: Gate) -> list[str]:
    """Return reasons of checks that did not pass and of all scores, equal ones once, and the gate's notes."""
    reasons = names_by_reason(
        (f"{r['check']} of {r['artifact']}{' with ' if r['with'] else ''}{r['with']}", r["reason"])
        for r in _records(gate)
        if r["reason"] and (r["result"] != "pass" or r["check"] == "score")
    )
    return [*(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()), *gate.notes]


def print_gate(gate: Gate, console: Console) -> None:
    """Print the checks, worst first, the verdict and the notes."""
    if records := _records(gate):
        title = f"{gate.candidate}\nagainst {gate.baseline}"
        console.print(_COLUMNS.drop_empty(records, "with").terminal(title, records))
    console.print(Text.assemble(("Gate: ", "bold"), coloured(gate.status), f". {GATE[gate.status]}\n"))
    for note in _notes(gate):
        console.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)


def append_summary(gate: Gate, path: Path) -> None:
    """Append GitHub-flavoured Markdown to a workflow's summary, one file to which all steps write."""
    records = _records(gate)
    columns = _COLUMNS.drop_empty(records, "with")
    table = columns.markdown(records, bold=lambda record: record["result"] in ("fail", "undecided"))
    notes = "".join(f"- {markdown_line(note)}\n" for note in _notes(gate))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(
            f"## edgeformer gate: {gate.status}\n\n{GATE[gate.status]}\n\n"
            f"{markdown(gate.candidate)} against {markdown(gate.baseline)}, on {markdown(str(gate.host.get('cpu')))}, "
            f"{gate.seconds:.0f} s.\n\n{table}\n\n{notes}"
        )


def junit_xml(gate: Gate) -> str:
    """Return a test case per check. An undecided check is an error, JUnit's word for a test without a result."""
    tags = {"fail": "failure", "undecided": "error"}
    counts = {tag: sum(tags.get(check.status) == tag for check in gate.checks) for tag in tags.values()}
    suite = Xml.Element(
        "testsuite", name="edgeformer gate", tests=str(len(gate.checks)), failures=str(counts["failure"]),
        errors=str(counts["error"]), skipped="0", time=f"{gate.seconds:.3f}", timestamp=gate.created,
    )  # fmt: skip
    for record in _records(gate):
        runtime = f"with {record['with']}" if record["with"] else ""
        name = " ".join(filter(None, (record["check"], record["at"], runtime)))
        case = Xml.SubElement(suite, "testcase", classname=visible(record["artifact"]), name=name)
        message = record["reason"]
        if record["allowed"] != DASH:
            change = f"{record['before']} before, {record['now']} now, {record['change']}"
            parts = (change, record["range"], record["found"], f"allowed {record['allowed']}")
            message = "; ".join(filter(None, parts)) + (f" ({message})" if message else "")
        tag = tags.get(record["result"])
        if tag is not None:
            Xml.SubElement(case, tag, message=visible(message))
        else:
            Xml.SubElement(case, "system-out").text = visible(message)
    Xml.indent(suite)
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
