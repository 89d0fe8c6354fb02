"""Profiling a language model's bundle: real tokens in, whole calls measured, and no verdict on decoding yet."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.report import Report
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle, seal
from edgeformer.run import Location
from tests.web.old_bundles import LANGUAGE

RULES = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.3, min_s=0.05, max_s=0.5, idle_s=0.01, energy_s=0.01)
FAST = ProfileOptions(rules=RULES, threads=(1,), batches=(2,), seqs=(5,), artifacts=("onnx-fp32",))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(LANGUAGE, tmp_path_factory.mktemp("language") / "bundle"))


@pytest.fixture(scope="module")
def report(bundle: Path) -> Report:
    return profile_bundle(Location(None, bundle), load_profile("host"), FAST)


def test_whole_calls_are_measured_at_every_shape(report: Report) -> None:
    shapes = [(row.phase, row.batch, row.seq) for row in report.rows]
    assert shapes == [("cold", 2, 5), ("steady", 2, 5), ("steady", 1, 64)]  # as many tokens as the model has positions
    for row in report.rows:
        assert row.latency_ms.status == "measured", row.latency_ms.reason
        assert (row.memory_bytes.peak or 0) > 0


def test_without_a_graph_that_decodes_a_token_costs_a_whole_pass(report: Report) -> None:
    checks = {check.name: check for check in report.verdict.checks}
    assert checks["size"].status == checks["memory"].status == "pass"
    assert checks["latency"].status == "pass" and checks["latency"].basis == "measured"
    assert "whole" in str(checks["latency"].reason), checks["latency"].reason
    assert report.verdict.status == "pass"
    assert not any("leaks" in note for note in report.notes)


def test_a_leaking_bundle_needs_the_flag_and_its_report_says_so(bundle: Path, tmp_path: Path) -> None:
    leaking = tmp_path / "bundle"
    shutil.copytree(bundle, leaking)
    seal(leaking, Bundle.open(leaking).manifest.model_copy(update={"leaks": True}))
    with pytest.raises(InputError, match=r"leaks future tokens.*--allow-leak"):
        profile_bundle(Location(None, leaking), load_profile("host"), FAST)
    report = profile_bundle(Location(None, leaking), load_profile("host"), replace(FAST, allow_leak=True))
    assert any(note.startswith("leaks future tokens") for note in report.notes)
