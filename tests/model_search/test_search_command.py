"""The command search: trains, exports, profiles, recommends, continues, and draws its page."""

import csv
import json
import random
from pathlib import Path

import pytest

from tests.cli.run_cli import edgeformer

WORDS = {"billing": "invoice refund payment card", "login": "password account locked reset"}


def write_tickets(path: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(400):
            label = generator.choice([*WORDS])
            words = generator.choices(["please", "help", "my", "the", "with", "again", "not", "today"], k=8)
            writer.writerow([" ".join([*words, generator.choice(WORDS[label].split()), str(number)]), label])


@pytest.mark.slow
def test_a_linear_model_is_found_and_kept(tmp_path: Path) -> None:
    write_tickets(tmp_path / "tickets.csv")
    command = ("search", "tickets.csv", "--device", "raspberry-pi-5", "--models", "linear", "--json")
    result = json.loads(edgeformer(*command, "--min-score", "0.8", cwd=tmp_path).out)
    candidates = [candidate["artifact"] for candidate in result["search"]["candidates"]]
    assert "linear/onnx-fp32" in candidates and candidates[result["search"]["pick"]].startswith("linear/")
    (test,) = result["tests"]
    assert test["rows"] == 40 and test["score"] > 0.9 and test["low"] < test["score"]
    states = {model["name"]: (model["status"], model["reason"]) for model in result["models"]}
    assert states["linear"] == ("measured", None) and states["small"] == ("skipped", "not among --models")
    page = (tmp_path / "artifacts" / "tickets-search" / "search.html").read_text(encoding="utf-8")
    assert "<svg" in page and " UTC</p>" in page and "On 40 test rows its accuracy is" in page

    run = tmp_path / "artifacts" / "tickets-linear" / "run.json"
    trained = run.stat().st_mtime_ns
    refused = edgeformer(*command, "--max-size", "1KiB", cwd=tmp_path)
    assert refused.code == 3 and run.stat().st_mtime_ns == trained, "other limits are answered without training"
    assert "is over 1.0 KiB" in json.loads(refused.out)["search"]["candidates"][0]["reason"]

    rows = "".join(f"{number} good,a\n{number} bad,b\n" for number in range(99))
    (tmp_path / "tickets.csv").write_text("text,label\n" + rows, encoding="utf-8")
    other = edgeformer(*command, cwd=tmp_path)
    assert other.code == 2 and "choose another --name" in other.err


@pytest.mark.slow
def test_unusable_requests_are_refused(tmp_path: Path) -> None:
    write_tickets(tmp_path / "tickets.csv")
    sentence = "Ada B-PER\nlived O\nin O\nUlm{} B-LOC\n\n"
    (tmp_path / "names.conll").write_text("".join(sentence.format(number) for number in range(40)), encoding="utf-8")
    for arguments, message in (
        (("nowhere.csv",), "nowhere.csv"),
        (("tickets.csv", "--no-source", "--models", "linaer"), "there is no linaer; available: linear, small, light"),
        (("tickets.csv", "--no-source", "--models", "folded"), "those that need a pretrained encoder need --source"),
        (("tickets.csv", "--tokenizer", "tickets.csv"), "are of a recipe"),
        (("quickstart", "--text", "x"), "a recipe names these itself"),
        (("crt_mini",), "crt_mini: is data of the task language-modeling, and search trains classifiers"),
        (("names.conll", "--no-source", "--models", "linear"), "there is no linear; available: small, light"),
        (("tickets.csv", "--budget", "2"), "--budget"),
        (("tickets.csv", "--device", "nokia"), "nokia"),
        (("tickets.csv", "--name", "../x"), "use letters, digits"),
    ):
        refused = edgeformer("search", *arguments, cwd=tmp_path)
        assert refused.code == 2 and message in " ".join(refused.err.split()), arguments
    assert not (tmp_path / "artifacts").exists()
