"""README and docs, line by line, each in a folder of its own; every program in examples/, as a user starts it."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.documents import shipped_folder
from edgeformer.data.sources import load_parts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import train_language_tokenizer
from edgeformer.models import load_recipe
from tests.cli.in_process import Edgeformer
from tests.docs.document import ROOT, RUN, Block, blocks, words
from tests.models.crt_oracle import public_weights, small_config
from tests.personal_data import sentences, write_jsonl

CLASSIFIER = ROOT / "tests" / "old_format" / "classifier-v1"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def commands_of(document: str) -> list[str]:
    return [line for block in blocks(ROOT / document) if block.language == "bash" for line in block.commands()]


def follow(
    document: str, edgeformer: Edgeformer, steps: dict[str, Callable[[], object]] | None = None, skip: str = "\n"
) -> list[str]:
    """Run what is to be run of a document, each line once.

    Args:
        steps: what a reader does in front of a line.
        skip: beginning of the lines that are not run.
    """
    done: list[str] = []
    for command in commands_of(document):
        if command in RUN and command not in done and not command.startswith(skip):
            (steps or {}).get(command, lambda: None)()
            # Without tensorrt-rtx, an engine is requested that cannot be built.
            is_partial = command == "edgeformer export --fp16 --trt" and find_spec("tensorrt_rtx") is None
            edgeformer(*words(command), *RUN[command], code=3 if is_partial else 0)
            done.append(command)
    return done


def block(document: str, first_line: str) -> Block:
    (results,) = (block for block in blocks(ROOT / document) if block.first_line == first_line)
    return results


def write_rows(file: Path, header: tuple[str, str], labels: tuple[str, str], rows: int, delimiter: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(header)
        for number in range(rows):
            word = ("dull and slow", "warm and funny")[number % 2]
            writer.writerow([f"a {word} film, number {number}", labels[number % 2]])


@pytest.mark.slow
def test_getting_started(edgeformer: Edgeformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps, with small models: recipe, run, bundle, report; real sentences."""
    for name, rows in {"train": 120, "dev": 20, "test": 20}.items():
        write_rows(Path("path/to/sst2") / f"{name}.tsv", ("sentence", "label"), ("0", "1"), rows, "\t")
    Path("path/to/bert-base-uncased").mkdir(parents=True)
    tokenizer = shutil.copy(CLASSIFIER / "model" / "tokenizer.json", Path("path/to/bert-base-uncased/tokenizer.json"))
    vocabulary = len(json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"])
    sentences = next(line for line in RUN if line.startswith("edgeformer train recurrent_sst2_fast"))
    monkeypatch.setitem(RUN, sentences, (*RUN[sentences], "--set", f"model.vocab_size={vocabulary}"))
    done = follow("docs/index.md", edgeformer)
    assert [command.split()[1] for command in done] == ["train", "export", "predict", "profile", "train", "train"]
    reports = next(Path("artifacts").glob("quickstart-001/reports"))
    files = {f"rtx4050-onnx-fp16.{ending}" for ending in ("html", "md", "csv", "json", "svg")}
    assert {path.name for path in reports.iterdir()} >= files


@pytest.mark.slow
def test_readme_compiles_for_tensorrt(edgeformer: Edgeformer, finished_run: Path) -> None:
    """The three commands of the mission, from the export on."""
    shutil.copytree(finished_run, "artifacts/small")
    done = follow("README.md", edgeformer, skip="edgeformer generate")
    assert done == ["edgeformer export --fp16 --trt", "edgeformer profile --device rtx4050"]


def test_two_tables_as_they_are(tmp_path: Path) -> None:
    """The sources of docs/guides/own-data.md in a recipe that is read from somewhere else."""
    recipe = (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    rest = recipe[recipe.index("  split:") :].replace("random-split", "stratified").replace("positive", "'5'")
    text = block("docs/guides/own-data.md", "# two tables, each as it is").text
    (tmp_path / "mine.yaml").write_text(recipe[: recipe.index("data:\n")] + text + rest, encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "reviews.csv").write_text("Stars;Comment\n5;fine, really\n", encoding="utf-8")
    (tmp_path / "data" / "checked.csv").write_text("5,warm\n0,dull\n", encoding="utf-8")
    built: Any = load_recipe(str(tmp_path / "mine.yaml"))
    parts = load_parts(built.data)
    assert parts["train"].texts == ["fine, really"] and parts["validation"].texts == ["warm", "dull"]
    assert parts["validation"].labels.tolist() == [1, 0]


def test_two_text_columns_and_names_for_numbers(edgeformer: Edgeformer) -> None:
    """The command of docs/guides/own-data.md writes the recipe that the page shows."""
    rows = [f"{n % 4 + 1},Headline number {n},the text of number {n}\n" for n in range(80)]
    Path("ag_news.csv").write_text("".join(rows), encoding="utf-8")
    (command,) = {line for line in commands_of("docs/guides/own-data.md") if line.startswith("edgeformer init ag_news")}
    edgeformer(*words(command))
    drafted: Any = load_recipe("ag_news.yaml")
    stated = yaml.safe_load(block("docs/guides/own-data.md", "# two text columns, and names for numbers").text)["data"]
    shown = DataConfig.model_validate({**stated, "split": "stratified"}, strict=False)
    assert (shown.labels, shown.label_values) == (drafted.data.labels, drafted.data.label_values)
    source, expected = drafted.data.parts["train"][0], shown.parts["train"][0]
    for key in ("text", "label", "header"):
        assert getattr(source, key) == getattr(expected, key)
    texts = load_parts(drafted.data)["train"]
    assert texts.texts[5] == "Headline number 5 the text of number 5" and texts.labels[:5].tolist() == [0, 1, 2, 3, 0]


def test_streaming_from_three_files(edgeformer: Edgeformer) -> None:
    """The data section of docs/guides/large-data.md trains."""
    recipe = (shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8")
    start, end = recipe.index("data:\n"), recipe.index("tokenizer:")
    data = block("docs/guides/large-data.md", "# three files, training rows streamed from disk").text
    Path("large.yaml").write_text(recipe[:start] + data + recipe[end:], encoding="utf-8")
    for name in ("train", "dev", "test"):
        write_rows(Path(f"{name}.csv"), ("sentence", "label"), ("0", "1"), 60, ",")
    small = ("--set", "model.vocab_size=100", "--set", "training.epochs=1")
    assert json.loads(edgeformer("train", "large.yaml", *small, "--max-steps", "1", "--json"))["status"] == "finished"
    assert [*Path("artifacts/.cache/tokens").iterdir()]


@pytest.mark.parametrize("first_line", ["# several labels per text", "# numbers instead of labels"])
def test_other_labels_as_documented(tmp_path: Path, first_line: str) -> None:
    recipe = yaml.safe_load((shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8"))
    subset = {"training": {"epochs": 1, "batch_size": 8, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}}
    stated = yaml.safe_load(block("docs/guides/own-data.md", first_line).text)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**recipe, **subset, **stated}), encoding="utf-8")
    (tmp_path / "data").mkdir()
    rows = 'text,topics,stars\nfine,"food, price",4.5\ndull,,1\n'
    (tmp_path / "data" / "reviews.csv").write_text(rows, encoding="utf-8")
    built: Any = load_recipe(str(tmp_path / "mine.yaml"))
    labels = load_parts(built.data)["train"].labels
    if stated["task"] == "regression":
        assert labels.tolist() == [4_500_000, 1_000_000]
    else:
        assert (labels[:, None] >> [0, 1, 2] & 1).tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.slow
def test_spans(edgeformer: Edgeformer) -> None:
    """The commands of docs/guides/spans.md on generated letters, and the columns of another file."""
    write_jsonl(Path("letters.jsonl"), sentences(60))
    Path("mails.csv").write_text("number,text\n1,Dear Ruth Goldson\n", encoding="utf-8")
    Path("held-out.conll").write_text("Ruth B-PERSON\nGoldson I-PERSON\nwaits O\n", encoding="utf-8")
    first = next(line for line in RUN if line.startswith('edgeformer predict "Frau'))
    assert len(follow("docs/guides/spans.md", edgeformer, {first: lambda: edgeformer("export")})) == 5
    assert "spans" in json.loads(Path("spans.jsonl").read_text(encoding="utf-8"))
    stated = yaml.safe_load(block("docs/guides/spans.md", "# a CoNLL file with other columns").text)
    recipe = yaml.safe_load(Path("letters.yaml").read_text(encoding="utf-8"))
    Path("other.yaml").write_text(yaml.safe_dump({**recipe, **stated}), encoding="utf-8")
    Path("data").mkdir()
    Path("data/germeval.tsv").write_text("#\tsource\n1\tUlm\tB-LOC\tO\n", encoding="utf-8")
    parts = load_parts(load_recipe("other.yaml").data)  # type: ignore[arg-type]
    texts: list[Any] = parts["train"].texts
    assert texts[0].spans == ((0, 3, "LOC"),)


@pytest.mark.slow
def test_deploying(edgeformer: Edgeformer) -> None:
    shutil.copytree(CLASSIFIER, "artifacts/my-run")
    copied = {"edgeformer verify bundle": lambda: shutil.copytree("artifacts/my-run/bundle", "bundle")}
    done = follow("docs/guides/deploy.md", edgeformer, copied)
    assert done == ["edgeformer verify bundle", "edgeformer verify bundle --write"]


def test_language_models(edgeformer: Edgeformer, finished_language_run: Path) -> None:
    shutil.copytree(finished_language_run, "artifacts/crt_mini-001")
    assert len(follow("docs/guides/language-models.md", edgeformer)) == 3


def test_importing(edgeformer: Edgeformer) -> None:
    torch.save({"model": public_weights(small_config(vocab_size=300))}, "best_model.pt")
    Path("gpt2").mkdir()
    train_language_tokenizer(300, list(PARAGRAPHS)).save("gpt2/tokenizer.json")
    assert len(follow("docs/guides/own-model.md", edgeformer)) == 1


@pytest.mark.parametrize("first_line", ["name: my-card", "bandwidth_bytes_per_s:"])
def test_profiles(edgeformer: Edgeformer, first_line: str) -> None:
    text = block("docs/guides/profiles.md", first_line).text
    complete = text if text.startswith("name:") else f"name: my-card\ntitle: My card\nkind: cuda\n{text}"
    Path("artifacts/profiles").mkdir(parents=True)
    Path("artifacts/profiles/my-card.yaml").write_text(complete, encoding="utf-8")
    rows = {row["name"]: row for row in json.loads(edgeformer("list", "devices", "--json"))["devices"]}
    assert "unreadable" not in rows["my-card"]["device"] and rows["my-card"]["bandwidth_bytes_per_s"] in (192e9, 288e9)


EXAMPLES = ROOT / "examples"


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
