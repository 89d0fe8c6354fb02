"""From a messy table to predictions, as somebody would who edits nothing and reads what is said."""

import json
from pathlib import Path

import pytest

from tests.cli.run_cli import Outcome, edgeformer
from tests.own_data import LABEL, TEXT, hostile_table

TOLD = (
    "train: 3 rows without a text: left out (reviews.csv, line 24; ",
    "train: 3 rows with the text of an earlier row: kept; rows with the same text stay in one set (reviews.csv, line ",
    "train: 1 text has different labels in 2 rows: kept, although no model can be right on all of them (",
    "train: labels are uneven: 'unentschieden' has 4 rows (1.",
    "always answering ",
)
_SMALL = ("model.hidden_size=16", "model.ffn_size=16", "training.epochs=1")
SMALL = [word for setting in _SMALL for word in ("--set", setting)]


def run(*arguments: str, cwd: Path, code: int = 0) -> Outcome:
    outcome = edgeformer(*arguments, cwd=cwd)
    assert outcome.code == code, f"{arguments}\n{outcome.out}\n{outcome.err}"
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, Outcome]:
    """A folder with the table, the recipe and a run of it; and what init and train said."""
    folder = tmp_path_factory.mktemp("own")
    hostile_table(folder / "reviews.csv")
    written = run("init", "reviews.csv", "--model", "encoder", cwd=folder)
    return folder, written, run("train", "reviews.yaml", *SMALL, cwd=folder)


def test_init_and_train_tell_everything(trained: tuple[Path, Outcome, Outcome]) -> None:
    folder, written, text = trained
    for part in TOLD:
        assert part in written.out and part in text.err + text.out
    for part in (TEXT, LABEL, "separated by semicolons", "next    edgeformer train reviews.yaml"):
        assert part in written.out
    document = json.loads((folder / "artifacts" / "reviews-001" / "run.json").read_text(encoding="utf-8"))
    findings = {finding["kind"]: finding["rows"] for finding in document["data"]["findings"]}
    assert findings == {"empty texts": 3, "duplicates": 3, "contradictions": 2, "uneven labels": 4}


@pytest.mark.slow
def test_the_run_is_exported_predicts_and_is_scored(trained: tuple[Path, Outcome, Outcome]) -> None:
    folder, _, _ = trained
    run("export", cwd=folder)
    assert "schlecht" in run("predict", "the soup was awful", "--json", cwd=folder).out
    complete = run("evaluate", "--data", "reviews.csv", "--artifact", "onnx-fp32", "--json", cwd=folder)
    assert json.loads(complete.out)["rows"][0]["n"] == 297 and "left out 3 rows without a text" in complete.err
    (folder / "other.csv").write_text("was,wie\nlovely film,gut\nawful room,schlecht\n", encoding="utf-8")
    label = ("evaluate", "--data", "other.csv", "--artifact", "onnx-fp32")
    assert "--text COLUMN" in run(*label, cwd=folder, code=2).err
    scored = json.loads(run(*label, "--text", "was", "--label", "wie", "--json", cwd=folder).out)
    assert scored["rows"][0]["n"] == 2
    assert "add --data" in run("evaluate", "--text", "was", cwd=folder, code=2).err
    (folder / "elsewhere").mkdir()
    arguments = ("evaluate", "reviews-001", "--artifact", "torch", "--artifacts", str(folder / "artifacts"), "--json")
    assert json.loads(run(*arguments, cwd=folder / "elsewhere").out)["rows"][0]["n"] == 30


def test_plan_tells_it_too_and_init_as_json(trained: tuple[Path, Outcome, Outcome]) -> None:
    folder, _, _ = trained
    planned = json.loads(run("plan", "reviews.yaml", *SMALL, "--device", "rtx4050", "--json", cwd=folder).out)
    assert [note for part in TOLD[:4] for note in planned["notes"] if part in note] == planned["notes"]
    (folder / "mine").mkdir()
    (folder / "mine" / "train.csv").write_text("text;label\nfine;gut\n", encoding="utf-8")
    other = run("plan", "reviews.yaml", *SMALL, "--data", "mine", "--device", "rtx4050", "--json", cwd=folder)
    assert "training would refuse this data" in json.loads(other.out)["notes"][0]
    assert "already exists" in run("init", "reviews.csv", cwd=folder, code=2).err
    again = ("init", "reviews.csv", "--model", "encoder", "-o", "again.yaml", "--json")
    document = json.loads(run(*again, cwd=folder).out)
    assert document["recipe"] == "again.yaml" and sum(document["labels"].values()) == 300
    assert list(document["labels"]) == ["gut", "schlecht", "unentschieden"] and document["labels"]["unentschieden"] == 6
    assert document["source"]["delimiter"] == ";" and document["source"]["text"] == TEXT
    assert (folder / "again.yaml").read_text(encoding="utf-8") == document["text"]


@pytest.mark.slow
def test_two_text_columns_and_numbered_labels(tmp_path: Path) -> None:
    kinds = ("bright", "sombre")
    rows = (f'"{n % 2 + 1}","{kinds[n % 2]} news item {n}","the text of number {n}"\n' for n in range(60))
    (tmp_path / "news.csv").write_text("".join(rows), encoding="utf-8")
    assert "to join them: --text 2,3" in run("init", "news.csv", "-o", "a.yaml", cwd=tmp_path).out
    written = run("init", "news.csv", "--text", "2,3", "--labels", "good,bad", cwd=tmp_path)
    assert "labels: good 30, bad 30" in written.out
    refused = run("init", "news.csv", "--labels", "good", "-o", "b.yaml", cwd=tmp_path, code=2)
    assert "news.csv: --labels must name each number of column '1': 1, 2" in refused.err
    assert not (tmp_path / "b.yaml").exists()
    linear = ("tokenizer={kind: trained, algorithm: words}", "model={kind: linear}", "training={}")
    settings = [word for setting in linear for word in ("--set", setting)]
    run("train", "news.yaml", *settings, cwd=tmp_path)
    run("export", cwd=tmp_path)
    (tmp_path / "news.yaml").unlink()  # the bundle alone reads the file
    for run_name in ("news-001", "news-001/bundle"):
        location = f"artifacts/{run_name}"
        scored = json.loads(run("evaluate", location, "--data", "news.csv", "--json", cwd=tmp_path).out)
        assert {(row["n"], row["accuracy"]) for row in scored["rows"]} == {(60, 1.0)}
        answered = run("predict", location, "--file", "news.csv", "--format", "jsonl", cwd=tmp_path).out
        answers = [json.loads(line) for line in answered.splitlines()]
        assert [answer["label"] for answer in answers[:2]] == ["good", "bad"]
        assert answers[0]["text"] == "bright news item 0 the text of number 0"
    lines = "head,story,mood\nbright news item,a text,good\nsombre news item,,2\n"
    (tmp_path / "named.csv").write_text(lines, encoding="utf-8")
    named = ("evaluate", "--data", "named.csv", "--text", "head,story", "--label", "mood", "--json")
    assert json.loads(run(*named, cwd=tmp_path).out)["rows"][0]["accuracy"] == 1.0
    wrong = run("predict", "--file", "named.csv", "--text", "head,storry", cwd=tmp_path, code=2).err
    assert "named.csv: no column 'storry' (--text); did you mean 'story'?" in wrong
