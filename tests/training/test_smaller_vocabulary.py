"""A trained tokenizer that comes out smaller than model.vocab_size: model, saved recipe, resume, plan, export agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.studies.jobs import DataReader
from edgeformer.artifacts.data_config import SyntheticSource
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.artifacts.progress import SILENT, Silent
from edgeformer.artifacts.recipe import Recipe
from edgeformer.bundle import Bundle
from edgeformer.data.sources import read
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.models import load_recipe, read_recipe_of
from edgeformer.run import read_run
from edgeformer.training.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE, classifier_recipe

TOO_LARGE = [*SMALL, "training.epochs=1", "data.rows.train=0.05", "model.vocab_size=4000"]


class Messages(Silent):
    """Keeps every message."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


class StopsAfterAStep(Silent):
    """Presses Ctrl-C after the first step."""

    def advance(self, amount: int = 1, **fields: float) -> None:
        if "loss" in fields:
            import signal

            signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run, and what training said."""
    progress = Messages()
    recipe = classifier_recipe(TOO_LARGE)
    return train(recipe, TrainOptions(tmp_path_factory.mktemp("smaller"), name="run"), progress), progress.texts


def test_the_model_follows_the_tokenizer_and_the_saved_recipe_says_so(trained: tuple[Path, list[str]]) -> None:
    run, messages = trained
    size = read_recipe_of(run).model.vocab_size
    assert 100 < size < 4000 and read_run(run).vocabulary == size
    assert any(f"model.vocab_size is {size} instead of 4000" in message for message in messages)
    assert size in {len(tensor) for tensor in load_file(run / "model" / "model.safetensors").values()}


def test_it_is_the_run_of_a_recipe_that_states_this_size(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    run, _ = trained
    stated = read_recipe_of(run)
    again = train(stated, TrainOptions(tmp_path))
    assert read_run(again).recipe_sha256 == read_run(run).recipe_sha256 == stated.fingerprint()
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (run, again))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("as_saved", [False, True])
def test_it_goes_on_with_the_recipe_as_written_and_as_saved(tmp_path: Path, as_saved: bool) -> None:
    recipe: Recipe = classifier_recipe(TOO_LARGE)
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopsAfterAStep())
    if as_saved:
        recipe = read_recipe_of(tmp_path / "run")
    assert read_run(train(recipe, TrainOptions(tmp_path, name="run", resume=True))).status == "finished"


def test_a_run_with_a_smaller_vocabulary_of_its_own_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun):
        train(classifier_recipe([*TOO_LARGE[:-1], "model.vocab_size=200"]), TrainOptions(tmp_path), StopsAfterAStep())
    with pytest.raises(InputError, match="the tokenizer changed since this run began"):
        train(classifier_recipe(TOO_LARGE), TrainOptions(tmp_path, resume=True))


def test_plan_export_and_studies_agree(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    run, _ = trained
    size = read_recipe_of(run).model.vocab_size
    recipe = classifier_recipe(TOO_LARGE)
    planned = plan(recipe, load_profile("rtx4050"))
    assert planned.parameters == read_run(run).parameters
    assert any(f"model.vocab_size is {size} instead of 4000" in note for note in planned.notes)
    export(run, ExportOptions())
    assert Bundle.open(run / "bundle").manifest.artifacts[0].status == "built"
    data = DataReader(tmp_path, (), SILENT).read(recipe)
    assert data.summary is not None and data.summary.fingerprint == read_run(run).data.fingerprint


def test_a_streamed_text_agrees_too(tmp_path: Path) -> None:
    """Its tokenizer is kept as a file, and found there the second time."""
    texts = [str(row.text) for row in read(SyntheticSource(kind="synthetic-reviews", rows=300))]
    for part in ("train", "valid"):
        (tmp_path / f"{part}.txt").write_text("\n".join(texts), encoding="utf-8")
    train_part, validation = (f"[{{kind: file, path: {tmp_path}/{part}.txt}}]" for part in ("train", "valid"))
    parts = f"data.parts={{train: {train_part}, validation: {validation}}}"
    settings = [*SMALL_LANGUAGE, parts, "data.stream=true", "model.vocab_size=4000", "training.epochs=1"]
    recipe = load_recipe("crt_mini", settings)
    runs = [train(recipe, TrainOptions(tmp_path / "artifacts", max_steps=1)) for _ in range(2)]
    sizes = [read_recipe_of(run).model.vocab_size for run in runs]
    assert sizes[0] == sizes[1] < 4000 and all(read_run(run).vocabulary == sizes[0] for run in runs)
