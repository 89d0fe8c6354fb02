"""Rows per decoded token: a language model's step and decode artifacts, with the caches of a text of known length."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.report import Row
from edgeformer.benchmark import process
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.measurement import CheckedArtifact, MeasureSpec, measure_in_child, phases_of
from edgeformer.bundle import Bundle
from tests.export.language_run import LOOPS, POSITIONS, exported_language_run

RULES = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.2, min_s=0.05, max_s=0.4, idle_s=0.01, energy_s=0.01)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory) / "bundle"


def measured(bundle: Path, id_: str, *shapes: tuple[int, int]) -> list[Row]:
    opened = Bundle.open(bundle)
    artifact = opened.artifact(id_)
    spec = MeasureSpec(
        checked=CheckedArtifact.of(opened, artifact),
        provider="CPUExecutionProvider",
        threads=1,
        phases=phases_of(artifact, opened.task),
        shapes=shapes,
        rules=RULES,
    )
    return measure_in_child(spec, Silent())


def test_a_decode_graph_has_a_row_per_token_at_every_context_and_batch(bundle: Path) -> None:
    rows = measured(bundle, "onnx-fp32-decode", (1, 1), (3, POSITIONS))
    assert [(row.phase, row.batch, row.seq) for row in rows] == [
        ("cold", 1, 1),
        ("decode", 1, 1),
        ("decode", 3, POSITIONS),
    ]
    for row in rows[1:]:
        assert row.latency_ms.status == "measured" and (row.latency_ms.p50 or 0) > 0
        assert row.memory_bytes.status == "measured"
        assert row.conditions["loops"] == LOOPS
        assert row.conditions["context_tokens"] == row.seq - 1, "the token that is timed is the text's last one"
        assert row.throughput_per_s == pytest.approx(1000 * row.batch / (row.latency_ms.mean or 0))
    # The context is read in one call before; what is timed is one token, which is much less work.
    assert (rows[2].latency_ms.p50 or 0) < rows[2].conditions["read_context_ms"]


def test_a_step_bundle_takes_whole_texts_and_single_tokens(bundle: Path) -> None:
    rows = measured(bundle, "onnx-fp32-step", (2, 40))
    assert [(row.phase, row.batch, row.seq) for row in rows] == [
        ("cold", 2, 40),
        ("steady", 2, 40),
        ("decode", 2, 40),
    ]
    steady, decode = rows[1:]
    assert (decode.latency_ms.p50 or 0) < (steady.latency_ms.p50 or 0)


def test_a_text_that_is_too_long_is_refused_in_both_phases_and_the_others_survive(bundle: Path) -> None:
    rows = measured(bundle, "onnx-fp32-step", (1, 8), (1, POSITIONS + 1))
    found = Counter((row.phase, row.seq, row.latency_ms.status) for row in rows)
    assert found == Counter(
        [
            ("cold", 8, "measured"),
            ("steady", 8, "measured"),
            ("decode", 8, "measured"),
            ("steady", POSITIONS + 1, "unavailable"),
            ("decode", POSITIONS + 1, "unavailable"),
        ]
    )
    assert all(f"takes at most {POSITIONS}" in str(row.latency_ms.reason) for row in rows[-2:])


DIES_WHILE_DECODING = """
import os, sys
from edgeformer.runtimes.decoder import Decoder
from edgeformer.benchmark import process
def peek(decoder, ids, loop):
    os._exit(9)
Decoder.peek = peek
process.run_worker()
"""


def test_a_crash_while_decoding_leaves_the_whole_calls(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "child_command", lambda: [sys.executable, "-c", DIES_WHILE_DECODING])
    rows = measured(bundle, "onnx-fp32-step", (1, 8), (2, 8))
    assert [(row.phase, row.batch, row.latency_ms.status) for row in rows] == [
        ("cold", 1, "measured"),
        ("steady", 1, "measured"),
        ("decode", 1, "unavailable"),
        ("steady", 2, "measured"),
        ("decode", 2, "unavailable"),
    ]
    assert all("exit code 9" in str(row.latency_ms.reason) for row in rows if row.latency_ms.status == "unavailable")
