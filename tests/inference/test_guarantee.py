"""exits: thresholds into bundle.json, and predict --confidence auto out of it; refusals that say what would do."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ExitGuarantee
from edgeformer.bundle import Bundle, seal
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.inference import exits
from edgeformer.inference.evaluate import EvaluateOptions
from edgeformer.inference.exits import GuaranteeOptions, promise_exits
from edgeformer.inference.predict import Confidence, predict, select_candidates
from edgeformer.run import locate
from edgeformer.runtimes.onnxruntime.decode import StepSession
from tests.cli.in_process import Edgeformer, in_process

OLD = Path(__file__).parents[1] / "old_format" / "classifier-v1" / "bundle"
STEP = "onnx-fp32-step"
ROWS = 400


@pytest.fixture
def edgeformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgeformer:
    return in_process(monkeypatch, capsys)


def doubtful_graphs() -> dict[str, onnx.ModelProto]:
    """Embed, loop and readout of a model whose second loop changes some answers, mostly those that were in doubt.

    A state is two numbers per token; padding has zeros, which stay zeros.
    """
    table = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    table[0] = 0
    numbers = {"table": table, "speed": np.float32(9), "size": np.float32(0.35), "gain": np.float32(1.2)}
    numbers["tokens"] = np.array([1], dtype=np.int64)
    ids, state, logits = ("input_ids", TensorProto.INT64), ("state", TensorProto.FLOAT), ("logits", TensorProto.FLOAT)
    following = ("next_state", TensorProto.FLOAT)

    def model(inputs: list[Any], output: Any, *nodes: tuple[str, list[str], str]) -> onnx.ModelProto:
        made = [helper.make_node(kind, names, [result]) for kind, names, result in nodes]
        made[-1].attribute.extend([helper.make_attribute("keepdims", 0)] if nodes[-1][0] == "ReduceSum" else [])
        used = {name for _, names, _ in nodes for name in names}
        known = [numpy_helper.from_array(np.asarray(numbers[name]), name) for name in numbers if name in used]
        sizes: dict[str, list[Any]] = {"input_ids": ["batch", "seq"], "logits": ["batch", 2]}
        told = [
            helper.make_tensor_value_info(name, kind, sizes.get(name, ["batch", "seq", 2]))
            for name, kind in (*inputs, output)
        ]
        graph = helper.make_graph(made, "tiny", told[:-1], told[-1:], known)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    waves = [("Mul", ["state", "speed"], "fast"), ("Sin", ["fast"], "wave"), ("Mul", ["wave", "size"], "change")]
    added = ("Mul", ["state", "gain"], "loud"), ("ReduceSum", ["loud", "tokens"], "logits")
    return {
        "embed": model([ids], state, ("Gather", ["table", "input_ids"], "state")),
        "loop": model([state], following, *waves, ("Add", ["state", "change"], "next_state")),
        "readout": model([state], logits, *added),
    }


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small bundle with those graphs as its FP32 step artifact."""
    folder = tmp_path_factory.mktemp("bundles") / "device"
    shutil.copytree(OLD, folder)
    manifest = Bundle.open(folder).manifest
    for part, graph in doubtful_graphs().items():
        onnx.save(graph, folder / "onnx" / f"step_{part}.onnx")
    files = {name: sha256_of(folder / name) for name in manifest.files}
    loop = sha256_of(folder / "onnx" / "step_loop.onnx")
    entries = tuple(
        entry.model_copy(update={"sha256": loop}) if entry.id == STEP else entry for entry in manifest.artifacts
    )
    seal(folder, manifest.model_copy(update={"files": files, "artifacts": entries}))
    return folder


@pytest.fixture(scope="module")
def held_out(doubtful: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Files of reviews whose labels are what the model says after all loops, so that leaving can only lose."""
    texts = [row.text for row in synthetic_reviews(ROWS, seed=77)]
    found = predict(locate(str(doubtful), doubtful.parent), texts, STEP)[1]
    lines = [f"{one.as_dict()['label']}\t{text}" for one, text in zip(found, texts, strict=True)]
    folder = tmp_path_factory.mktemp("held")

    def file(rows: int) -> Path:
        path = folder / f"held-{rows}.tsv"
        path.write_text("label\ttext\n" + "\n".join(lines[:rows]) + "\n", encoding="utf-8")
        return path

    return file


@pytest.fixture
def bundle(doubtful: Path, tmp_path: Path) -> Path:
    shutil.copytree(doubtful, tmp_path / "device")
    return tmp_path / "device"


def first_answers(bundle: Path, texts: Sequence[str]) -> list[dict[str, object]]:
    """After one loop, whatever its probability."""
    return [one.as_dict() for one in predict(locate(str(bundle), bundle.parent), texts, confidence=0.0)[1]]


def guarantee_of(bundle: Path, artifact: str = STEP) -> ExitGuarantee | None:
    return Bundle.open(bundle).artifact(artifact).guarantee


def test_a_bundle_alone_gets_thresholds_that_predict_uses(
    bundle: Path, held_out: Callable[[int], Path], edgeformer: Edgeformer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = held_out(ROWS)
    printed = edgeformer(
        "exits", str(bundle), "--data", str(file), "--max-drop", "8%", "--risk", "10%", "--artifact", STEP, "--json"
    )
    found = guarantee_of(bundle)
    assert found is not None and json.loads(printed)["guarantees"][STEP] == found.model_dump(mode="json")
    assert (found.rows, found.split, found.max_drop, found.confidence) == (ROWS, "held-400.tsv", 0.08, 0.9)
    assert found.p_value <= found.level == 0.1 and 0 <= found.drop < 0.08 and found.won == 0
    assert found.full_accuracy == 1.0 and found.accuracy == pytest.approx(1 - found.lost / ROWS)
    assert sum(found.share.values()) == pytest.approx(1) and 1 <= found.mean_loops < 2
    assert found.mean_loops == pytest.approx(sum(int(loop) * share for loop, share in found.share.items()))
    assert found.time.rows == 300 and set(found.time.early_ms) == {"mean", "p50", "p90", "p95"}
    assert found.time.ratio == pytest.approx(found.time.early_ms["mean"] / found.time.full_ms["mean"])
    assert 0 < found.lost < 0.08 * ROWS and 0 < found.share["1"] < 1, "some leave, and not all of them are right"

    texts = [line.split("\t")[1] for line in file.read_text(encoding="utf-8").splitlines()[1:41]]
    answers = predict(locate(str(bundle), bundle.parent), texts, confidence="auto")[1]
    threshold = found.thresholds["1"]
    loops = [one.as_dict()["loops"] for one in answers]
    assert loops == [1 if one["probability"] >= threshold else 2 for one in first_answers(bundle, texts)]  # type: ignore[operator]
    assert set(loops) == {1, 2}
    document = json.loads(edgeformer("predict", str(bundle), texts[0], "--confidence", "auto", "--json"))
    assert document["artifact"] == STEP and document["guarantee"]["thresholds"] == found.thresholds


def slowed(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Plant 4 ms in every call of one of a step session's ways; all else runs as it is."""
    real = getattr(StepSession, method)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.004)
        return real(*arguments)

    monkeypatch.setattr(StepSession, method, slow)


def test_early_exit_that_is_slower_than_all_loops_is_not_recommended(
    bundle: Path, held_out: Callable[[int], Path], edgeformer: Edgeformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held against the full graph too, which goes through all loops in one call."""
    slowed(monkeypatch, "_leave")
    command = (
        "exits",
        str(bundle),
        "--data",
        str(held_out(ROWS)),
        "--max-drop",
        "8%",
        "--risk",
        "10%",
        "--artifact",
        STEP,
    )
    document = json.loads(edgeformer(*command, "--json"))
    found = document["guarantees"][STEP]["time"]
    assert (document["recommended"], document["pays"]) == (None, {STEP: False})
    assert found["full_graph"] == "onnx-fp32" and found["quickest"] in ("onnx-fp32", STEP)
    assert 1 < found["ratio_low"] <= found["quickest_ratio"] <= found["ratio_high"]
    printed = edgeformer(*command).replace("\n", " ")
    assert "early exit is slower here; use " in printed and "not recommended on this machine" in printed
    assert "--confidence auto" not in printed


def test_early_exit_that_is_quicker_is_recommended_with_its_time(
    bundle: Path, held_out: Callable[[int], Path], edgeformer: Edgeformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a full graph it is held against all loops of the step artifact."""
    opened = Bundle.open(bundle)
    opened.record(opened.artifact("onnx-fp32").model_copy(update={"status": "rejected", "reason": "for the test"}))
    slowed(monkeypatch, "_states")
    command = (
        "exits",
        str(bundle),
        "--data",
        str(held_out(ROWS)),
        "--max-drop",
        "8%",
        "--risk",
        "10%",
        "--artifact",
        STEP,
    )
    document = json.loads(edgeformer(*command, "--json"))
    found = document["guarantees"][STEP]["time"]
    assert (document["recommended"], document["pays"]) == (STEP, {STEP: True})
    assert (found["full_graph"], found["full_graph_ms"], found["quickest"]) == (None, {}, STEP)
    assert found["quickest_ratio"] == found["ratio"] < 1
    printed = edgeformer(*command).replace("\n", " ")
    assert "early exit is faster" in printed and f"--confidence auto --artifact {STEP}" in printed


def test_what_cannot_be_told_is_not_said_to_pay(promised: Path) -> None:
    found = guarantee_of(promised)
    assert found is not None
    between = found.time.model_copy(update={"ratio_low": 0.9, "ratio_high": 1.1})
    assert between.pays is None and "cannot be told from 300 texts" in between.sentence()
    older = found.time.model_copy(update={"quickest_ratio": None, "ratio_low": None, "ratio_high": None})
    assert older.pays is None and "run edgeformer exits again" in older.sentence()


def test_timing_ends_after_a_while(
    bundle: Path, held_out: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "_TIMING_LIMIT_S", 0.0)
    rows = EvaluateOptions(STEP, data=held_out(ROWS))
    found = promise_exits(locate(str(bundle), bundle.parent), GuaranteeOptions(rows, 0.08, 0.1))[STEP]
    assert found.time.rows == 64


def test_in_the_bundle_itself(
    bundle: Path, held_out: Callable[[int], Path], edgeformer: Edgeformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle)
    rows = ("--data", str(held_out(ROWS)), "--max-drop", "8%", "--risk", "10%", "--artifact", STEP)
    edgeformer("exits", ".", *rows)
    assert guarantee_of(bundle) is not None
    assert not [path.name for path in (*bundle.glob("*.lock"), *bundle.parent.glob(".*"))]


def test_rows_that_chose_the_model_are_no_independent_proof(promised: Path) -> None:
    """Of the promised bundle they are a file's."""
    found = Bundle.open(promised).artifact(STEP).guarantee
    assert found is not None and found.reused is False and "independent" not in found.sentence()
    again = found.model_copy(update={"reused": True})
    assert "the same rows chose the epoch or judged the artifact, so this is no independent proof" in again.sentence()
    assert not _reused(EvaluateOptions(split="test")) and not _reused(
        EvaluateOptions(split="validation", data=promised)
    )


def test_predict_says_what_it_promises(
    bundle: Path, held_out: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = EvaluateOptions(STEP, data=held_out(ROWS))
    promise_exits(locate(str(bundle), bundle.parent), GuaranteeOptions(rows, 0.08, 0.1))
    run = in_process(monkeypatch, capsys)
    monkeypatch.setattr("edgeformer.cli.console.say", lambda text, **_: said.append(text))
    said: list[str] = []
    opened = Bundle.open(bundle)
    exits = opened.artifact(STEP).guarantee
    assert exits is not None
    for low, high, verdict in (
        (1.5, 1.6, "early exit is slower here; use "),
        (0.9, 1.1, "whether early exit is faster cannot be told"),
        (0.5, 0.6, None),
    ):
        time = exits.time.model_copy(update={"ratio_low": low, "ratio_high": high})
        entry = opened.artifact(STEP).model_copy(update={"guarantee": exits.model_copy(update={"time": time})})
        opened = opened.record(entry)
        said.clear()
        run("predict", str(bundle), "a fine film", "--confidence", "auto")
        text = " ".join(said)
        assert ("one text takes" in text) == (verdict is not None) and (verdict or "") in text
    assert len(said) == 1 and "accuracy falls by at most 8 points with 90 % confidence" in said[0]
    said.clear()
    run("predict", str(bundle), "a fine film", "--confidence", "0.9")
    assert said == []


@pytest.fixture(scope="module")
def promised(doubtful: Path, held_out: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a guarantee. Read it."""
    folder = Path(shutil.copytree(doubtful, tmp_path_factory.mktemp("promised") / "device"))
    promise_exits(
        locate(str(folder), folder.parent), GuaranteeOptions(EvaluateOptions(STEP, data=held_out(ROWS)), 0.08, 0.1)
    )
    return folder


def test_texts_of_an_int8_artifact_are_answered_one_by_one_as_they_were_when_it_was_promised(
    promised: Path, tmp_path: Path
) -> None:
    """Its activations are scaled by the whole call: beside others, or padded, a text gets another answer."""
    folder = Path(shutil.copytree(promised, tmp_path / "device"))
    opened, narrow = Bundle.open(folder), "onnx-int8-step"
    opened.record(opened.artifact(narrow).model_copy(update={"guarantee": guarantee_of(folder)}))
    location = locate(str(folder), tmp_path)
    texts = [row.text for row in synthetic_reviews(12, seed=3)]

    def answers(*texts: str, confidence: Confidence) -> list[dict[str, object]]:
        return [one.as_dict() for one in predict(location, texts, narrow, confidence)[1]]

    alone = [answers(text, confidence="auto")[0] for text in texts]
    assert answers(*texts, confidence="auto") == alone
    thresholds = guarantee_of(folder, narrow)
    assert thresholds is not None
    together = answers(*texts, confidence=thresholds.thresholds["1"])
    assert together != alone, "nothing is promised of it, so that it may take them together"


@pytest.fixture
def asked(promised: Path, tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A file of texts, one of them empty, and what each gets by itself: the label, and after which loop."""
    texts = [row.text for row in synthetic_reviews(90, seed=5)]
    texts[40] = ""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    alone = predict(locate(str(promised), promised.parent), texts, confidence="auto")[1]
    return file, [answer.as_dict() for answer in alone]


def same_answers(found: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> None:
    """Labels and loops as of single texts, in their order."""
    assert len(found) == len(alone)
    for one, other in zip(found, alone, strict=True):
        assert {name: one.get(name) for name in ("label", "loops", "error")} == {
            name: other.get(name) for name in ("label", "loops", "error")
        }
    assert {one.get("loops") for one in found} == {None, 1, 2}, "the empty one, some that left, some that did not"


def test_a_file_is_answered_by_the_promised_thresholds(
    promised: Path, asked: tuple[Path, list[dict[str, Any]]], edgeformer: Edgeformer, tmp_path: Path
) -> None:
    """In batches, in every format, as text by text; and every document says what is promised."""
    file, alone = asked
    command = ["predict", str(promised), "--file", str(file), "--confidence", "auto"]
    found = guarantee_of(promised)
    assert found is not None
    document = json.loads(edgeformer(*command, "--json", code=3))
    assert document["artifact"] == STEP and document["guarantee"] == found.model_dump(mode="json")
    same_answers(document["predictions"], alone)
    lines = edgeformer(*command, "--format", "jsonl", code=3).splitlines()
    same_answers([json.loads(line) for line in lines], alone)
    out = tmp_path / "labels.csv"
    told = json.loads(edgeformer(*command, "--output", str(out), "--json", code=3))
    assert (told["rows"], told["errors"], told["artifact"]) == (90, 1, STEP)
    assert told["guarantee"] == found.model_dump(mode="json")
    with out.open(encoding="utf-8", newline="") as stream:
        rows = [{**row, "loops": int(row["loops"]) if row["loops"] else None} for row in csv.DictReader(stream)]
    same_answers([{name: value or None for name, value in row.items()} for row in rows], alone)
    table = edgeformer(*command, code=3)
    assert "loops" in table and table.count("\n") >= 90


def test_a_file_too_is_told_what_is_promised_and_only_then(
    promised: Path, asked: tuple[Path, list[dict[str, Any]]], edgeformer: Edgeformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("edgeformer.cli.console.say", lambda text, **_: said.append(text))
    command = ["predict", str(promised), "--file", str(asked[0]), "--format", "jsonl"]
    edgeformer(*command, "--confidence", "auto", code=3)
    assert sum("accuracy falls by at most 8 points with 90 % confidence" in text for text in said) == 1
    said.clear()
    document = json.loads(edgeformer(*command[:-2], "--json", "--confidence", "0.9", code=3))
    assert "guarantee" not in document and not any("accuracy falls" in text for text in said)


def test_a_file_is_not_begun_where_nothing_was_promised(
    bundle: Path, asked: tuple[Path, list[dict[str, Any]]], edgeformer: Edgeformer, tmp_path: Path
) -> None:
    command = ["predict", str(bundle), "--file", str(asked[0]), "--confidence", "auto"]
    out = tmp_path / "labels.csv"
    assert "edgeformer exits" in edgeformer(*command, "--output", str(out), code=2)
    assert not out.exists()


def test_too_few_rows_are_refused_with_how_many_would_do(
    bundle: Path, held_out: Callable[[int], Path], edgeformer: Edgeformer
) -> None:
    before = (bundle / "bundle.json").read_bytes()
    said = edgeformer("exits", str(bundle), "--data", str(held_out(100)), "--max-drop", "1%", code=2)
    assert "100 held-out rows are too few" in said
    needed = int(re.findall(r"at least ([\d,]+)", said)[0].replace(",", ""))
    assert 400 < needed < 600
    assert (bundle / "bundle.json").read_bytes() == before


def test_exits_that_cost_too_much_are_refused(
    bundle: Path, held_out: Callable[[int], Path], tmp_path: Path, edgeformer: Edgeformer
) -> None:
    """Rows whose first answer is always another: enough of them, and still nothing to promise."""
    lines = held_out(ROWS).read_text(encoding="utf-8").splitlines()[1:]
    texts = [line.split("\t")[1] for line in lines]
    first = [one["label"] for one in first_answers(bundle, texts)]
    differ = [line for line, label in zip(lines, first, strict=True) if line.split("\t")[0] != label]
    file = tmp_path / "odd.tsv"
    file.write_text("label\ttext\n" + "\n".join(differ * (200 // len(differ) + 1)) + "\n", encoding="utf-8")
    said = edgeformer("exits", str(bundle), "--data", str(file), "--max-drop", "5%", "--artifact", STEP, code=2)
    assert "none could leave" in said and re.search(r"some [\d,]+ rows like them would do", said)
    assert guarantee_of(bundle) is None


def test_held_out_rows_in_another_encoding(
    bundle: Path, held_out: Callable[[int], Path], tmp_path: Path, edgeformer: Edgeformer
) -> None:
    file = tmp_path / "held-cp1252.tsv"
    file.write_bytes((held_out(100).read_text(encoding="utf-8") + "positive\tschön und größer\n").encode("cp1252"))
    command = ("exits", str(bundle), "--data", str(file), "--max-drop", "1%")
    assert "--encoding cp1252 (evaluate, exits, init, predict)" in edgeformer(*command, code=2)
    assert "101 held-out rows are too few" in edgeformer(*command, "--encoding", "cp1252", code=2)


def test_nothing_is_written_where_one_of_the_artifacts_can_promise_nothing(
    bundle: Path, held_out: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, edgeformer: Edgeformer
) -> None:
    opened = Bundle.open(bundle)
    other = opened.artifact(STEP).model_copy(update={"id": "onnx-fp32-step-too"})
    seal(bundle, opened.manifest.model_copy(update={"artifacts": (*opened.artifacts, other)}))
    steps = [one.id for one in Bundle.open(bundle).built("step")]
    assert steps[0] == STEP and steps[-1] == other.id
    before = (bundle / "bundle.json").read_bytes()
    promise = exits.promise
    tried: list[Any] = []

    def promise_at_first(*rows: Any) -> Any:
        tried.append(rows)
        return promise(*rows) if len(tried) == 1 else None

    monkeypatch.setattr(exits, "promise", promise_at_first)
    rows = ("--data", str(held_out(ROWS)), "--max-drop", "8%", "--risk", "10%")
    assert "wherever a text leaves" in edgeformer("exits", str(bundle), *rows, code=2)
    assert len(tried) == 2 and (bundle / "bundle.json").read_bytes() == before
    monkeypatch.setattr(exits, "promise", promise)
    both = [one for one in select_candidates(locate(str(bundle), bundle.parent), "all") if one.id in (STEP, other.id)]
    monkeypatch.setattr(exits, "select_candidates", lambda *_: both)
    edgeformer("exits", str(bundle), *rows)
    assert guarantee_of(bundle) is not None and guarantee_of(bundle, other.id) is not None


def test_without_a_promise_auto_is_refused(bundle: Path, edgeformer: Edgeformer) -> None:
    said = edgeformer("predict", str(bundle), "a film", "--confidence", "auto", code=2)
    assert "edgeformer exits" in said and "--confidence 0.95" in said
    said = edgeformer("predict", str(bundle), "a film", "--confidence", "auto", "--artifact", "onnx-fp32", code=2)
    assert "all texts go through all of it" in said
    for wrong in ("often", "1.5", "nan"):
        assert "neither a probability" in edgeformer("predict", str(bundle), "a film", "--confidence", wrong, code=2)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--max-drop", "0%"), "above 0 %"),
        (("--risk", "100%"), "below 100 %"),
        (("--max-drop", "0.01"), "per cent"),
        (("--split", "train"), "not trained on"),
        (("--artifact", "onnx-fp32"), "one graph"),
        (("--runtime", "all"), "one of them answers; name it"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], why: str, bundle: Path, edgeformer: Edgeformer) -> None:
    assert why in edgeformer("exits", str(bundle), *arguments, code=2)


def test_a_language_model_is_refused(edgeformer: Edgeformer) -> None:
    language = OLD.parents[1] / "language-v1" / "bundle"
    assert "cannot be promised" in edgeformer("exits", str(language), code=2)


def test_what_changed_meanwhile_is_not_overwritten(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    Bundle.open(bundle).record(opened.artifact(STEP).model_copy(update={"reason": "changed"}))
    with pytest.raises(ArtifactError, match="changed while it was worked on"):
        opened.record(opened.artifact(STEP))
    with pytest.raises(InputError):
        opened.artifact("nothing")
