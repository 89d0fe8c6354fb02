"""Every figure of docs/results.md, and those that README quotes, come from a JSON in benchmarks/results."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from functools import cache
from itertools import groupby
from typing import Any

import pytest

from tests.docs.document import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "cpu-2core"
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
GIB = 2**30
Row = list[str]


@cache
def result(name: str) -> Any:
    return json.loads((FOLDER / f"2026-11-21-{name}.json").read_text(encoding="utf-8"))


def rows_of(markdown: str) -> list[Row]:
    lines = [line for line in markdown.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def tables(markdown: str) -> list[list[Row]]:
    """The tables of a document, each without its header."""
    groups = groupby(markdown.splitlines(), key=lambda line: line.startswith("|"))
    return [rows_of("\n".join(lines))[1:] for is_table, lines in groups if is_table]


def script(*arguments: str) -> list[Row]:
    """What a script of benchmarks/ prints from a JSON, without the header."""
    name, *rest = arguments
    command = [sys.executable, str(ROOT / "benchmarks" / name), *rest]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    return rows_of(printed)[1:]


def from_bundle(name: str) -> list[Row]:
    return script("bundle_table.py", str(FOLDER / f"2026-11-21-bundle-{name}.json"))


def spread(value: dict[str, float]) -> str:
    return f"{value['median']:.2f}× ({value['low']:.2f}–{value['high']:.2f})"


def decode() -> list[Row]:
    found = result("decode")
    rows = [["cached against uncached, all 8 loops", spread(found["uncached_over_cached"]), "–"]]
    claimed = {"2": "4.0×", "4": "2.0×", "6": "1.33×"}
    ratios = found["last_exit_over_exit"]
    return rows + [[f"exit {n} against all 8 loops", spread(ratios[n]), claimed[n]] for n in claimed]


def onnx_decode() -> list[Row]:
    found = result("onnx-decode")
    rows = [
        ["torch against the decode graph", spread(found["torch_over_decode_graph"])],
        ["torch against the step graphs, all loops", spread(found["torch_over_step_graphs"])],
        ["step graphs against the decode graph", spread(found["step_graphs_over_decode_graph"])],
    ]
    return rows + [[f"decode graph against exit {n}", spread(found["decode_graph_over_exit"][n])] for n in "246"]


def drift() -> list[Row]:
    kept = {a["id"]: a["drift"]["loops"] for a in result("bundle-crt-mini")["artifacts"] if a["drift"]}
    return [[name, *(f"{loop['rms_error']:.1e}" for loop in loops)] for name, loops in kept.items()]


def int8() -> list[Row]:
    def cells(name: str, found: dict[str, float]) -> Row:
        names = {"median": "over_fp32", "low": "low", "high": "high"}
        times = [{key: found[f"{name} {shape}"] for key, name in names.items()} for shape in ("1x16", "16x64")]
        return [
            name,
            f"{found['bytes']:,}",
            f"{found['accuracy']:.4f}",
            f"{found['changed_answers']}",
            *map(spread, times),
        ]

    return [cells(name, found) for name, found in result("int8-methods")["methods"].items()]


def estimator() -> list[Row]:
    def cell(case: dict[str, float]) -> str:
        return f"{case['measured_ms']:.3g} / {case['estimated_ms']:.3g} ({case['log2']:+.2f})"

    groups = groupby(result("estimator")["cases"], key=lambda case: case["run"])
    return [[name, *map(cell, cases)] for name, cases in groups]


def plan() -> list[Row]:
    def cells(row: dict[str, Any]) -> Row:
        sizes = (f"{row[key] / GIB:.3f}" for key in ("predicted_bytes", "measured_bytes"))
        return [row["size"], *sizes, f"{row['ratio']:.3f}"]

    return [cells(row) for row in result("plan-accuracy")["rows"]]


def test_every_table_is_what_its_json_says() -> None:
    sst2, language = str(FOLDER / "2026-11-21-sst2.json"), str(FOLDER / "2026-11-21-language.json")
    expected = [
        script("sst2_results.py", "table", sst2),
        script("fold_results.py", "table", str(FOLDER / "2026-11-22-pretrained.json"), sst2),
        script("sst2_results.py", "artifacts", sst2),
        script("language_results.py", "table", language),
        script("language_results.py", "exits", language),
        decode(),
        onnx_decode(),
        from_bundle("recurrent-sst2-fast"),
        from_bundle("crt-mini"),
        drift(),
        from_bundle("crt-deep"),
        script("import_sizes.py", "table", str(FOLDER / "2026-11-22-import-sizes.json")),
        int8(),
        estimator(),
        plan(),
        script("predict_scale.py", "table", str(FOLDER / "2026-11-22-predict-scale.json"), "--of", "memory"),
        script("predict_scale.py", "table", str(FOLDER / "2026-11-22-predict-scale.json"), "--of", "ratio"),
        script("serve_load.py", "table", str(FOLDER / "2026-11-22-serve-load.json")),
    ]
    found = tables(RESULTS)
    assert len(found) == len(expected), "a table without a JSON"
    for written, measured in zip(found, expected, strict=True):
        assert sorted(written) == sorted(measured)


def standard_error(score: dict[str, float]) -> float:
    return math.sqrt(score["accuracy"] * (1 - score["accuracy"]) / score["n"])


def serving() -> list[str]:
    """What is said of serve under load; a lost or a mixed-up answer is no result to be written down."""
    document = json.loads((FOLDER / "2026-11-22-serve-load.json").read_text(encoding="utf-8"))
    blocks, overload, stopped = document["blocks"], document["overload"], document["stopped"]
    refused, sent = overload["statuses"]["503"], sum(overload["statuses"].values())
    assert overload["mixed_up"] == 0 == stopped["half"] == stopped["mixed_up"]
    assert all(block["mixed_up"] == 0 and set(block["statuses"]) == {"200"} for block in blocks)
    total = sum(block["statuses"]["200"] for block in blocks if block["clients"] == 64)
    return [
        f"Of {total:,} requests from 64 clients",
        f"{refused:,} of a further {sent:,} that came at once to a short queue were refused with a 503",
        f"still answered all {stopped['arrived_whole']:,} that it had accepted",
    ]


def sentences() -> list[str]:
    """What the sentences of docs/results.md say was measured, from the JSON."""
    runs = {(run["recipe"], run["split"]): run for run in result("sst2")}
    light, baseline = runs["recurrent_sst2_fast", "random-split"], runs["baseline_sst2_fast", "random-split"]
    glue = runs["recurrent_sst2_fast", "glue-dev"]["tests"]
    padded = next(run for run in result("language") if run["score_padding"])
    padding = 1 - padded["data"]["tokens"]["validation"] / padded["validation"]["n"]
    bundle = {artifact["id"]: artifact for artifact in result("bundle-recurrent-sst2-fast")["artifacts"]}
    vocabulary = bundle["onnx-int8-trim"]["vocabulary"]
    deep = {artifact["id"]: artifact["size_bytes"] / 1e6 for artifact in result("bundle-crt-deep")["artifacts"]}
    mini = result("bundle-crt-mini")["artifacts"][0]["validation"]
    wrong, open_ = result("estimator"), result("estimator")["uncalibrated"]
    return [
        f"one standard error is {standard_error(light['tests']['random-split']):.4f}",
        f"{standard_error(glue['glue-dev']):.3f} on ` and {standard_error(glue['sst-test']):.3f} on `",
        f"which has {baseline['parameters'] / light['parameters']:.1f} times its parameters",
        f"{padding:.1%}".replace("%", " %") + " of what it scores is padding",
        f"all {bundle['onnx-fp32']['validation']['n']:,} validation rows",
        f"keeps {vocabulary['kept']:,} of {vocabulary['original']:,} tokens, {100 * vocabulary['coverage']:.2f} %",
        f"on the first {mini['n']:,} tokens",
        f"has {deep['onnx-fp16-step']:.1f} MB, one full model {deep['onnx-fp16']:.1f} MB",
        f"Median |log2| {wrong['median_log2']:.2f}, worst {wrong['worst_log2']:.2f} in {len(wrong['cases'])} cases",
        f"held {open_['hold_the_measurement']} of {open_['cases']} measurements",
        f"high end is {open_['median_width']:.1f} times its low end",
        *serving(),
    ]


STATED = {
    "Measured on 2026-11-21 on two cores of an AMD EPYC (Zen 3: AVX2, no bf16), torch 2.13, float32": "the host",
    "its Table 6": "of the paper",
    "below about 0.004 on the random split": "a little more than one standard error",
    "its own 8k BPE tokenizer on WikiText-2": "a setting",
    "at this length of 128": "a setting",
    "max(0.80, 0.92 · 0.98^step)": "the paper's",
    "The 92M CRT-Deep": "the size of the model",
    "The 92M `": "the size of the model",
    "the 92M model trained": "the size of the model",
    "float32, one token at a context of 512": "a setting",
    "before loop 7 on average": "between the rows of exit 6 and of all loops",
    "for an RTX 4050": "a device",
    "0.25 is 19 % off, 1 a factor of 2": "arithmetic",
    "p50 in ms": "a percentile",
}
"""What is no measurement → what it is."""
NAMES = re.compile(r"SST-2|FP32|FP16|INT8|AVX2|float32|fp32|p50|\blog2\b")


def prose() -> str:
    """The sentences alone: no tables, no blocks, nothing between backticks."""
    kept = " ".join(line for line in RESULTS.splitlines() if not line.startswith(("|", "    ")))
    return " ".join(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", kept)).split())


def test_every_figure_in_a_sentence_is_known() -> None:
    text = prose()
    for known in (*sentences(), *STATED):
        assert known in text, f"docs/results.md does not say: {known}"
        text = text.replace(known, "")
    left = re.findall(r".{0,40}\d.{0,20}", NAMES.sub("", text))
    assert left == [], "figures without a JSON"


def test_the_seconds_that_readme_quotes() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    minutes = {run["run"]: run["seconds"] / 60 for run in (*result("sst2"), *result("language"))}
    assert f"the light model took {minutes['recurrent_sst2_fast-001']:.0f} minutes on two CPU cores" in text
    assert "a quarter of an hour on two CPU cores" in text and minutes["crt_mini"] == pytest.approx(15, abs=1)
