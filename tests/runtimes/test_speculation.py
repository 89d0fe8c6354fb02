"""Loop self-speculation: the greedy text and the distribution of all loops, whatever is drafted; and its refusals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.report import MeasureRules
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.generate import GenerateOptions, Generation, generate
from edgeformer.report.context import shape_text
from edgeformer.run import locate
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.speculation import Candidates, Sampling, Speculation, Speculator, accept, draw
from tests.cli.run_cli import edgeformer
from tests.export.language_run import POSITIONS, language_recipe, write_language_run
from tests.test_old_format import OLD

SIZES: dict[str, Any] = {
    "kind": "decoder", "hidden_size": 64, "layers": 1, "iterations": 4, "heads": 4, "kv_heads": 2, "ffn_size": 96,
}  # fmt: skip
GREEDY = Sampling(temperature=0)
ARTIFACTS = ("torch", "onnx-fp32-step")
"""Quantized artifacts round activations by the tokens of a call, so that near ties may be decided otherwise."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with random weights whose exits sometimes agree, and its bundle. Read only."""
    folder = write_language_run(tmp_path_factory.mktemp("speculation") / "looped", language_recipe(**SIZES))
    export(folder, ExportOptions(int8=True, int4=True, exits="all"))
    return folder


def written(run: Path, **options: Any) -> Generation:
    return generate(locate(str(run), run.parent), "the staff", GenerateOptions(max_tokens=48, **options))


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_greedy_text_is_that_of_all_loops(run: Path, artifact: str) -> None:
    expected = written(run, sampling=GREEDY, artifact=artifact)
    accepted, rejected = 0, 0
    for speculation in (Speculation(1), Speculation(4), Speculation(3, exit=2), Speculation(8, exit=3, threshold=0.02)):
        actual = written(run, sampling=GREEDY, artifact=artifact, speculation=speculation)
        assert actual.tokens == expected.tokens and actual.text == expected.text
        counts = actual.speculation
        assert counts is not None and counts["exit"] == (speculation.exit or 1) and set(actual.loops) == {4}
        assert counts["drafted"] <= speculation.drafts * counts["rounds"]
        accepted, rejected = accepted + counts["accepted"], rejected + counts["drafted"] - counts["accepted"]
    assert accepted > 5 and rejected > 5, "else the test shows nothing"


@pytest.mark.parametrize("artifact", [*ARTIFACTS, "onnx-int4-step"])
def test_caches_hold_the_written_tokens_only(run: Path, artifact: str) -> None:
    def decoder() -> Any:
        opened = locate(str(run), run.parent)
        if artifact == "torch":
            return opened.open_run().decoder("torch-cpu")
        bundle = opened.open_bundle()
        return bundle.decoder(bundle.artifact(artifact), [3, 4], OpenOptions(threads=1))

    speculating, plain = decoder(), decoder()
    speculator = Speculator(speculating, 3, Speculation(5), GREEDY, np.random.default_rng(0))
    text, unread = [1, 2, 3], [1, 2, 3]
    for _ in range(6):
        new = speculator.write(unread, 20)
        text, unread = [*text, *new], new[-1:]
    assert 0 < speculator.accepted < speculator.drafted
    assert speculating.length == len(text) - 1  # the last token was not read yet
    plain.read(text)
    for reading in (speculating, plain):
        if reading is speculating:
            reading.read(unread)
        reading.advance(4)
    difference = np.abs(speculating.logits(4) - plain.logits(4)).max()
    assert difference < (1e-4 if artifact != "onnx-int4-step" else 0.02)


def test_no_text_is_longer_than_the_model(run: Path) -> None:
    prompt_tokens = written(run, sampling=GREEDY).prompt_tokens
    longest = POSITIONS - prompt_tokens + 1
    options = {"sampling": GREEDY, "artifact": "onnx-fp32-step", "speculation": Speculation(7)}
    generation = generate(
        locate(str(run), run.parent),
        "the staff",
        GenerateOptions(max_tokens=longest, **options),  # type: ignore[arg-type]
    )
    assert len(generation.tokens) == longest or generation.stopped == "boundary"


WORDS, PLACES = 4, 2
RANDOM = np.random.default_rng(5)
# By the word before: what is drafted, and what all loops say; some drafts are impossible, some words never drafted.
PROPOSALS, TARGETS = (RANDOM.dirichlet([0.7] * WORDS, WORDS) for _ in range(2))
TARGETS[1] = [0.0, 0.5, 0.5, 0.0]
PROPOSALS[2] = [0.0, 0.0, 0.2, 0.8]


def candidates(probabilities: np.ndarray) -> Candidates:
    tokens = np.flatnonzero(probabilities)
    return tokens, probabilities[tokens]


def speculate(generator: np.random.Generator) -> tuple[int, ...]:
    """The words after word 0: drafted, accepted or replaced; missing ones are drawn as without speculation."""
    drafts = [0]
    for _ in range(PLACES):
        drafts.append(draw(*candidates(PROPOSALS[drafts[-1]]), generator))
    proposals, targets = ([candidates(table[word]) for word in drafts] for table in (PROPOSALS, TARGETS))
    words = accept(drafts[1:], proposals[:PLACES], targets, generator)
    while len(words) < PLACES + 1:
        words.append(draw(*candidates(TARGETS[words[-1]]), generator))
    return tuple(words)


def test_sampled_words_have_the_distribution_of_all_loops() -> None:
    generator, rounds = np.random.default_rng(0), 20_000
    counts = Counter(speculate(generator) for _ in range(rounds))
    expected = {
        (a, b, c): TARGETS[0, a] * TARGETS[a, b] * TARGETS[b, c] * rounds
        for a in range(WORDS) for b in range(WORDS) for c in range(WORDS)
    }  # fmt: skip
    assert not any(counts[words] for words, number in expected.items() if number == 0)
    frequent = [words for words, number in expected.items() if number >= 5]
    rare = rounds - sum(expected[words] for words in frequent)
    observed = [*(counts[words] for words in frequent), rounds - sum(counts[words] for words in frequent)]
    test = chisquare(observed, [*(expected[words] for words in frequent), rare])
    assert test.pvalue > 1e-3, test
    # The drafts alone have another distribution, which the test would notice.
    drafted = Counter(draw(*candidates(PROPOSALS[0]), generator) for _ in range(rounds))
    assert chisquare([drafted[word] for word in range(WORDS)], TARGETS[0] * rounds).pvalue < 1e-9


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_k=3), Sampling(1.0, top_p=0.6)])
def test_a_seed_gives_one_text_of_likely_tokens(run: Path, sampling: Sampling) -> None:
    options = {"sampling": sampling, "artifact": "onnx-fp32-step", "speculation": Speculation(4)}
    first, second = written(run, **options), written(run, **options)
    assert first.tokens == second.tokens and len(first.tokens) > 4
    assert first.tokens_per_s is not None and first.tokens_per_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculate", "4", "--exit", "4"], "drafted at an exit before the last: 1, 2, 3"),
        (["--speculate", "4", "--confidence"], "--speculate: every token is verified with all loops"),
        (["--speculate", "4", "--artifact", "onnx-fp32-decode"], "--speculate need a step artifact"),
        (["--draft-threshold", "0.5"], "--draft-threshold: has no effect without --speculate"),
    ],
)
def test_the_command_refuses_what_has_no_effect(run: Path, options: list[str], message: str) -> None:
    result = edgeformer("generate", str(run), "the staff", *options, cwd=run)
    assert result.code == 2 and message in " ".join(result.err.split())


def test_a_model_with_one_loop_or_with_convolutions_cannot_speculate(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "one", language_recipe(**{**SIZES, "iterations": 1}, exits=[]))
    with pytest.raises(InputError, match="one has no exit before its last loop, which could draft"):
        written(run, speculation=Speculation(2))
    bundle = Bundle.open(OLD / "language-v1" / "bundle")
    decoder = bundle.decoder(bundle.artifact("onnx-fp32-step"), [2, 4])
    with pytest.raises(InputError, match="rejected tokens must be dropped from the caches"):
        Speculator(decoder, 2, Speculation(2), GREEDY, np.random.default_rng(0))


def test_the_command_counts_drafts_and_warns_of_quantized_graphs(run: Path) -> None:
    arguments = ("generate", str(run), "the staff", "--temperature", "0", "--speculate", "3", "--max-tokens", "12")
    result = edgeformer(*arguments, "--artifact", "onnx-int8-step", "--json", cwd=run)
    generation = json.loads(result.out)
    assert result.code == 0 and len(generation["tokens"]) == 12
    assert {*generation["speculation"]} == {"exit", "rounds", "drafted", "accepted"}
    assert any("rounds activations to 8 bits" in note for note in generation["notes"])
    result = edgeformer(*arguments, "--artifact", "onnx-fp32-step", cwd=run)
    assert "drafted tokens accepted in" in result.err and "note" not in result.err


def test_profile_measures_rounds(run: Path) -> None:
    short = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.3, min_s=0.1, max_s=0.5, idle_s=0.01, energy_s=0.01)
    location, host = locate(str(run), run.parent), load_profile("host")
    options = ProfileOptions(
        (1,), (16,), rules=short, phase="decode", speculation=Speculation(3), artifacts=("onnx-fp32", "onnx-int4-step")
    )
    report = profile_bundle(location, host, options)
    assert {row.artifact for row in report.rows} == {"onnx-int4-step"}
    assert [row.phase for row in report.rows if row.seq == 16] == ["cold", "decode", "speculate"]
    row = next(row for row in report.rows if row.phase == "speculate")
    facts, p50, mean = row.conditions, row.latency_ms.p50, row.latency_ms.mean
    assert p50 and mean and row.throughput_per_s
    assert facts["drafts"] == 3 and facts["exit"] == 1 and 1 <= facts["tokens_per_round"] <= 4
    assert row.throughput_per_s == pytest.approx(1000 * facts["tokens_per_round"] / mean)
    assert f"1 × 16 per {facts['tokens_per_round']:.2f} tokens" in shape_text(row, report)
    assert report.question == "phase-decode-speculate-3-onnx-fp32-onnx-int4-step"
    for changes, message in (
        ({"phase": "steady"}, "--speculate: the step artifact of a language model speculates, in phase decode"),
        ({"artifacts": ("onnx-fp32",)}, "has onnx-fp32; write one with"),
        ({"speculation": None, "artifacts": ("onnx-fp32",)}, "--phase decode: needs a decode graph or step artifact"),
        ({"speculation": Speculation(2, exit=4)}, "drafted at an exit before the last: 1, 2, 3"),
    ):
        with pytest.raises(InputError, match=message):
            profile_bundle(location, host, replace(options, **changes))  # type: ignore[arg-type]
