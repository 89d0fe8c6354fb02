"""Every program in examples/ runs as a user would start it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgeformer.data.synthetic import PARAGRAPHS
from tests.docs.test_documented_commands import write_rows

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str | Path, folder: Path) -> str:
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def write_table(path: Path, rows: int) -> Path:
    write_rows(path, ("text", "label"), ("bad", "good"), rows, ",")
    return path


@pytest.mark.slow
def test_own_data(tmp_path: Path) -> None:
    output = run("own_data.py", write_table(tmp_path / "reviews.csv", 200), "--max-steps", "3", folder=tmp_path)
    assert re.search(r"onnx-int8: [\d.]+ MiB, (built|rejected)", output)
    assert "on device (steady): estimated, " in output and re.search(r"verdict: (pass|fail|unknown)", output)


@pytest.mark.slow
def test_own_onnx_model(finished_run: Path, tmp_path: Path) -> None:
    model = finished_run / "bundle" / "onnx" / "model.onnx"
    output = run("own_onnx_model.py", model, folder=tmp_path)
    assert output.startswith("verified") and "onnx-int8" in output and "verdict: " in output


@pytest.mark.slow
def test_looped_language_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number}: {text}" for number in range(20) for text in PARAGRAPHS), encoding="utf-8")
    small = ["model.hidden_size=32", "model.embedding_size=16", "model.ffn_size=64", "model.vocab_size=300"]
    small += ["data.sequence_length=32", "data.min_characters=20", "model.max_positions=128", "model.loops=4"]
    small.append("model.exits=[2]")
    options = [word for override in small for word in ("--set", override)]
    output = run("looped_lm.py", text, *options, "--max-steps", "5", folder=tmp_path)
    assert re.search(r"exit 2: perplexity [\d.]+", output) and "The house" in output


def test_serve_client(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    command = [sys.executable, "-m", "edgeformer", "serve", str(finished_run / "bundle"), "--port", "0"]
    with subprocess.Popen(command, cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True) as server:
        try:
            matches = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr or ())
            url = next(match[0] for match in matches if match)
            output = run("serve_client.py", url, "a warm and funny film", "dull", folder=tmp_path)
        finally:
            server.terminate()
    assert len(output.splitlines()) == 2


def test_batch_prediction_with_ray(finished_run: Path, tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[data]'")
    table = write_table(tmp_path / "texts.csv", 600)
    output = run("batch_prediction_ray.py", finished_run / "bundle", table, "answers", folder=tmp_path)
    assert "600 rows" in output and list((tmp_path / "answers").glob("*.parquet"))
