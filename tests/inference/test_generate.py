"""``generate``: the text of torch and of the bundle's graphs, exits, refusals, and the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgeformer.artifacts.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.bundle import Bundle, seal
from edgeformer.data.encoding import PlainText
from edgeformer.inference.generate import GenerateOptions, Generation, Sampling, TextStream, generate
from edgeformer.models.weights import load_model
from edgeformer.run import locate
from edgeformer.tasks.early_exit import EarlyExit
from edgeformer.tasks.metric import top_probability
from tests.cli.run_cli import edgeformer
from tests.export.language_run import EXIT, LOOPS, exported_language_run
from tests.inference.language_run import TEXT, tokenizer_of, write_language_run
from tests.runtimes.tiny_bundle import write_bundle

# The run's own weights, which have learned TEXT.
PROMPT = "The café"
GREEDY = GenerateOptions(max_tokens=80, sampling=Sampling(temperature=0))

# An exported run with random weights.
BUNDLE_PROMPT = "a warm film"
BUNDLE_GREEDY = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=0))
BUNDLE_SAMPLED = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=1.0, seed=3))
LOW_THRESHOLD = EarlyExit(start=0.018, floor=0.0, decay=1.0)  # all 300 words are about equally likely


def run_generate(folder: Path, prompt: str, options: GenerateOptions, **changes: Any) -> Generation:
    return generate(locate(str(folder), folder.parent), prompt, replace(options, **changes))


def token_ids(run: Path, generation: Generation) -> list[int]:
    """Return the tokens of the prompt and of the new text."""
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    prompt = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(generation.prompt).ids]
    assert len(prompt) == generation.prompt_tokens
    return [*prompt, *generation.tokens]


def uncached_logits(run: Path, generation: Generation, loops: Iterable[int]) -> dict[int, np.ndarray]:
    """Return loop → logits [new tokens, words] of the model without caches."""
    ids, model = torch.tensor([token_ids(run, generation)[:-1]]), load_model(run)
    with torch.inference_mode():
        return {loop: model.logits(ids, loop)[0, generation.prompt_tokens - 1 :].numpy() for loop in loops}


def test_generates_the_learned_text_to_its_end(language_run: Path) -> None:
    pieces: list[str] = []
    generation = generate(locate(str(language_run), language_run.parent), PROMPT, GREEDY, pieces.append)
    assert PROMPT + generation.text == TEXT
    assert generation.stopped == "boundary" and len(generation.tokens) < 80
    assert "".join(pieces) == generation.text and len(pieces) > 10
    assert not any("\ufffd" in piece for piece in pieces)
    assert set(generation.loops) == {3} and generation.mean_loops == 3
    assert generation.tokens_per_s and generation.tokens_per_s > 0
    assert generation.seconds > generation.prompt_seconds > 0
    assert generation.provider == "torch-cpu"
    assert run_generate(language_run, "", GREEDY).text == TEXT
    shorter = run_generate(language_run, PROMPT, GREEDY, max_tokens=1)
    assert (shorter.tokens, shorter.stopped, shorter.tokens_per_s) == (generation.tokens[:1], "max_tokens", None)
    note = "trained on 64 tokens at a time; what comes behind that is guesswork"
    assert run_generate(language_run, "Tea", GREEDY, max_tokens=90).notes == (note,)
    assert shorter.notes == ()


@pytest.mark.parametrize("loop", [1, 2, 3])
def test_a_fixed_exit_uses_the_head_of_that_exit(language_run: Path, loop: int) -> None:
    generation = run_generate(language_run, PROMPT, GREEDY, exit=loop, max_tokens=12)
    assert set(generation.loops) == {loop} and generation.mean_loops == loop
    logits = uncached_logits(language_run, generation, [loop])[loop]
    assert logits.argmax(-1).tolist() == list(generation.tokens)


def test_a_token_leaves_at_the_first_confident_exit(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "artifacts" / "half", steps=18)  # confident of some tokens only
    generation = run_generate(run, PROMPT, GREEDY, early=EarlyExit(0.58, 0.5, 0.95), max_tokens=40)
    thresholds = EarlyExit(0.58, 0.5, 0.95).thresholds((1, 2, 3))
    logits = uncached_logits(run, generation, (1, 2, 3))
    for number, loop in enumerate(generation.loops):
        confidence = {early: top_probability(logits[early][number][None])[0] for early in thresholds}
        expected = next((early for early, threshold in thresholds.items() if confidence[early] >= threshold), 3)
        assert loop == expected, (number, confidence)
        assert generation.tokens[number] == int(logits[loop][number].argmax())
    assert generation.mean_loops == pytest.approx(np.mean(generation.loops))
    assert len(set(generation.loops)) > 1, "else the test shows nothing"


def test_sampling(language_run: Path) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        return run_generate(language_run, "Tea", GenerateOptions(30, Sampling(temperature=3.0, seed=seed))).tokens

    assert sample(1) == sample(1) != sample(2)
    top_1 = GenerateOptions(80, Sampling(temperature=2.0, top_k=1))
    assert run_generate(language_run, PROMPT, top_1).text == TEXT[len(PROMPT) :]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("Tea", {"max_tokens": 96}, "--max-tokens 96: of 96 tokens that it takes the prompt has 3: at most 94"),
        ("#" * 400, {"max_tokens": 1}, "the prompt has 401 tokens; the model takes at most 96"),
        (PROMPT, {"exit": 7}, "--exit 7: tiny has exits after the loops 1, 2, 3"),
        ("a\udc80", {}, "not valid Unicode"),
        (PROMPT, {"exit": 1, "early": EarlyExit()}, "either a fixed exit or exit by confidence"),
        (PROMPT, {"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_bad_options(language_run: Path, prompt: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_generate(language_run, prompt, GREEDY, **changes)
    with pytest.raises(InputError, match=r"floor must be in 0…1, not 1\.5"):
        EarlyExit(floor=1.5)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "artifacts" / "cheat", steps=1, causal=False)
    with pytest.raises(InputError, match="cheat: leaks future tokens, so it cannot write"):
        run_generate(run, PROMPT, GREEDY)


def test_an_unfinished_run_is_refused(language_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(language_run, tmp_path / "artifacts" / "broken"))
    document = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps({**document, "status": "interrupted"}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is interrupted, not finished"):
        run_generate(run, PROMPT, GREEDY)


def test_a_runs_own_weights_need_torch(language_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("edgeformer.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "edgeformer.runtimes.torch.session", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r'needs torch: python -m pip install "\.\[train\]"'):
        run_generate(language_run, PROMPT, GREEDY)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory)


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "artifacts" / "tiny"))


@pytest.mark.parametrize("options", [BUNDLE_GREEDY, BUNDLE_SAMPLED])
@pytest.mark.parametrize(
    ("changes", "artifact"),
    [({}, "onnx-fp32-decode"), ({"exit": LOOPS}, "onnx-fp32-decode"), ({"exit": EXIT}, "onnx-fp32-step"),
     ({"early": LOW_THRESHOLD}, "onnx-fp32-step")],
)  # fmt: skip
def test_graphs_generate_the_text_of_torch(
    exported: Path, options: GenerateOptions, changes: dict[str, Any], artifact: str
) -> None:
    generation = run_generate(exported, BUNDLE_PROMPT, options, **changes)
    expected = run_generate(exported, BUNDLE_PROMPT, options, **{**changes, "artifact": "torch"})
    assert len(expected.tokens) == 64 or expected.stopped == "boundary"
    assert generation.tokens == expected.tokens and generation.loops == expected.loops
    assert generation.text == expected.text
    assert (generation.artifact, generation.provider) == (artifact, "CPUExecutionProvider")
    assert (expected.artifact, expected.provider) == ("torch", "torch-cpu")
    if "early" in changes and options is BUNDLE_SAMPLED:
        assert set(generation.loops) == {EXIT, LOOPS}, "else the test shows little"


def test_a_named_runtime_generates_the_same_or_is_refused(exported: Path) -> None:
    default = run_generate(exported, BUNDLE_PROMPT, BUNDLE_GREEDY, max_tokens=4)
    named = run_generate(exported, BUNDLE_PROMPT, BUNDLE_GREEDY, max_tokens=4, runtime="onnxruntime")
    assert named.provider == "CPUExecutionProvider" and named.tokens == default.tokens
    for runtime, message in (("torch-cpu", "does not open onnx-fp32-decode"), ("all", "name it"), ("fast", "no such")):
        with pytest.raises(InputError, match=f"--runtime {runtime}: .*{message}"):
            run_generate(exported, BUNDLE_PROMPT, BUNDLE_GREEDY, runtime=runtime)


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
        [sys.executable, "-c", WITHOUT_TORCH, "generate", "device", BUNDLE_PROMPT, "--seed", "3", "--json", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    expected = run_generate(exported, BUNDLE_PROMPT, BUNDLE_SAMPLED, artifact="torch", early=LOW_THRESHOLD)
    assert document["tokens"] == list(expected.tokens) and document["loops"] == list(expected.loops)
    assert document["provider"] == "CPUExecutionProvider" and document["artifact"].startswith("onnx-fp32-")


@pytest.mark.parametrize(
    ("kept", "artifact"),
    [
        (("onnx-fp32", "onnx-fp32-decode"), "onnx-fp32-decode"),
        (("onnx-fp32-step", "onnx-fp16-decode"), "onnx-fp32-step"),
        (("onnx-fp32", "onnx-fp16-step", "onnx-fp16-decode"), "onnx-fp16-decode"),
        (("onnx-fp32", "onnx-fp16"), "torch"),
        ((), "torch"),
    ],
)
def test_the_best_available_artifact_generates(
    copied: Path, tmp_path: Path, kept: tuple[str, ...], artifact: str
) -> None:
    manifest = Bundle.open(copied / "bundle").manifest
    entries = tuple(entry for entry in manifest.artifacts if entry.id in kept)
    seal(copied / "bundle", manifest.model_copy(update={"artifacts": entries}))
    assert run_generate(copied, BUNDLE_PROMPT, BUNDLE_GREEDY).artifact == artifact
    if artifact == "onnx-fp32-decode":
        for changes in ({"exit": EXIT}, {"early": LOW_THRESHOLD}):
            with pytest.raises(ArtifactError, match=r"need the step graphs.* edgeformer export tiny --exit all"):
                run_generate(copied, BUNDLE_PROMPT, BUNDLE_GREEDY, **changes)
    if artifact == "torch":
        device = Path(shutil.copytree(copied / "bundle", tmp_path / "device"))
        with pytest.raises(ArtifactError, match=r"no graphs that write text; .* edgeformer export RUN --exit all"):
            run_generate(device, BUNDLE_PROMPT, BUNDLE_GREEDY)


def test_a_run_without_a_bundle_generates_with_torch(copied: Path) -> None:
    shutil.rmtree(copied / "bundle")
    assert run_generate(copied, BUNDLE_PROMPT, BUNDLE_GREEDY).artifact == "torch"
    with pytest.raises(InputError, match="--artifact onnx-fp32-step: tiny has no bundle; make one with: edgeformer"):
        run_generate(copied, BUNDLE_PROMPT, BUNDLE_GREEDY, artifact="onnx-fp32-step")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifact": "onnx-fp32"}, "reads whole texts and keeps nothing of earlier tokens"),
        ({"artifact": "nothing"}, "tiny writes with onnx-fp32-decode, onnx-fp32-step, .*, torch"),
        ({"artifact": "onnx-fp32-decode", "exit": EXIT}, "takes all loops for every token; .* need a step artifact"),
        ({"exit": 9}, "--exit 9: tiny has exits after the loops 1, 2"),
        ({"max_tokens": 90}, "of 80 tokens that it takes .* at most 72 can be written"),
    ],
)
def test_bad_options_for_a_bundle(exported: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_generate(exported, BUNDLE_PROMPT, BUNDLE_GREEDY, **changes)


def test_bundles_that_cannot_generate_are_refused(copied: Path, tmp_path: Path) -> None:
    manifest = Bundle.open(copied / "bundle").manifest
    seal(copied / "bundle", manifest.model_copy(update={"leaks": True}))
    with pytest.raises(InputError, match="tiny: leaks future tokens, so it cannot write"):
        run_generate(copied, BUNDLE_PROMPT, BUNDLE_GREEDY)
    with pytest.raises(InputError, match="is a classifier and writes no text; use: edgeformer predict"):
        run_generate(write_bundle(tmp_path / "bundle"), BUNDLE_PROMPT, BUNDLE_GREEDY)


@pytest.fixture
def folder(language_run: Path) -> Path:
    """The folder that contains artifacts/tiny."""
    return language_run.parent.parent


def test_the_command_prints_the_text_on_stdout_and_figures_on_stderr(folder: Path, exported: Path) -> None:
    outcome = edgeformer("generate", PROMPT, "--temperature", "0", "--runtime", "torch-cpu", cwd=folder)
    assert outcome.code == 0 and outcome.out == TEXT + "\n"
    assert "tiny: " in outcome.err and "3.00 loops per token" in outcome.err and "tokens/s on torch-cpu" in outcome.err
    assert edgeformer("generate", "tiny", "--temperature", "0", cwd=folder, stdin=f"{PROMPT}\n").out == TEXT + "\n"
    options = ("--temperature", "0", "--max-tokens", "4", "--artifact", "onnx-fp16-step")
    outcome = edgeformer("generate", str(exported), BUNDLE_PROMPT, *options, cwd=folder)
    assert outcome.code == 0 and outcome.out.startswith(BUNDLE_PROMPT)
    assert "on CPUExecutionProvider, onnx-fp16-step]" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "a", "b"], "one prompt at a time"),
        (["a", "--floor", "0.5"], "belong to --confidence"),
        (["a", "--runtime", "onnxruntime"], "--runtime onnxruntime: computes no run's own weights; that is torch"),
        (["CLASSIFIER", "a film"], "is a classifier and writes no text; use: edgeformer predict"),
        ([], "no prompt given"),
    ],
)
def test_bad_input_of_the_command(folder: Path, finished_run: Path, arguments: list[str], message: str) -> None:
    arguments = [argument.replace("CLASSIFIER", str(finished_run)) for argument in arguments]
    outcome = edgeformer("generate", *arguments, cwd=folder)
    assert outcome.code == 2 and outcome.out == "" and "Traceback" not in outcome.err
    assert message in " ".join(outcome.err.split())


HARD_TEXT = "naïve 漢字 👩‍👩‍👧 e\u0301 \t two  spaces\nline"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([TEXT])


def stream_pieces(tokenizer: Tokenizer, prompt: str, text: str) -> list[str]:
    plain = PlainText(tokenizer)
    stream = TextStream(tokenizer, [plain.boundary, *plain.encode(prompt).ids])
    return [*(stream.push(token) for token in plain.encode(text).ids), stream.push()]


@pytest.mark.parametrize("prompt", ["", PROMPT, "漢"])
@pytest.mark.parametrize("text", [TEXT, HARD_TEXT, "€", " leading space", "x" * 40, "a\ufffdb\ufffd"])
def test_streamed_pieces_are_the_text_in_complete_characters(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    pieces = stream_pieces(tokenizer, prompt, text)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > 1 or len(text) == 1


def test_streamed_bytes_that_are_no_character_become_replacement_characters(tokenizer: Tokenizer) -> None:
    plain = PlainText(tokenizer)
    lead = plain.encode("漢").ids[0]
    stream = TextStream(tokenizer, [plain.boundary])
    assert stream.push(lead) == "" and stream.push() == "\ufffd"
    stream = TextStream(tokenizer, [plain.boundary])
    assert stream.push(lead) == "" and stream.push(plain.encode("a").ids[0]) == "\ufffda"


def test_streaming_with_a_tokenizer_that_marks_word_starts() -> None:
    words = Tokenizer(models.WordLevel({"</s>": 0, "▁one": 1, "▁two": 2, "▁three": 3}, unk_token="</s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stream = TextStream(words, [1])
    assert [stream.push(2), stream.push(3)] == [" two", " three"]
