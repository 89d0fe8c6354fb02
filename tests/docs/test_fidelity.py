"""docs/results/fidelity.md: paths and names exist, states are defined and counted, and studies are as stated."""

import ast
import json
import re
from collections import Counter
from typing import Any, NamedTuple

import yaml

from tests.docs.document import ROOT

PAGE = (ROOT / "docs" / "results" / "fidelity.md").read_text(encoding="utf-8")
COUNTS = re.compile(
    r"lists (\d+) elements .* (\d+) are built as in the paper and (\d+) differ on purpose; (\d+) results are measured, "
    r"(\d+) are not measured, and (\d+) elements are absent"
)


class Row(NamedTuple):
    """A row of a table of elements; ``state`` without the remark behind its colon."""

    element: str
    state: str
    where: str
    evidence: str


CELLS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [Row(row[0], row[1].partition(":")[0], *row[2:]) for row in CELLS if len(row) == 4 and row[0] != "element"]
STATES = re.findall(r"^\| \*([\w ]+)\* \| ", PAGE, re.MULTILINE)


def names_in(node: Any) -> dict[str, Any]:
    """Return name → what it stands for in a module or class of Python, or in a mapping of YAML."""
    if isinstance(node, dict):
        return node
    names: dict[str, Any] = {}
    for item in getattr(node, "body", []):
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", item)]
        names |= {getattr(target, "name", getattr(target, "id", "")): item for target in targets}
    return names


def exists(reference: str) -> bool:
    """Whether a file ``path`` exists and has every name of ``path::Class::function`` or ``path::key.key``."""
    path, *names = reference.split("::")
    if not (ROOT / path).exists():
        return False
    if not names:
        return True
    text = (ROOT / path).read_text(encoding="utf-8")
    node: Any = ast.parse(text) if path.endswith(".py") else yaml.safe_load(text)
    for name in ".".join(names).split("."):
        node = names_in(node).get(name)
        if node is None:
            return False
    return True


def has_results(study: str, run: str | None) -> bool:
    """Whether the table of a study is committed, and has rows of ``run``."""
    table = ROOT / "benchmarks" / "results" / "studies" / f"{study}.json"
    if not table.is_file():
        return False
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    return any(row["missing"] is None and run in (None, row["run"]) for row in rows)


def test_every_path_and_name_exists() -> None:
    references = {span for row in ROWS for span in re.findall(r"`([^`]+)`", row.where + row.evidence)}
    assert len(references) > 80 and [span for span in sorted(references) if not exists(span)] == []
    links = {link.partition("#")[0] for row in ROWS for link in re.findall(r"\]\(([^)]+)\)", row.evidence)}
    assert [link for link in sorted(links) if not (ROOT / "docs" / "results" / link).is_file()] == []
    wrong = ("tests/docs/none.py", "tests/docs/test_fidelity.py::Row.none", "recipes/quickstart.yaml::data.none")
    assert not any(exists(reference) for reference in wrong)


def test_states_are_defined_and_counted() -> None:
    assert len(STATES) == 5
    counts = Counter(row.state for row in ROWS)
    assert set(counts) == {*STATES}
    stated = COUNTS.search(" ".join(PAGE.split()))
    assert stated is not None and [*map(int, stated.groups())] == [len(ROWS), *(counts[state] for state in STATES)]
    assert len({row.element for row in ROWS}) == len(ROWS)


def test_studies_are_measured_if_their_tables_are_committed() -> None:
    """A table that is committed later fails here: change the state of the row, and the counts above."""
    wrong = [
        f"{row.element}: {row.state}"
        for row in ROWS
        for study, run in re.findall(r"`benchmarks/studies/([\w-]+)\.yaml(?:::runs\.([\w-]+))?`", row.where)
        if has_results(study, run or None) != (row.state == "measured")
    ]
    assert wrong == []
