"""What docs/language-models.md says of the memory of `crt_deep_rtx4050` is what `edgeformer plan` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.run_cli import edgeformer
from tests.docs.document import ROOT

GIB, MIB = 2**30, 2**20
SENTENCE = re.compile(
    r"a peak of (?P<peak>[\d.]+) GiB in (?P<precision>\w+)\. The budget is (?P<budget>[\d.]+) GiB: of the "
    r"(?P<usable>[\d.]+) GiB that the profile calls usable, (?P<context>[\d.]+) GiB \((?P<mib>\d+) MiB\)"
)


def test_the_documented_plan_is_the_plan(tmp_path: Path) -> None:
    text = " ".join((ROOT / "docs" / "language-models.md").read_text(encoding="utf-8").split())
    messages = SENTENCE.search(text)
    assert messages is not None
    outcome = edgeformer("plan", "crt_deep_rtx4050", "--device", "rtx4050", "--json", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    assert (plan["status"], plan["fits"], plan["precision"]) == ("pass", True, messages["precision"])
    assert plan["peak_bytes"] / GIB == pytest.approx(float(messages["peak"]), abs=0.005)
    assert plan["budget_bytes"] / GIB == pytest.approx(float(messages["budget"]), abs=0.005)
    devices = json.loads(edgeformer("list", "devices", "--json", cwd=tmp_path).out)["devices"]
    (usable,) = (row["usable_memory_bytes"] for row in devices if row["name"] == "rtx4050")
    assert usable / GIB == pytest.approx(float(messages["usable"]), abs=0.005)
    assert usable - plan["budget_bytes"] == int(messages["mib"]) * MIB
    assert int(messages["mib"]) * MIB / GIB == pytest.approx(float(messages["context"]), abs=0.005)


@pytest.mark.slow
def test_the_documented_time_is_the_plans(tmp_path: Path) -> None:
    text = " ".join((ROOT / "docs" / "language-models.md").read_text(encoding="utf-8").split())
    messages = re.search(
        r"(\d+) to (\d+) hours for ten epochs, (\d+) to (\d+) minutes each.*then reaches (0\.\d+) to (0\.\d+) of", text
    )
    assert messages is not None
    time = json.loads(edgeformer("plan", "crt_deep_rtx4050", "--device", "rtx4050", "--json", cwd=tmp_path).out)["time"]
    assert time["rows"] == 10 * 7059 and time["rows_from"] == "recipe"
    hours = [round(time[key] / 3600) for key in ("low_s", "high_s")]
    minutes = [round(time[key] / 600) for key in ("low_s", "high_s")]
    shares = [f"{share:.2f}" for share in time["share_of_peak"]]
    assert [*map(str, (*hours, *minutes)), *shares] == list(messages.groups())
