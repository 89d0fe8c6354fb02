"""The Python API: it does what the commands do, without torch if a bundle is enough."""

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

import edgeformer
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.report import MeasureRules
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.request import ProfileOptions
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.onnx import OnnxImportOptions
from edgeformer.inference.evaluate import EvaluateOptions
from edgeformer.inference.generate import GenerateOptions
from edgeformer.inference.sampling import Sampling
from edgeformer.inference.verification import Verification
from edgeformer.tasks.early_exit import EarlyExit
from edgeformer.training.train import TrainOptions
from tests.cli.run_cli import edgeformer as command
from tests.conftest import OLD_FORMAT

API = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
OPTIONS = (
    TrainOptions, ExportOptions, EvaluateOptions, ProfileOptions, ChoiceOptions, GenerateOptions, Sampling, EarlyExit,
    OnnxImportOptions,
)  # fmt: skip
"""Dataclasses of keyword arguments; the page renders their docstrings."""


def classifier() -> edgeformer.Bundle:
    return edgeformer.Bundle.open(OLD_FORMAT / "classifier-v1" / "bundle")


def test_a_prediction_in_one_line_without_torch() -> None:
    """The answer is that of the command. The package itself imports nothing."""
    program = (
        "import sys, edgeformer; print([n for n in sys.modules if n == 'pydantic' or n.startswith('edgeformer.')])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
    assert output == "['edgeformer._version']"
    program = (
        "import sys; sys.modules['torch'] = sys.modules['datasets'] = sys.modules['matplotlib'] = None\n"
        "import edgeformer; print(edgeformer.open('bundle').predict(['a fine film'])[0].probabilities)"
    )
    folder = OLD_FORMAT / "classifier-v1"
    result = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    outcome = command("predict", "bundle", "a fine film", "--json", cwd=folder)
    assert eval(result.stdout) == json.loads(outcome.out)["predictions"][0]["probabilities"]


def test_the_reference_names_functions_that_exist() -> None:
    assert {"Bundle", "Run", "open", "plan", "train"} <= set(dir(edgeformer))
    with pytest.raises(AttributeError, match="has no attribute 'close'"):
        _ = edgeformer.close
    assert (Path(edgeformer.__file__).parent / "py.typed").is_file()
    table = re.findall(r"^\| .* \| `([\w ]+)` \|$", API.read_text(encoding="utf-8"), re.M)
    names = {*dir(edgeformer), *dir(edgeformer.Bundle), *dir(edgeformer.Run)}
    assert table and {command.replace(" ", "_") for command in table} <= names


def test_open_tells_runs_from_bundles_and_verify_hashes_again(tmp_path: Path) -> None:
    run = edgeformer.open(str(OLD_FORMAT / "classifier-v1"))
    assert isinstance(run, edgeformer.Run) and isinstance(run.bundle, edgeformer.Bundle)
    assert run.bundle.name == classifier().name == run.name
    with pytest.raises(ArtifactError, match="neither a run nor a bundle"):
        edgeformer.open(tmp_path)
    with pytest.raises(InputError, match="a list of texts"):
        classifier().predict("a fine film")
    with pytest.raises(InputError, match="belongs to a run"):
        classifier().export()
    folder = Path(shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", tmp_path / "bundle"))
    bundle = edgeformer.Bundle.open(folder)
    assert bundle.verify("onnx-fp32").exit_code == 0
    (folder / "onnx" / "model.onnx").write_bytes(b"changed")
    verification = bundle.verify("onnx-fp32")
    assert isinstance(verification, Verification) and verification.exit_code == 2


def test_evaluate_and_generate_are_the_commands(tmp_path: Path) -> None:
    for name in ("classifier-v1", "language-v1"):
        shutil.copytree(OLD_FORMAT / name, tmp_path / name)
    run = edgeformer.Run.open(tmp_path / "classifier-v1")
    (row,) = run.evaluate(artifact="onnx-fp32").rows
    (bundle_row,) = run.bundle.evaluate(artifact="onnx-fp32").rows
    assert (row.accuracy, row.loss) == (bundle_row.accuracy, bundle_row.loss)
    assert [saved.loss for saved in read_evaluation(run.folder).rows if saved.artifact == "onnx-fp32"] == [row.loss]
    language = edgeformer.open(tmp_path / "language-v1" / "bundle")
    assert isinstance(language, edgeformer.Bundle)
    pieces: list[str] = []
    generation = language.generate("a good", pieces.append, max_tokens=5)
    assert "".join(pieces) == generation.text and generation.run == language.name
    with pytest.raises(InputError, match="is a language model, which has no labels"):
        language.predict(["a fine film"])


@pytest.mark.slow
def test_the_api_docs_run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.3, min_s=0.05, max_s=0.5, idle_s=0.01, energy_s=0.01)
    monkeypatch.setattr(edgeformer.Bundle, "profile", partialmethod(edgeformer.Bundle.profile, rules=short))
    blocks = re.findall(r"^```python\n(.*?)^```$", API.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, Any] = {"folder": finished_run / "bundle", "workplace": tmp_path / "artifacts"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/reference/python.md, block {number + 1}", "exec"), namespace)
    assert namespace["report"].rows and namespace["scores"].rows[0].accuracy > 0.5
    assert {artifact.status for artifact in namespace["exported"].artifacts} == {"built"}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_reference_describes_every_option(options: type[Any]) -> None:
    assert f"::: {options.__module__}.{options.__qualname__}\n" in API.read_text(encoding="utf-8")
    attributes = (inspect.getdoc(options) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w[\w, ]*): ", attributes, re.MULTILINE)
    names = [name for entry in described for name in entry.split(", ")]
    assert names == [field.name for field in dataclasses.fields(options)]
