"""The commands as a user runs them; in [RUN] TEXT… a wrong name is an error, and a text is never taken for a run."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.export import builder_names
from edgeformer.run import read_run
from tests.cli.run_cli import edgeformer, run_json
from tests.conftest import OLD_FORMAT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("name", ["small", "nothing"])
def test_json_that_cannot_be_written_is_told_on_stderr(finished_run: Path, name: str) -> None:
    command = [sys.executable, "-m", "edgeformer", "predict", "--run", name, "good", "--json"]
    with Path("/dev/full").open("w") as full:
        folder = finished_run.parents[1]
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    expected = (1, "No space left on device") if name == "small" else (2, "no run 'nothing'")
    assert done.returncode == expected[0] and expected[1] in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send Ctrl-C to one child process")
def test_ctrl_c_exits_with_130_and_resume_goes_on(tmp_path: Path) -> None:
    words = ["train", "quickstart", "--name", "long", "--set", "training.log_every=1"]
    command = [sys.executable, "-m", "edgeformer", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "artifacts" / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text(encoding="utf-8").count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    _, text, going_on = error.partition("continue with: edgeformer ")
    assert text and "Traceback" not in error
    run = tmp_path / "artifacts" / "long"
    assert read_run(run).status == "interrupted"
    start = read_run(run).steps
    resumed = edgeformer(*shlex.split(going_on), "--max-steps", str(start + 3), cwd=tmp_path)  # as it was told
    assert resumed.code == 0, resumed.err
    assert f"resuming after step {start}" in resumed.err
    assert read_run(run).steps == start + 3
    assert (run / "plots" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_doctor_tells_the_truth(tmp_path: Path) -> None:
    document = run_json("doctor", cwd=tmp_path)
    results = {c["name"]: c for c in document["capabilities"]}
    assert any("CPUExecutionProvider" in name and c["status"] == "available" for name, c in results.items())
    assert all(c["remedy"] or c["detail"] for c in results.values() if c["status"] == "unavailable")


@pytest.mark.parametrize(
    ("trt", "via", "names", "expected"),
    [
        (False, "onnx", [], ()),
        (True, "onnx", [], ("tensorrt",)),
        # Beside TensorRT's own engine, so that profile can compare the two.
        (True, "torch-tensorrt", [], ("torch-tensorrt", "tensorrt")),
        (False, "onnx", ["torch-tensorrt"], ("torch-tensorrt",)),
        (True, "onnx", ["tensorrt", "other", "other"], ("tensorrt", "other")),
    ],
)
def test_each_flag_selects_its_builder(trt: bool, via: str, names: list[str], expected: tuple[str, ...]) -> None:
    assert builder_names(trt, via, names, {}) == expected
    with pytest.raises(InputError, match="--trt-via 'x': give onnx or torch-tensorrt"):
        builder_names(True, "x", [], {})
    with pytest.raises(InputError, match="--trt-via: has no effect without --trt"):
        builder_names(False, "torch-tensorrt", [], {})


@pytest.mark.parametrize(("threads", "bound"), [(None, "true"), ("1", None)])
def test_only_a_training_with_all_cores_is_bound_to_them(threads, bound, monkeypatch, edgeformer):
    """Two trainings of one thread each would otherwise share the first core."""
    for name, value in (("OMP_PROC_BIND", None), ("OMP_NUM_THREADS", threads)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    edgeformer("train", "no_such_recipe", code=2)
    assert os.environ.get("OMP_PROC_BIND") == bound


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("names")
    shutil.copytree(OLD_FORMAT / "classifier-v1", built / "artifacts" / "shops-1")
    return built


def refused(folder: Path, *arguments: str, stdin: str = "") -> str:
    outcome = edgeformer(*arguments, cwd=folder, stdin=stdin)
    assert outcome.code == 2 and outcome.out == "", outcome.out
    return " ".join(outcome.err.split())


def texts(folder: Path, *arguments: str, stdin: str = "") -> list[str]:
    outcome = edgeformer("predict", *arguments, "--json", cwd=folder, stdin=stdin)
    assert outcome.code == 0, outcome.err
    return [prediction["text"] for prediction in json.loads(outcome.out)["predictions"]]


def test_a_wrong_name_is_no_text(folder: Path) -> None:
    messages = refused(folder, "predict", "shops-01", "the food was wonderful")
    assert "no run 'shops-01'; did you mean shops-1?" in messages
    assert "if 'shops-01' is a text: edgeformer predict --run shops-1 shops-01 …" in messages
    assert "no run 'shops-01'" in refused(folder, "predict", "shops-01", stdin="good\n")
    assert "no run 'shops-01'" in refused(folder, "generate", "shops-01", stdin="Once\n")
    messages = refused(folder, "generate", "shops-01", "Once upon a time")
    assert "edgeformer generate --run shops-1 shops-01 …" in messages
    assert "there is no text" in refused(folder, "predict", "shops-1"), "a run alone is no text"


def test_what_can_only_be_a_text_is_one(folder: Path) -> None:
    assert texts(folder, "great fun", "dull") == ["great fun", "dull"]
    odd = ["Great!", "9/10, would watch again", "a <br /> tag"]
    assert texts(folder, *odd) == odd
    assert texts(folder, "9/10, would watch again", "another") == ["9/10, would watch again", "another"]
    assert texts(folder, "great") == ["great"]
    assert texts(folder, "shops-1", "shops-01") == ["shops-01"]
    assert texts(folder, "--run", "shops-1", "shops-01", "shops-1") == ["shops-01", "shops-1"]
    assert texts(folder, "shops-1", stdin="good\n\nbad food\n") == ["good", "bad food"]
    assert texts(folder, "--run", "shops-1", stdin="good\n") == ["good"]
    assert "no run 'shops-01'" in refused(folder, "predict", "--run", "shops-01", "a text")
