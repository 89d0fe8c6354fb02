"""Runs that are trained once for all tests of training."""

import shutil
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.train import TrainOptions, train
from tests.conftest import classifier_recipe
from tests.torture.children import TINY
from tests.training.runs import StopAfter


@pytest.fixture(scope="session")
def tiny_recipe() -> ClassificationRecipe:
    """Four steps of 80 rows in each of two epochs."""
    return classifier_recipe(TINY)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: ClassificationRecipe) -> Path:
    """A finished run of the tiny recipe. Read it; copy it before changing anything."""
    return train(tiny_recipe, TrainOptions(tmp_path_factory.mktemp("tiny"), name="run", accelerator="cpu"))


@pytest.fixture(scope="session")
def stopped_template(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: ClassificationRecipe) -> Path:
    artifacts = tmp_path_factory.mktemp("stopped")
    with pytest.raises(InterruptedRun):
        train(tiny_recipe, TrainOptions(artifacts, name="run", accelerator="cpu"), StopAfter(7))
    return artifacts


@pytest.fixture
def stopped_run(tmp_path: Path, stopped_template: Path) -> Path:
    """A copy of a tiny run that was interrupted after step 7, with checkpoints of steps 4 and 7."""
    shutil.copytree(stopped_template, tmp_path / "artifacts")
    return tmp_path / "artifacts" / "run"
