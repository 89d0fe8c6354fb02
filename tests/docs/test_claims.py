"""docs/claims.yaml and docs/results/fidelity.md: complete, and every verdict and state is what is committed."""

import ast
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from benchmarks.claims.__main__ import CLAIMS, PAGE, dump, judged
from benchmarks.claims.history import changed, read_history, trace
from benchmarks.claims.page import page, tally
from benchmarks.claims.schema import Claim, Result, read_claims
from benchmarks.claims.verdicts import fault
from benchmarks.frame import RESULTS
from edgeformer.artifacts.errors import InputError
from tests.docs.document import ROOT


def small(tmp_path: Path, **changes: Any) -> Path:
    """A file with one claim, whose figure is in ``results/figures.json``."""
    ours = {"kind": "json", "file": "figures.json", "path": ["runs", {"name": "light"}, "$figure"]}
    claim: dict[str, Any] = {"text": "an accuracy of 0.9", "where": {"a": "Table 1"}, "study": "one", "unit": "share"}
    claim |= {"published": {"accuracy": 0.9}, "ours": ours, "rule": {"kind": "reached", "absolute": 0.01}, **changes}
    claims = {"first": {key: value for key, value in claim.items() if value is not None}}
    texts = {"a": {"title": "A text", "paper": "A"}}
    content = {"texts": texts, "studies": {"one": "a study"}, "sources": {}, "claims": claims}
    (tmp_path / "results" / "studies").mkdir(parents=True, exist_ok=True)
    measured = {"runs": [{"name": "light", "accuracy": 0.895}, {"name": "heavy", "accuracy": 0.7}]}
    (tmp_path / "results" / "figures.json").write_text(json.dumps(measured), encoding="utf-8")
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def test_what_is_committed_is_complete_and_what_the_results_say() -> None:
    claims = judged(CLAIMS, RESULTS)
    assert CLAIMS.read_text(encoding="utf-8") == dump(claims), "run: make results"
    assert PAGE.read_text(encoding="utf-8") == page(claims, read_history()), "run: make results"
    history = read_history()
    newest = len(history.commits)
    for name, origin in history.origins(claims).items():
        places = (origin.rule.place, origin.source.place, origin.figure and origin.figure.place)
        assert newest not in places, f"{name} is newer than its commit; run: python -m benchmarks.claims --history"
    readings = {name: claim.reading_of for name, claim in claims.claims.items() if claim.reading_of}
    assert {"b-loop6-best-causal", "b-trm-conv-wins-causal"} <= readings.keys()
    assert not any(claims.claims[name].is_counted for name in readings)
    sentences = [(claim.text, *claim.where.items()) for claim in claims.claims.values() if claim.is_counted]
    repeated = {text for text, *_ in sentences if [other for other, *_ in sentences].count(text) > 1}
    rows = {text for text in repeated if " | " in text}  # a row of a table has parameters and a size
    assert repeated - rows == {"On the short-only subset (1–2 token inputs), both models show reduced performance"}
    assert len(claims.claims) >= 60
    covered = {text for claim in claims.claims.values() for text in claim.where}
    assert covered == {*claims.texts} and len(covered) == 5
    assert all(claim.result is not None for claim in claims.claims.values())
    number, *verdicts = tally([*claims.claims.values()])
    assert number == sum(verdicts)
    assert {claim.study for claim in claims.claims.values()} == {*claims.studies}


def test_each_claim_has_the_commits_of_its_rule_and_figure() -> None:
    """A rule that changed after its figure is younger; other words, and a figure that stays, change nothing."""

    def version(absolute: float, accuracy: float | None, source: str = "t", because: str = "") -> dict[str, Any]:
        rule = {"kind": "within", "absolute": absolute, **({"because": because} if because else {})}
        result = {"ours": {} if accuracy is None else {"value": accuracy}, "verdict": f"{accuracy} {absolute}"}
        claim = {"rule": rule, "published": {"value": 0.9}, "ours": source, "result": result}
        return {"sources": {"t": [{"file": "a"}], "u": [{"file": "b"}]}, "claims": {"x": claim}}

    before, measured = version(0.01, None), version(0.01, 0.89)
    older = trace([before, measured, version(0.010, 0.89, because="words")])["x"]
    assert (older.age, older.rule.place, older.figure.place, older.first) == ("older", 0, 1, 1)
    assert trace([before])["x"].age is None and trace([measured])["x"].age == "same"
    younger = trace([before, measured, version(0.02, 0.89)])["x"]
    assert (younger.age, younger.rule.place, younger.first) == ("younger", 2, 1)
    again = trace([measured, version(0.02, 0.89), version(0.02, 0.88, source="u")])["x"]
    assert (again.age, again.first, again.source.place) == ("older", 0, 2), "an earlier figure was known"
    count = changed(measured, version(0.02, 0.88, source="u"), "abc", "2026-11-23")
    assert (count.claims, count.rules, count.reworded, count.sources, count.verdicts) == (1, 1, 0, 1, 1)
    reworded = changed(measured, version(0.01, 0.89, because="words"), "abc", "2026-11-23")
    assert (reworded.rules, reworded.reworded, reworded.verdicts) == (1, 1, 0)


def table(tmp_path: Path, source: dict[str, Any], row: dict[str, Any], **more: Any) -> Path:
    """A file with one claim on a committed table of one row."""
    path = small(tmp_path, ours=source)
    cell = {"mean": 0.91, "sd": None, "n": 1, "low": None, "high": None, "published": 0.9}
    subset = {"run": source["run"], "at": source["at"], "cells": {"accuracy": cell}, "keys": ["0a1b"], **row}
    document = {"study": source["study"], "columns": ["accuracy"], "rows": [subset], **more}
    (tmp_path / "results" / "studies" / f"{source['study']}.json").write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rule", "ours", "published", "right"),
    [
        ({"kind": "within"}, 3, 3, True),
        ({"kind": "within"}, 3, 3.1, False),
        ({"kind": "within", "absolute": 0.1}, 3, 3.1, True),
        ({"kind": "within", "share": 0.1}, 89, 100, False),
        ({"kind": "within", "absolute": 0.01}, 0.46, [0.4, 0.45], True),
        ({"kind": "within", "absolute": 0.01}, 0.38, [0.4, 0.45], False),
        ({"kind": "reached", "absolute": 0.01}, 0.95, 0.9, True),
        ({"kind": "reached", "absolute": 0.01}, 0.88, 0.9, False),
        ({"kind": "reached", "lower": True}, 0.95, 0.9, False),
        ({"kind": "direction", "noise": 0.01}, -0.02, -0.5, True),
        ({"kind": "direction", "noise": 0.01}, 0.02, -0.5, False),
        ({"kind": "direction", "noise": 0.01}, -0.005, -0.5, False),
    ],
)
def test_rules(rule: dict[str, Any], ours: float, published: Any, right: bool) -> None:
    claimed = {"text": "x", "where": {"a": "1"}, "study": "s", "published": {"value": published}, "unit": ""}
    claim = Claim.model_validate({**claimed, "rule": rule, "ours": "s"})
    assert (fault(claim.rule, "value", ours, published) == "") is right


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"unit": None}, "claims.first.unit: Field required"),
        ({"ours": None}, "how is our figure found"),
        ({"study": "two"}, "claims.first.study: 'two' is none of one"),
        ({"where": {"b": "Table 1"}}, "claims.first.where: must name texts of a"),
        ({"ours": "elsewhere"}, "there is no source 'elsewhere'"),
        ({"rule": {"kind": "about"}}, "claims.first.rule: Input tag 'about'"),
        ({"text": "word " * 26}, "at most 25 words, not 26"),
        ({"published": {"accuracy": [2, 1]}}, "a range is [from, to]"),
        ({"published": {}}, "at least one figure"),
        ({"rule": {"kind": "within", "absolute": {"f1": 0.1}}}, "rule.absolute: must have accuracy"),
        ({"ours": {"kind": "each", "of": {"f1": "x"}}}, "must have accuracy"),
        ({"reading_of": "second"}, "claims.first.reading_of: 'second' is no claim that counts"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = small(tmp_path, **changes)
    with pytest.raises(InputError) as refused:
        read_claims(path)
    assert says in str(refused.value) and str(refused.value).startswith(f"{path}:")


def only_result(path: Path) -> Result:
    return judged(path, path.parent / "results").claims["first"].result


@pytest.mark.parametrize(("figure", "is_refused"), [("accuracy", True), ("size_bytes", False)])
def test_fp16_is_not_judged_by_a_study_which_a_cpu_scores(tmp_path: Path, figure: str, is_refused: bool) -> None:
    source = {"kind": "study", "study": "table13", "run": "light", "at": "fp16", "figure": figure}
    path = table(tmp_path, source, {"cells": {figure: {"mean": 0.91, "sd": None, "n": 1}}})
    if is_refused:
        with pytest.raises(InputError, match="a CPU scores FP16 graphs in FP32"):
            only_result(path)
    else:
        assert only_result(path).verdict == "reproduced"
        source = {"kind": "study", "study": "crt-exits", "run": "published", "at": "2", "leaks": True}
        leaking = table(tmp_path, source, {"leaks": True, "keys": ["a", "b", "c"]})
        assert only_result(leaking).verdict == "reproduced", "what is said of a model that leaks"


NORM = {"kind": "study", "study": "crt-norm-ablation", "run": "layer", "at": "validation", "figure": "loss"}


@pytest.mark.parametrize(("sd", "expected"), [(0.2, "not reproduced"), (0.02, "reproduced")])
def test_noise_is_taken_from_the_seeds(tmp_path: Path, sd: float, expected: str) -> None:
    """The formula is computed for each seed, so that what its parts have in common does not count twice."""
    ours = {"kind": "formula", "formula": "2 * loss - same - 6", "of": {"loss": NORM, "same": {**NORM}}}
    cell = {"mean": 6.1, "sd": sd, "n": 3, "values": [6.1 - sd, 6.1, 6.1 + sd]}
    path = table(tmp_path, NORM, {"cells": {"loss": cell}, "keys": ["a", "b", "c"]})
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["claims"]["first"] |= {"ours": ours, "rule": {"kind": "direction", "noise": "seeds"}}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    result = only_result(path)
    assert result.verdict == expected
    t = 4.303  # Student's, of two degrees of freedom
    assert result.noise == {"accuracy": pytest.approx(t * sd / math.sqrt(3), rel=0.01)}
    content["claims"]["first"]["rule"]["published"] = 2.0  # what is published may be noise, whatever our seeds say
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    shown = only_result(path)
    assert shown.verdict == "not testable as published" and "within two standard errors, 2" in shown.why
    content["claims"]["first"]["ours"] = {"kind": "json", "file": "figures.json", "path": ["runs", 0, "accuracy"]}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"noise is seeds, but no cell of figures\.json has several"):
        only_result(path)


def test_a_figure_of_older_code_says_so(tmp_path: Path) -> None:
    path = small(tmp_path)
    affected = {"file": "figures.json", "keys": ["runs"], "figures": "times", "again": "python a.py"}
    change = {"commit": "abc", "date": "2026-11-23T10:00:00+00:00", "what": "graphs", "results": [affected]}
    (tmp_path / "results" / "changes.json").write_text(json.dumps([change]), encoding="utf-8")
    why = "at least that, give or take 0.01; ours was measured before abc of 2026-11-23: graphs"
    assert only_result(path).why == why
    path = small(tmp_path, ours={"kind": "formula", "formula": "a", "of": {"a": {"kind": "code", "name": "math:pi"}}})
    assert "measured before" not in only_result(path).why


FIDELITY = (ROOT / "docs" / "results" / "fidelity.md").read_text(encoding="utf-8")
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


CELLS = [line.strip("| ").split(" | ") for line in FIDELITY.splitlines() if line.startswith("| ")]
ROWS = [Row(row[0], row[1].partition(":")[0], *row[2:]) for row in CELLS if len(row) == 4 and row[0] != "element"]
STATES = re.findall(r"^\| \*([\w ]+)\* \| ", FIDELITY, re.MULTILINE)


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
    wrong = ("tests/docs/none.py", "tests/docs/test_claims.py::Row.none", "recipes/quickstart.yaml::data.none")
    assert not any(exists(reference) for reference in wrong)


def test_states_are_defined_and_counted() -> None:
    assert len(STATES) == 5
    counts = Counter(row.state for row in ROWS)
    assert set(counts) == {*STATES}
    stated = COUNTS.search(" ".join(FIDELITY.split()))
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
