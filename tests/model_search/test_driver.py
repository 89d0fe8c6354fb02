"""The models of a search, its rules, and the limits, front and recommendation over all candidates."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.artifacts.model_search import ModelSearch, SearchedModel
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.report import Choice
from edgeformer.benchmark.choice import combine_choices
from edgeformer.benchmark.limits import Limit
from edgeformer.data.sources import Columns
from edgeformer.model_search.driver import ModelSearchOptions, _CommandError, _ModelSearch
from edgeformer.model_search.ladder import LadderModel, ladder_of_file, ladder_of_recipe
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.system.signals import handle_signals
from tests.benchmark.choice_cases import accuracy, artifact, bundle, estimate, row, run
from tests.training.runs import Messages

LADDER = (
    LadderModel("linear", "", {}),
    LadderModel("small", "", {}),
    LadderModel("light", "", {}, smaller="small"),
    LadderModel("linear-distilled", "", {}, ("frozen", "pretrained"), "linear"),
    LadderModel("light-distilled", "", {}, ("frozen", "pretrained"), "light"),
)


@pytest.mark.parametrize(
    ("scores", "model", "reason"),
    [
        ({}, "light", None),
        ({"linear": 0.91, "small": 0.88}, "light", "small, of the same kind, is 3.0 points below linear"),
        ({"linear": 0.91, "small": 0.90}, "light", None),
        ({"linear": 0.91}, "light", None),
        ({"linear": 0.91, "frozen": 0.90}, "linear-distilled", "its teacher frozen scores 0.9000"),
        ({"linear": 0.91, "frozen": 0.93, "pretrained": 0.90}, "linear-distilled", None),
        ({"linear": 0.91, "frozen": 0.93}, "light-distilled", "without a teacher, light, is not trained"),
    ],
)
def test_models_that_promise_no_better_score_are_skipped(scores, model, reason, tmp_path):
    search = _ModelSearch("x", LADDER, "host", tmp_path, tmp_path, ModelSearchOptions(), lambda *_: None)  # type: ignore[arg-type]
    measured = SearchedModel(name="", description="", run="", status="measured")
    models = tuple(measured.model_copy(update={"name": name, "score": score}) for name, score in scores.items())
    search.result = ModelSearch(name="x", data="x", device="host", host="x", created="x", models=models)
    (entry,) = (entry for entry in LADDER if entry.name == model)
    skipped_for = search._why_unpromising(entry)
    assert (skipped_for is None) == (reason is None) and (reason or "") in str(skipped_for)


@pytest.mark.parametrize(
    ("budget_s", "is_first", "epochs"),
    [(3000, False, 10), (120, False, 3), (30, False, 0), (5, False, 0), (3000, True, 10), (5, True, 1)],
    ids=("all", "3", "none", "no time", "first", "first, no time"),
)
def test_epochs_that_fit_into_the_budget_are_trained(budget_s, is_first, epochs, tmp_path, monkeypatch):
    progress = Messages()
    model = LadderModel("small", "", {"training": {"epochs": 10}})
    search = _ModelSearch("x", [model], "host", tmp_path, tmp_path, ModelSearchOptions(budget_s=budget_s), progress)
    done = SearchedModel(name="linear", description="", run="x-linear", status="measured", deploy_s=9.0)
    predicted = {"predicted_low_s": 150.0, "predicted_high_s": 300.0}
    waiting = SearchedModel(name="small", description="", run="x-small", status="waiting", **predicted)
    search.result = ModelSearch(name="x", data="x", device="host", host="x", created="x", models=(done, waiting))
    if not is_first:
        search._reports["linear"] = None  # type: ignore[assignment]
    commands: list[tuple[str, ...]] = []

    def run(*arguments: str) -> dict[str, Any]:
        commands.append(arguments)
        raise _CommandError("ends here")

    monkeypatch.setattr(search, "_run", run)
    search._train(model, for_model="small")
    if not epochs:
        assert not commands and search._searched("small").status == "skipped"
    else:
        assert [*commands[0][4:]] == ([] if epochs == 10 else ["--set", f"training.epochs={epochs}"])
        assert search._searched("small").predicted_high_s == 30.0 * epochs
        assert bool(progress.containing(f"{epochs} of 10 epochs, because of the budget")) == (epochs < 10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_sigterm_ends_the_training_in_order(tmp_path: Path) -> None:
    search = _ModelSearch("x", LADDER, "host", tmp_path, tmp_path, ModelSearchOptions(), Messages())

    def stop_when_it_trains() -> None:
        deadline, metrics = time.monotonic() + 120, tmp_path / "slow" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_it_trains).start()
    with handle_signals(("SIGTERM",), search.interrupt), pytest.raises(InterruptedRun, match="continues the search"):
        search._run("train", "quickstart", "--name", "slow", "--set", "training.epochs=500")
    assert read_run(tmp_path / "slow").status == "interrupted" and any((tmp_path / "slow" / "checkpoints").iterdir())


def test_an_interrupted_command_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: str) -> dict[str, Any]:
        raise InterruptedRun("stopped")

    search = _ModelSearch("x", LADDER, "host", tmp_path, tmp_path, ModelSearchOptions(), Messages())
    monkeypatch.setattr(search, "_run", interrupted)
    with pytest.raises(InterruptedRun):
        search.run("data.csv", None, lambda result, folder: None)
    assert {model.status for model in search.result.models} == {"waiting"}


TAUGHT = {"linear-distilled", "light-distilled", "folded"}
WITH_SOURCE = ["linear", "frozen", "small", "light", "pretrained"]
UNLABELLED = ["training.teacher=x", "data.unlabelled=[{kind: synthetic-reviews, rows: 9}]"]
TOPICS = ["task=multi-label-classification", "tokenizer={kind: trained}", "model={kind: linear}", "training={}"]


@pytest.mark.parametrize(
    ("name", "changes", "source", "expected"),
    [
        ("quickstart", UNLABELLED, True,
         [*WITH_SOURCE, "folded", "linear-distilled", "light-distilled"]),
        ("quickstart", TOPICS, True, WITH_SOURCE),
        ("quickstart", [], False, ["linear", "small", "light"]),
    ],
)  # fmt: skip
def test_models_from_cheap_to_expensive(name, changes, source, expected, minilm, tmp_path):
    """Every model is a valid recipe, and only those with a teacher read texts without labels."""
    if changes == TOPICS:
        lines = [f'{number} cups;"{("food", "price", "food,price")[number % 3]}"' for number in range(60)]
        (tmp_path / "topics.csv").write_text("\n".join(["text;label", *lines]), encoding="utf-8")
        part = f"{{kind: file, path: {tmp_path / 'topics.csv'}, delimiter: ';'}}"
        data = f"parts: {{train: [{part}]}}, split: stratified, labels: [food, price], label_separator: ','"
        changes = [*changes, f"data={{{data}, max_length: 32}}"]
    ladder = ladder_of_recipe(load_recipe(name, changes), str(minilm) if source else None)
    assert [model.name for model in ladder] == expected
    for model in ladder:
        assert bool(model.teachers) == (model.name in TAUGHT)
        sections = {"name": model.name, **model.sections}
        if model.teachers:
            sections["training"] = {**sections["training"], "teacher": "some-run"}
        path = tmp_path / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        recipe: Any = load_recipe(str(path))
        assert bool(recipe.data.unlabelled) == (bool(model.teachers) and changes == UNLABELLED)


def test_spans_get_the_pretrained_encoder_first(minilm: Path, tmp_path: Path) -> None:
    """The others would use up the budget; the larger is skipped where the pretrained encoder is far better."""
    path = tmp_path / "names.conll"
    path.write_text("".join(f"Ada B-PER\nis O\nin O\nUlm{number} B-LOC\n\n" for number in range(40)), encoding="utf-8")
    ladder = ladder_of_file(path, Columns(), str(minilm), SILENT)
    assert [model.name for model in ladder] == ["pretrained", "small", "light"]


def limits(**values: float) -> tuple[Limit, ...]:
    return tuple(Limit(quantity, value) for quantity, value in values.items())  # type: ignore[arg-type]


def search_of(score: float, ms: float, size: int, **changes: Any) -> Choice:
    """The search of a model with one artifact, measured on the device."""
    return run(bundle(artifact("onnx-int8", validation=accuracy(score))), [row("onnx-int8", ms, size=size, **changes)])


SEARCHES = {"linear": search_of(0.82, 0.1, 200), "light": search_of(0.86, 2.0, 11_000)}
SEARCHES["pretrained"] = search_of(0.91, 9.0, 23_000)


@pytest.mark.parametrize(
    ("kept", "picked"),
    [
        (limits(), "pretrained/onnx-int8"),
        (limits(score=0.80), "linear/onnx-int8"),
        (limits(score=0.85), "light/onnx-int8"),
        (limits(score=0.90), "pretrained/onnx-int8"),
        (limits(score=0.90, latency=5.0), None),
        (limits(score=0.85, size=10_000), None),
    ],
)
def test_the_cheapest_model_within_the_limits_is_recommended(kept: tuple[Limit, ...], picked: str | None) -> None:
    result = combine_choices(SEARCHES, kept, "latency")
    assert (None if result.pick is None else result.candidates[result.pick].artifact) == picked
    assert [candidate.on_front for candidate in result.candidates] == [True, True, True]


def test_without_a_limit_the_best_model_may_lose_one_standard_error() -> None:
    """Rows of `accuracy` are 1,000: the error is 0.0090 at 0.91."""
    scores = {"onnx-fp32": 0.91, "onnx-int8": 0.905}
    manifest = bundle(*(artifact(name, validation=accuracy(score)) for name, score in scores.items()))
    both = run(manifest, [row("onnx-fp32", 9.0, size=900), row("onnx-int8", 3.0, size=300)])
    searches = {"linear": search_of(0.906, 0.1, 200), "pretrained": both}
    result = combine_choices(searches, limits(), "latency")
    assert result.pick is not None and result.candidates[result.pick].artifact == "pretrained/onnx-int8"
    assert "from the model with the best accuracy" in result.reason


def test_refused_and_dominated_models_and_the_smallest() -> None:
    searches, reason = {**SEARCHES, "slow": search_of(0.81, 3.0, 12_000)}, "without a teacher it scores 0.92"
    result = combine_choices(searches, limits(), "latency", {"pretrained": reason})
    assert result.pick is not None and result.candidates[result.pick].artifact == "light/onnx-int8"
    assert result.candidates[2].reason == reason
    assert [c.artifact for c in result.candidates if not c.on_front] == ["slow/onnx-int8"]
    searches = {"wide": search_of(0.9, 1.0, 900), "small": search_of(0.9, 3.0, 300)}
    result = combine_choices(searches, limits(), "size")
    assert result.pick is not None and result.candidates[result.pick].artifact == "small/onnx-int8"


def test_refusals_name_figure_limit_and_the_best() -> None:
    result = combine_choices(SEARCHES, limits(score=0.85, latency=5.0, size=10_000), "latency")
    reasons = {candidate.artifact: candidate.reason for candidate in result.candidates}
    assert reasons == {
        "linear/onnx-int8": "accuracy 0.8200 is below 0.85",
        "light/onnx-int8": "size 10.7 KiB is over 9.8 KiB",
        "pretrained/onnx-int8": "latency 9.00 ms is over 5.00 ms; size 22.5 KiB is over 9.8 KiB",
    }
    assert result.reason.startswith("none of 3 candidates is known to have accuracy ≥ 0.85")
    result = combine_choices(SEARCHES, limits(score=0.95, latency=5.0), "latency")
    assert result.pick is None and result.closest is not None
    assert result.candidates[result.closest].artifact == "pretrained/onnx-int8"


def test_an_estimate_keeps_a_limit_with_its_whole_range_only() -> None:
    manifest = bundle(artifact("onnx-int8", validation=accuracy(0.9)))
    estimated = run(manifest, [estimate("onnx-int8", 3.0, 6.0)], on_target=False)
    for limit_ms, unknown, is_feasible in ((7.0, (), True), (5.0, ("latency",), True), (2.0, (), False)):
        (candidate,) = combine_choices({"light": estimated}, limits(latency=limit_ms), "latency").candidates
        assert (candidate.unknown, candidate.feasible) == (unknown, is_feasible)
