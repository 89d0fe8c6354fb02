"""Rules of a search: which models are expected to score higher, and which taught models are refused."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.artifacts.model_search import ModelSearch, SearchedModel
from edgeformer.model_search.driver import ModelSearchOptions, _CommandError, _ModelSearch
from edgeformer.model_search.ladder import LadderModel
from edgeformer.run import read_run
from edgeformer.system.signals import handle_signals
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
