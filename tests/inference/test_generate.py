"""``generate``: sampling, the text of torch and of the bundle's graphs, exits, refusals, and the command."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgeformer.artifacts.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.bundle import Bundle, seal
from edgeformer.data.encoding import PlainText
from edgeformer.data.tokenization import train_language_tokenizer
from edgeformer.inference.generate import GenerateOptions, Generation, TextStream, Writer, generate
from edgeformer.inference.sampling import Sampling
from edgeformer.models.weights import load_model
from edgeformer.run import locate
from edgeformer.tasks.classification import softmax
from edgeformer.tasks.early_exit import EarlyExit
from edgeformer.tasks.metric import top_probability
from tests.cli.run_cli import edgeformer
from tests.export.language_run import EXIT, LOOPS, exported_language_run

TEXT = "The café on Bridge Street sells coffee ☕ for 2 €, tea for 1 € and nothing else at all."
PROMPT = "a warm film"
GREEDY = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=0))
SAMPLED = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=1.0, seed=3))
LOW_THRESHOLD = EarlyExit(start=0.018, floor=0.0, decay=1.0)  # all 300 words are about equally likely


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights, and its bundle. Read only."""
    return exported_language_run(tmp_path_factory)


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "artifacts" / "tiny"))


def run_generate(folder: Path, prompt: str, options: GenerateOptions, **changes: Any) -> Generation:
    return generate(locate(str(folder), folder.parent), prompt, replace(options, **changes))


def token_ids(run: Path, generation: Generation) -> torch.Tensor:
    """Return the boundary, the prompt and the new tokens but the last one [1, T]."""
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    prompt = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(generation.prompt).ids]
    assert len(prompt) == generation.prompt_tokens
    return torch.tensor([[*prompt, *generation.tokens][:-1]])


@torch.inference_mode()
def uncached_logits(run: Path, generation: Generation, loops: Iterable[int]) -> dict[int, np.ndarray]:
    """Return loop → logits [new tokens, words] of the model without caches."""
    ids, model = token_ids(run, generation), load_model(run)
    return {loop: model.logits(ids, loop)[0, generation.prompt_tokens - 1 :].numpy() for loop in loops}


@pytest.mark.slow
def test_text_is_streamed_up_to_the_boundary(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainText(Tokenizer.from_file(str(exported / "model" / "tokenizer.json")))
    picked = [*plain.encode(" of a café ☕").ids, plain.boundary]
    pieces: list[str] = []
    with monkeypatch.context() as patch:
        remaining = iter(picked)
        patch.setattr(Sampling, "pick", lambda *_: next(remaining))
        generation = generate(locate(str(exported), exported.parent), PROMPT, GREEDY, pieces.append)
    assert (generation.text, generation.stopped, [*generation.tokens]) == (" of a café ☕", "boundary", picked)
    assert "".join(pieces) == generation.text and len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)
    assert set(generation.loops) == {LOOPS} and generation.mean_loops == LOOPS
    assert generation.tokens_per_s and generation.tokens_per_s > 0
    assert generation.seconds > generation.prompt_seconds > 0
    shorter = run_generate(exported, "", GREEDY, max_tokens=1)
    assert (len(shorter.tokens), shorter.stopped, shorter.tokens_per_s) == (1, "max_tokens", None)
    assert shorter.notes == ()
    note = "the model was trained on 64 tokens at a time; text beyond that is unreliable"
    assert run_generate(exported, "a", GREEDY, max_tokens=78).notes == (note,)


@pytest.mark.parametrize("loop", [EXIT, LOOPS])
def test_a_fixed_exit_uses_the_head_of_that_exit(exported: Path, loop: int) -> None:
    generation = run_generate(exported, PROMPT, GREEDY, exit=loop, max_tokens=12, artifact="torch")
    assert set(generation.loops) == {loop} and generation.mean_loops == loop
    logits = uncached_logits(exported, generation, [loop])[loop]
    assert logits.argmax(-1).tolist() == list(generation.tokens)


def test_a_token_leaves_at_the_first_confident_exit(exported: Path) -> None:
    generation = run_generate(exported, PROMPT, SAMPLED, early=LOW_THRESHOLD, artifact="torch")
    confidence = top_probability(uncached_logits(exported, generation, [EXIT])[EXIT])
    assert list(generation.loops) == [EXIT if value >= LOW_THRESHOLD.start else LOOPS for value in confidence]
    assert generation.mean_loops == pytest.approx(np.mean(generation.loops))
    assert len(set(generation.loops)) > 1, "else the test shows nothing"


@torch.inference_mode()
def state_cosines(run: Path, generation: Generation) -> np.ndarray:
    """Return the cosine of the states around the first exit's loop, for each new token, of the model without caches."""
    states = load_model(run)(token_ids(run, generation), None, every=True)
    around = (states[loop][0, generation.prompt_tokens - 1 :] for loop in (EXIT - 1, EXIT))
    return np.asarray(torch.nn.functional.cosine_similarity(*around, dim=-1))


def test_a_token_leaves_where_its_state_rests(exported: Path) -> None:
    always = run_generate(exported, PROMPT, SAMPLED, cosine=-1.0, artifact="torch")
    assert set(always.loops) == {EXIT}
    cosines = np.sort(state_cosines(exported, always))
    threshold = float(cosines[len(cosines) // 2 - 1 :][:2].mean())  # between two tokens: rounding cannot decide
    for artifact in ("torch", "onnx-fp32-step"):
        generation = run_generate(exported, PROMPT, SAMPLED, cosine=threshold, artifact=artifact)
        cosines = state_cosines(exported, generation)
        assert list(generation.loops) == [EXIT if value >= threshold else LOOPS for value in cosines]
        assert len(set(generation.loops)) > 1, "else the test shows nothing"


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("#" * 400, {"max_tokens": 1}, "the prompt has 401 tokens, and the model takes at most 80"),
        ("a\udc80", {}, "not valid Unicode"),
        (PROMPT, {"exit": 1, "early": EarlyExit()}, "--exit, --confidence: exclude each other"),
        (PROMPT, {"cosine": 0.9, "early": EarlyExit()}, "--confidence, --cosine: exclude each other"),
        (PROMPT, {"artifact": "onnx-fp32-decode", "cosine": 0.9}, "runs all loops for every .* need a step artifact"),
        (PROMPT, {"max_tokens": 0}, "must be at least 1"),
        (PROMPT, {"artifact": "onnx-fp32"}, "reads whole texts and cannot write token by token"),
        (PROMPT, {"artifact": "nothing"}, "give one of onnx-fp32-decode, onnx-fp32-step, .*, torch"),
        (PROMPT, {"artifact": "onnx-fp32-decode", "exit": EXIT}, "runs all loops for every .* need a step artifact"),
        (PROMPT, {"exit": 9}, "--exit 9: tiny has exits after the loops 1, 2"),
        (PROMPT, {"max_tokens": 90}, "of at most 80 tokens, so at most 72 can follow"),
        (PROMPT, {"runtime": "torch-cpu", "artifact": "onnx-fp32-step"}, "torch-cpu: does not open onnx-fp32-step"),
        (PROMPT, {"runtime": "all"}, "--runtime all: this command uses one runtime; give its name"),
        (PROMPT, {"runtime": "fast"}, "--runtime fast: .*no such"),
    ],
)
def test_bad_options(exported: Path, prompt: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_generate(exported, prompt, GREEDY, **changes)


def test_a_runs_own_weights_need_torch(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("edgeformer.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "edgeformer.runtimes.torch.session", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    message = r'needs torch, which is not installed: python -m pip install "\.\[train\]"'
    with pytest.raises(MissingDependencyError, match=message):
        run_generate(exported, PROMPT, GREEDY, artifact="torch")


@pytest.mark.parametrize(
    ("options", "changes", "artifact"),
    [(SAMPLED, {}, "onnx-fp32-decode"), (GREEDY, {"exit": LOOPS}, "onnx-fp32-decode"),
     (GREEDY, {"exit": EXIT}, "onnx-fp32-step"), (SAMPLED, {"early": LOW_THRESHOLD}, "onnx-fp32-step")],
)  # fmt: skip
def test_graphs_generate_the_text_of_torch(exported, options, changes, artifact):
    generation = run_generate(exported, PROMPT, options, **changes)
    expected = run_generate(exported, PROMPT, options, **{**changes, "artifact": "torch"})
    assert len(expected.tokens) == 64 or expected.stopped == "boundary"
    assert generation.tokens == expected.tokens and generation.loops == expected.loops
    assert generation.text == expected.text
    assert (generation.artifact, generation.provider) == (artifact, "CPUExecutionProvider")
    assert (expected.artifact, expected.provider) == ("torch", "torch-cpu")


@pytest.mark.parametrize("artifact", ["torch", "onnx-fp32-decode", "onnx-fp32-step"])
def test_a_writer_writes_one_text_after_the_other(exported: Path, artifact: str) -> None:
    expected = run_generate(exported, PROMPT, GREEDY, artifact=artifact).tokens
    with closing(Writer(locate(str(exported), exported.parent), GenerateOptions(artifact=artifact))) as writer:
        ids = writer.encode(PROMPT)
        for _ in writer.write(writer.encode("another text"), 5, SAMPLED.sampling):
            pass
        abandoned = writer.write(ids, 60, SAMPLED.sampling)
        assert next(abandoned).token is not None
        abandoned.close()
        pieces = [*writer.write(ids, 64, GREEDY.sampling)]
    assert tuple(piece.token for piece in pieces) == expected
    assert [piece.stopped for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_a_text_ends_in_front_of_a_stop_text(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainText(Tokenizer.from_file(str(exported / "model" / "tokenizer.json")))
    text = "tea ☕\n\nUser: more tea"
    picked = plain.encode(text).ids

    def written(*stop: str, count: int = len(picked)) -> tuple[str, list[str], str | None]:
        remaining = iter(picked)
        monkeypatch.setattr(Sampling, "pick", lambda *_: next(remaining))
        with closing(Writer(locate(str(exported), exported.parent), GREEDY)) as writer:
            pieces = [*writer.write([plain.boundary], count, GREEDY.sampling, stop)]
        return "".join(piece.text for piece in pieces), [piece.text for piece in pieces], pieces[-1].stopped

    assert written() == (text, written()[1], "max_tokens")
    assert written("\nUser:")[::2] == ("tea ☕\n", "stop")
    assert written("more", "User")[::2] == ("tea ☕\n\n", "stop")
    assert written("☕")[::2] == ("tea ", "stop")
    assert written("\nUser!", "teapot")[::2] == (text, "max_tokens")  # held back, then returned
    assert not any("U" in piece for piece in written("\nUser:")[1])
    inside = len(plain.encode("tea ").ids) + 1  # the first byte of the cup
    assert written(count=inside)[::2] == ("tea ", "max_tokens")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["onnx"] = sys.modules["safetensors"] = None
from edgeformer.cli import main
main()
"""


def test_a_bundle_needs_no_torch(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "bundle", tmp_path / "device")
    flags = ("--confidence", "--threshold", "0.018", "--floor", "0")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "generate", "device", PROMPT, "--seed", "3", "--json", *flags],
        cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"}, capture_output=True, text=True, encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    expected = run_generate(exported, PROMPT, SAMPLED, artifact="torch", early=LOW_THRESHOLD)
    assert document["tokens"] == list(expected.tokens) and document["loops"] == list(expected.loops)
    assert document["provider"] == "CPUExecutionProvider" and document["artifact"].startswith("onnx-fp32-")


@pytest.mark.parametrize(
    ("kept", "artifact"),
    [
        (("onnx-fp32", "onnx-fp32-decode"), "onnx-fp32-decode"),
        (("onnx-fp32", "onnx-int8-step", "onnx-int8-decode"), "onnx-int8-decode"),
        ((), "torch"),
    ],
)
def test_the_best_available_artifact_generates(copied, tmp_path, kept, artifact):
    manifest = Bundle.open(copied / "bundle").manifest
    entries = tuple(entry for entry in manifest.artifacts if entry.id in kept)
    seal(copied / "bundle", manifest.model_copy(update={"artifacts": entries}))
    assert run_generate(copied, PROMPT, GREEDY).artifact == artifact
    if artifact == "onnx-fp32-decode":
        for changes in ({"exit": EXIT}, {"early": LOW_THRESHOLD}):
            with pytest.raises(ArtifactError, match=r"has no step artifact.* edgeformer export .*tiny --exit all"):
                run_generate(copied, PROMPT, GREEDY, **changes)
    if artifact == "torch":
        device = Path(shutil.copytree(copied / "bundle", tmp_path / "device"))
        with pytest.raises(ArtifactError, match=r"no graph that writes text; .* edgeformer export RUN --exit all"):
            run_generate(device, PROMPT, GREEDY)


def test_a_run_without_a_bundle_generates_with_torch(copied: Path) -> None:
    shutil.rmtree(copied / "bundle")
    assert run_generate(copied, PROMPT, GREEDY).artifact == "torch"
    with pytest.raises(InputError, match="--artifact onnx-fp32-step: tiny has no bundle; write it with: edgeformer"):
        run_generate(copied, PROMPT, GREEDY, artifact="onnx-fp32-step")


def test_a_bundle_that_leaks_is_refused(copied: Path) -> None:
    manifest = Bundle.open(copied / "bundle").manifest
    seal(copied / "bundle", manifest.model_copy(update={"leaks": True}))
    with pytest.raises(InputError, match="tiny: leaks future tokens, so it cannot write"):
        run_generate(copied, PROMPT, GREEDY)


def test_the_command_prints_the_text_on_stdout_and_figures_on_stderr(exported: Path, tmp_path: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "4", "--artifact")
    outcome = edgeformer("generate", str(exported), PROMPT, *options, "onnx-int8-step", cwd=tmp_path)
    assert outcome.code == 0 and outcome.out.startswith(PROMPT)
    assert "on CPUExecutionProvider, onnx-int8-step]" in outcome.err
    outcome = edgeformer("generate", str(exported), *options, "torch", cwd=tmp_path, stdin=f"{PROMPT}\n")
    assert outcome.code == 0 and outcome.out.startswith(PROMPT)
    assert "2.00 loops per token, " in outcome.err and "tokens/s on torch-cpu" in outcome.err
    early = ("--confidence", "--threshold", str(LOW_THRESHOLD.start), "--floor", "0", "--decay", "1", "--seed", "3")
    outcome = edgeformer("generate", str(exported), PROMPT, *early, "--artifact", "torch", cwd=tmp_path)
    line = re.search(r"(\d+) tokens, .* loops per token \((\d+) after loop 1, (\d+) after loop 2\), ", outcome.err)
    assert line is not None and int(line[1]) == int(line[2]) + int(line[3]), outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "a", "b"], "there are 2 prompts"),
        (["RUN", "a", "--floor", "0.5"], "have no effect without --confidence"),
        (["RUN", "a", "--runtime", "onnxruntime"], "--runtime onnxruntime: cannot run the weights of a run"),
        (["CLASSIFIER", "a film"], "is a classifier and writes no text; use: edgeformer predict"),
        (["RUN"], "there is no prompt"),
    ],
)
def test_bad_input_of_the_command(finished_language_run, finished_run, tmp_path, arguments, message):
    runs = {"RUN": str(finished_language_run), "CLASSIFIER": str(finished_run)}
    outcome = edgeformer("generate", *(runs.get(argument, argument) for argument in arguments), cwd=tmp_path)
    assert outcome.code == 2 and outcome.out == "" and "Traceback" not in outcome.err
    assert message in " ".join(outcome.err.split())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_language_tokenizer(290, [TEXT])


@pytest.mark.parametrize("prompt", ["", "The café", "漢"])
@pytest.mark.parametrize(
    "text",
    [TEXT, "naïve 漢字 👩‍👩‍👧 e\u0301 \t two  spaces\nline", "€", " leading space", "x" * 40, "a\ufffdb\ufffd"],
)
def test_streamed_pieces_are_the_text_in_complete_characters(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    plain = PlainText(tokenizer)
    stream = TextStream(tokenizer, [plain.boundary, *plain.encode(prompt).ids])
    pieces = [*(stream.push(token) for token in plain.encode(text).ids), stream.push()]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > 1 or len(text) == 1


def test_streamed_bytes_that_are_no_character_become_replacement_characters(tokenizer: Tokenizer) -> None:
    plain = PlainText(tokenizer)
    for following, text in (((), "\ufffd"), (plain.encode("a").ids[:1], "\ufffda")):
        stream = TextStream(tokenizer, [plain.boundary])
        assert stream.push(plain.encode("漢").ids[0]) == "" and stream.push(*following) == text


def test_streaming_with_a_tokenizer_that_marks_word_starts() -> None:
    words = Tokenizer(models.WordLevel({"</s>": 0, "▁one": 1, "▁two": 2, "▁three": 3}, unk_token="</s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stream = TextStream(words, [1])
    assert [stream.push(2), stream.push(3)] == [" two", " three"]


# A small set of values, so that equal logits are common.
all_logits = arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0, 3.0]))


def candidates(logits, **settings):
    tokens, probabilities = Sampling(**settings).candidates(np.asarray(logits))
    return tokens.tolist(), probabilities


def ranked(probabilities):
    """Token numbers, likeliest first, ties by number."""
    return sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))


@given(all_logits, st.floats(0.1, 3.0))
def test_without_limits_probabilities_are_those_of_the_model(logits, temperature):
    tokens, probabilities = candidates(logits, temperature=temperature)
    assert tokens == list(range(len(logits)))
    assert probabilities == pytest.approx(softmax(logits.astype(np.float64)[None] / temperature)[0])


@given(all_logits, st.integers(1, 40))
def test_top_k_keeps_the_k_likeliest(logits, k):
    tokens, probabilities = candidates(logits, top_k=k)
    expected = sorted(ranked(logits.tolist())[:k])
    assert tokens == expected
    all_shares = softmax(logits[None])[0][expected]
    assert probabilities == pytest.approx(all_shares / all_shares.sum())


@given(all_logits, st.floats(0.01, 1.0), st.none() | st.integers(1, 40))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p, k):
    order = ranked(logits.tolist())[:k]
    all_shares = softmax(logits[None])[0][order]
    all_shares /= all_shares.sum()
    tokens, probabilities = candidates(logits, top_p=p, top_k=k)
    kept = order[: len(tokens)]
    assert tokens == sorted(kept)
    assert all_shares[: len(tokens)].sum() >= p - 1e-12
    assert len(tokens) == 1 or all_shares[: len(tokens) - 1].sum() < p + 1e-12
    assert probabilities.sum() == pytest.approx(1.0)


def full_sort(logits, p):
    """Reference implementation that sorts every token; its sums decide, to the last bit."""
    shares = np.exp(logits.astype(np.float64) - float(logits.max()))
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    reached = np.flatnonzero(np.cumsum(shares[order]) >= p)
    return np.sort(order[: int(reached[0]) + 1 if len(reached) else len(order)])


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99, 1 - 1e-12])
@pytest.mark.parametrize("steepness", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many ties"])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(p, steepness, rounded):
    logits = steepness * np.random.default_rng(5).normal(size=5000)
    logits = (np.round(logits, 1) if rounded else logits).astype(np.float32)
    tokens, probabilities = Sampling(top_p=p).candidates(logits)
    expected = full_sort(logits, p)
    assert np.array_equal(tokens, expected)
    kept = np.exp(logits.astype(np.float64) - float(logits.max()))[expected]
    assert np.array_equal(probabilities, kept / kept.sum())


def test_tokens_are_drawn_with_their_probability():
    probabilities = np.array([0.5, 0.0, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    sampling, generator = Sampling(seed=1), np.random.default_rng(1)
    counts = np.bincount([sampling.pick(logits, generator) for _ in range(20_000)], minlength=4)
    assert counts[1] == 0
    # Four standard deviations of the binomial.
    spread = 4 * np.sqrt(probabilities * (1 - probabilities) / 20_000)
    assert (np.abs(counts / 20_000 - probabilities) <= spread).all()


def test_a_low_temperature_sharpens_without_overflow():
    logits = np.array([1.0, 2.0, -np.inf, 1.9], dtype=np.float32)
    assert candidates(logits, temperature=1e-310)[0] == candidates(logits, temperature=0)[0] == [1]
    _, cold = candidates(logits, temperature=0.1)
    _, warm = candidates(logits, temperature=2.0)
    assert cold.max() > warm.max()
    assert candidates(logits)[0] == [0, 1, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "must be 0"),
        ({"temperature": float("nan")}, "must be 0"),
        ({"top_k": 0}, "--top-k 0: must be at least 1"),
        ({"top_p": 0.0}, "--top-p 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.01}, "must be above 0"),
        ({"seed": -1}, "--seed -1: must be from 0 to 4294967295"),
        ({"seed": 2**32}, "must be from 0"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("logits", [[0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(logits, temperature):
    with pytest.raises(ArtifactError, match="largest logit of the model is"):
        Sampling(temperature=temperature).pick(np.array(logits), np.random.default_rng(0))
