"""generate writes what the model has learned, token by token, from the exit that it is told to."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.inference.generate import GenerateOptions, Generation, generate
from edgeformer.inference.predict import EarlyExit
from edgeformer.models.weights import load_model
from edgeformer.run import Location, locate
from edgeformer.tasks.language_modeling import exit_thresholds
from edgeformer.tasks.metric import top_probability
from edgeformer.tasks.sampling import Sampling
from tests.inference.language_run import TEXT, write_language_run

GREEDY = GenerateOptions(max_tokens=80, sampling=Sampling(temperature=0))
PROMPT = "The café"


def at(run: Path) -> Location:
    return locate(str(run), run.parent)


def untimed(generation: Generation) -> Generation:
    return dataclasses.replace(generation, seconds=0.0, prompt_seconds=0.0, tokens_per_s=None)


def test_writes_the_text_that_it_knows_and_stops_at_its_end(language_run: Path) -> None:
    pieces: list[str] = []
    found = generate(at(language_run), PROMPT, GREEDY, pieces.append)
    assert PROMPT + found.text == TEXT
    assert found.stopped == "boundary" and len(found.tokens) < GREEDY.max_tokens
    assert "".join(pieces) == found.text and len(pieces) > 10
    assert not any("\ufffd" in piece for piece in pieces)
    assert set(found.loops) == {3} and found.mean_loops == 3
    assert found.tokens_per_s and found.tokens_per_s > 0 and found.seconds > found.prompt_seconds > 0
    assert found.provider == "torch-cpu"


def test_an_empty_prompt_starts_a_text(language_run: Path) -> None:
    assert generate(at(language_run), "", GREEDY).text == TEXT


def test_stops_after_max_tokens(language_run: Path) -> None:
    whole = generate(at(language_run), PROMPT, GREEDY)
    found = generate(at(language_run), PROMPT, dataclasses.replace(GREEDY, max_tokens=5))
    assert found.tokens == whole.tokens[:5] and found.stopped == "max_tokens"
    assert whole.text.startswith(found.text)


def test_one_token_has_no_speed(language_run: Path) -> None:
    found = generate(at(language_run), PROMPT, dataclasses.replace(GREEDY, max_tokens=1))
    assert len(found.tokens) == 1 and found.tokens_per_s is None
    json.dumps(found.as_dict())


@pytest.mark.parametrize("loop", [1, 2, 3])
def test_fixed_exit_is_that_exits_head(language_run: Path, loop: int) -> None:
    """Against the uncached model: at each place the likeliest token of that exit."""
    found = generate(at(language_run), PROMPT, dataclasses.replace(GREEDY, exit=loop, max_tokens=12))
    assert set(found.loops) == {loop} and found.mean_loops == loop
    assert uncached(language_run, found, loop) == list(found.tokens)


def uncached(run: Path, found: Generation, loop: int) -> list[int]:
    ids, model = _ids(run, found), _model(run)
    with torch.inference_mode():
        logits = model.logits(torch.tensor([ids[:-1]]), loop)[0]
    return logits[found.prompt_tokens - 1 :].argmax(-1).tolist()


def _model(run: Path) -> torch.nn.Module:
    return load_model(run)


def _ids(run: Path, found: Generation) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    prompt = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(found.prompt).ids]
    assert len(prompt) == found.prompt_tokens
    return [*prompt, *found.tokens]


def test_confidence_leaves_at_the_first_exit_that_is_sure(tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "artifacts" / "half", steps=18)  # sure of some tokens only
    options = dataclasses.replace(GREEDY, early=EarlyExit(0.58, 0.5, 0.95), max_tokens=40)
    found = generate(at(run), PROMPT, options)
    thresholds = exit_thresholds((1, 2), 0.58, 0.5, 0.95)
    ids, model = _ids(run, found), _model(run)
    with torch.inference_mode():
        logits = {loop: model.logits(torch.tensor([ids[:-1]]), loop)[0].numpy() for loop in (1, 2, 3)}
    for number, loop in enumerate(found.loops):
        place = found.prompt_tokens - 1 + number
        sure = {early: top_probability(logits[early][None, place])[0] for early in thresholds}
        expected = next((early for early, least in thresholds.items() if sure[early] >= least), 3)
        assert loop == expected, (number, sure)
        assert found.tokens[number] == int(logits[loop][place].argmax())
    assert found.mean_loops == pytest.approx(np.mean(found.loops))
    assert len(set(found.loops)) > 1  # else this test would show nothing


def test_thresholds_decide_how_many_loops_are_taken(language_run: Path) -> None:
    def loops(early: EarlyExit) -> float:
        return generate(at(language_run), PROMPT, dataclasses.replace(GREEDY, early=early, max_tokens=20)).mean_loops

    assert loops(EarlyExit(start=0.0, floor=0.0)) == 1
    assert loops(EarlyExit(start=1.0, floor=1.0)) == 3


def test_seed_decides(language_run: Path) -> None:
    def drawn(seed: int) -> Generation:
        return untimed(generate(at(language_run), "Tea", GenerateOptions(30, Sampling(temperature=3.0, seed=seed))))

    assert drawn(1) == drawn(1)
    assert drawn(1).tokens != drawn(2).tokens


def test_top_k_of_one_is_greedy(language_run: Path) -> None:
    sampling = Sampling(temperature=2.0, top_k=1)
    assert generate(at(language_run), PROMPT, GenerateOptions(80, sampling)).text == TEXT[len(PROMPT) :]


def test_says_when_it_goes_beyond_what_was_trained(language_run: Path) -> None:
    found = generate(at(language_run), "Tea", GenerateOptions(90, Sampling(temperature=0)))
    assert found.notes == ("trained on 64 tokens at a time; what comes behind that is guesswork",)
    assert generate(at(language_run), "Tea", GenerateOptions(20)).notes == ()


class TestRefusals:
    def test_text_that_gets_too_long(self, language_run: Path) -> None:
        with pytest.raises(InputError, match=r"--max-tokens 96: the prompt has 3 tokens .* at most 96, so at most 94"):
            generate(at(language_run), "Tea", GenerateOptions(96))
        with pytest.raises(InputError, match="the prompt has 401 tokens; the model takes at most 96"):
            generate(at(language_run), "#" * 400, GenerateOptions(1))
        found = generate(at(language_run), "Tea", GenerateOptions(94, Sampling(temperature=0)))
        assert len(found.tokens) <= 94

    def test_exit_that_it_does_not_have(self, language_run: Path) -> None:
        with pytest.raises(InputError, match="--exit 7: tiny has exits after the loops 1, 2, 3"):
            generate(at(language_run), PROMPT, GenerateOptions(exit=7))

    @pytest.mark.parametrize("changes", [{"exit": 1, "early": EarlyExit()}, {"max_tokens": 0}])
    def test_options_that_make_no_sense(self, changes: dict[str, object]) -> None:
        with pytest.raises(InputError):
            GenerateOptions(**changes)  # type: ignore[arg-type]

    def test_threshold_out_of_range(self) -> None:
        with pytest.raises(InputError, match=r"floor must be in 0…1, not 1\.5"):
            EarlyExit(floor=1.5)

    def test_a_model_that_looks_ahead(self, tmp_path: Path) -> None:
        run = write_language_run(tmp_path / "artifacts" / "cheat", steps=1, causal=False)
        with pytest.raises(InputError, match="cheat: leaks future tokens, so it cannot write"):
            generate(at(run), PROMPT, GREEDY)

    def test_a_model_without_exits_has_no_confidence(self, tmp_path: Path) -> None:
        run = write_language_run(tmp_path / "artifacts" / "plain", steps=1, exits=(), loops=1)
        with pytest.raises(InputError, match="--confidence: plain has no exit before its last loop"):
            generate(at(run), PROMPT, GenerateOptions(early=EarlyExit()))

    def test_an_unfinished_run(self, language_run: Path, tmp_path: Path) -> None:
        run = tmp_path / "artifacts" / "broken"
        shutil.copytree(language_run, run)
        document = json.loads((run / "run.json").read_text(encoding="utf-8"))
        (run / "run.json").write_text(json.dumps({**document, "status": "interrupted"}), encoding="utf-8")
        with pytest.raises(ArtifactError, match="is interrupted, not finished"):
            generate(at(run), PROMPT, GREEDY)

    def test_half_a_surrogate_pair(self, language_run: Path) -> None:
        with pytest.raises(InputError, match="not valid Unicode"):
            generate(at(language_run), "a\udc80", GREEDY)

    def test_without_torch(self, language_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.startswith("edgeformer.models")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "edgeformer.runtimes.torch.session", raising=False)
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(MissingDependencyError, match=r'needs torch: python -m pip install "\.\[train\]"'):
            generate(at(language_run), PROMPT, GREEDY)
