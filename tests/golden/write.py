"""Train and export the runs that the tests share, with today's code.

``python -m tests.golden.write`` writes ``tests/golden/small`` and ``tests/golden/small-language`` anew. Run it when
``tests/golden/test_golden.py`` fails because a change of the files is intended, and commit the result.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.models import load_recipe
from edgeformer.training.train import TrainOptions, train
from tests.conftest import GOLDEN, SMALL, SMALL_LANGUAGE

OMITTED = ("checkpoints", "plots", "tensorboard")
"""What a run opens without, and what no test of a finished run reads."""


def write_classifier(artifacts: Path, accelerator: Literal["auto", "cpu"] = "auto") -> Path:
    run = train(load_recipe("quickstart", SMALL), TrainOptions(artifacts, name="small", accelerator=accelerator))
    export(run, ExportOptions(fp16=True))
    return run


def write_language_model(artifacts: Path, accelerator: Literal["auto", "cpu"] = "auto") -> Path:
    recipe = load_recipe("crt_mini", SMALL_LANGUAGE)
    return train(recipe, TrainOptions(artifacts, name="small-language", accelerator=accelerator))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for run in (write_classifier(Path(folder), "cpu"), write_language_model(Path(folder), "cpu")):
            shutil.rmtree(GOLDEN / run.name, ignore_errors=True)
            shutil.copytree(run, GOLDEN / run.name, ignore=shutil.ignore_patterns(*OMITTED, ".*"))


if __name__ == "__main__":
    main()
