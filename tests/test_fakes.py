"""The promise to whoever adds a family or a runtime: one folder, and every command works with what it brings.

A family that no file of ours knows (``tests/fakes/averaging_model``) is trained, exported, verified, evaluated, used,
profiled and reported on, also with a runtime that none knows (``tests/fakes/reference_runtime``): by the commands in
processes of their own, and by the functions that they call.
"""

import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgeformer.run import read_run
from tests.cli.run_cli import edgeformer, run_json
from tests.fakes.install import installed

PRAISE = ("good", "fine", "lovely", "friendly", "tasty", "clean", "quick")
BLAME = ("bad", "dull", "rude", "dirty", "bland", "slow", "dear")
THINGS = ("food", "staff", "place", "room", "music", "coffee", "service", "garden", "soup")
TEXTS = ["the soup was tasty and the room clean", "rude staff and a dull place"]

RECIPE = """
name: averaging_reviews
task: classification
target: cpu
data: {parts: {train: [{kind: file, path: reviews.tsv}]}, split: random-split, labels: [negative, positive],
       max_length: 24, cleaning: none}
tokenizer: {kind: trained, algorithm: wordpiece}
model: {kind: averaging, vocab_size: 120, width: 32, inner_width: 48, rounds: 2, max_positions: 160}
training: {epochs: 3, batch_size: 32, precision: fp32, optimizer: {lr: 1e-2}, schedule: {kind: constant}}
"""
GRAPHS = {f"onnx-{precision}{form}" for precision in ("fp32", "int8") for form in ("", "-exit1", "-step")}
BUILT = {"onnx-reference-fp32", "onnx-reference-fp32-exit1"}
if find_spec("nncf") is not None:  # then --int8 also makes what OpenVINO runs
    BUILT |= {"openvino-int8", "openvino-int8-exit1"}
"""What the other runtime makes of the graphs; it is compared with torch when it is verified."""


@pytest.fixture(scope="module", autouse=True)
def _averaging() -> Iterator[None]:
    with installed("averaging_model", "reference_runtime"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipe and data, as a user would have them."""
    folder, choose = tmp_path_factory.mktemp("averaging"), random.Random(0)
    rows = []
    for number in range(600):
        words = (BLAME, PRAISE)[number % 2]
        first, second = choose.sample(THINGS, 2)
        text = f"the {first} was {choose.choice(words)} and the {second} {choose.choice(words)}, no {number}"
        rows.append(f"{number % 2}\t{text}")
    (folder / "reviews.tsv").write_text("label\ttext\n" + "\n".join(rows) + "\n", encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    trained = run_json("train", "recipe.yaml", "--name", "reviews", cwd=folder)
    assert trained["status"] == "finished" and trained["test"]["accuracy"] > 0.95
    exported = run_json("export", "reviews", "--int8", "--exit", "all", "--build", "reference", cwd=folder)
    statuses = {artifact["id"]: (artifact["status"], artifact["reason"]) for artifact in exported["artifacts"]}
    assert statuses == dict.fromkeys(GRAPHS | BUILT, ("built", None))
    for artifact in (artifact for artifact in exported["artifacts"] if artifact["id"] in GRAPHS):
        assert artifact["parity"]["top1_agreement"] > 0.95
        assert artifact["sharing"]["stored_parameters"] == trained["parameters"]
    return folder / "artifacts" / "reviews"


@pytest.mark.slow
def test_plan_and_the_model_card_say_what_it_is(folder: Path, run: Path) -> None:
    plan = run_json("plan", "recipe.yaml", "--device", "rtx4050", cwd=folder)
    assert plan["fits"] and plan["parameters"] == read_run(run).parameters
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert "averaged embeddings of width 32, one block (48) × 2 rounds" in card
    config = json.loads((run / "bundle" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["iterations"]) == ("averaging", 2)


@pytest.mark.slow
def test_verify_evaluate_and_predict_also_with_rows_that_leave_early(folder: Path, run: Path) -> None:
    checks = run_json("verify", "reviews", cwd=folder)["artifacts"]
    assert {row["artifact"]: row["status"] for row in checks} == dict.fromkeys(GRAPHS | BUILT, "verified")
    rows = run_json("evaluate", "reviews", "--artifact", "all", cwd=folder)["rows"]
    assert {row["artifact"] for row in rows} == {"torch", *GRAPHS, *BUILT}
    assert all(row["accuracy"] > 0.9 for row in rows if "exit1" not in row["artifact"])
    for artifact in ("onnx-fp32", "onnx-int8", "onnx-int8-step", "onnx-reference-fp32"):
        predictions = run_json("predict", "reviews", *TEXTS, "--artifact", artifact, cwd=folder)["predictions"]
        assert [row["label"] for row in predictions] == ["positive", "negative"], artifact
    hasty = run_json("predict", "reviews", *TEXTS, "--confidence", "0.0", cwd=folder)["predictions"]
    assert [row["loops"] for row in hasty] == [1, 1]


@pytest.mark.slow
def test_profile_measures_on_this_host_and_estimates_for_a_card(folder: Path, run: Path) -> None:
    artifact = "onnx-reference-fp32"
    options = ("--device", "host", "--artifact", artifact, "--batch", "1", "--seq", "16")
    report = run_json("profile", "reviews", *options, cwd=folder)
    steady = [row for row in report["rows"] if row["phase"] == "steady"]
    assert steady and all(row["latency_ms"]["status"] == "measured" for row in steady)
    for kind in ("json", "md", "html", "csv"):
        assert (run / "reports" / f"host-{artifact}.{kind}").stat().st_size > 0
    options = ("--device", "rtx4050", "--artifact", "onnx-fp32", "--batch", "1")
    outcome = edgeformer("profile", "reviews", *options, "--json", cwd=folder)
    assert outcome.code in (0, 3), outcome.err
    rows = [row for row in json.loads(outcome.out)["rows"] if row["where"] == "device"]
    assert rows and {row["latency_ms"]["status"] for row in rows} <= {"estimated", "measured"}
