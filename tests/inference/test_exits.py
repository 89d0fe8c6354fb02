"""``exits`` writes guaranteed thresholds into bundle.json, and ``predict --confidence auto`` uses them."""

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

from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ExitGuarantee
from edgeformer.bundle import Bundle, seal
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.inference import exits
from edgeformer.inference.evaluate import EvaluateOptions
from edgeformer.inference.exits import GuaranteeOptions, calibrate_exits
from edgeformer.inference.predict import Confidence, predict, select_candidates
from edgeformer.report.sentences import exit_guarantee
from edgeformer.run import Location, locate
from edgeformer.runtimes.decoder import StepSession
from tests.cli.in_process import Edgeformer
from tests.runtimes.tiny_bundle import parsed

OLD = Path(__file__).parents[1] / "old_format" / "classifier-v1" / "bundle"
STEP = "onnx-fp32-step"
ROWS = 400
GOAL = ("--max-drop", "8%", "--risk", "10%")
HeldOut = Callable[[int], Path]


def step_graphs() -> dict[str, onnx.ModelProto]:
    """Embed, loop and readout of a model whose second loop changes some answers, mostly those of low confidence.

    A state is two numbers per token; padding has zeros, which stay zeros.
    """
    table = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    table[0] = 0
    state, speed, size, gain = "float[batch, seq, 2] state", np.float32(9), np.float32(0.35), np.float32(1.2)
    wave = "fast = Mul (state, speed) wave = Sin (fast) change = Mul (wave, size) next_state = Add (state, change)"
    logits = "scaled = Mul (state, gain) logits = ReduceSum <keepdims = 0> (scaled, tokens)"
    embed = f"tiny (int64[batch, seq] input_ids) => ({state}) {{ state = Gather (table, input_ids) }}"
    return {
        "embed": parsed(embed, table=table),
        "loop": parsed(f"tiny ({state}) => (float[batch, seq, 2] next_state) {{ {wave} }}", speed=speed, size=size),
        "readout": parsed(f"tiny ({state}) => (float[batch, 2] logits) {{ {logits} }}", gain=gain, tokens=[1]),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old classifier's bundle with ``step_graphs`` as its FP32 step artifact. Read only."""
    folder = tmp_path_factory.mktemp("bundles") / "device"
    shutil.copytree(OLD, folder)
    manifest = Bundle.open(folder).manifest
    for part, graph in step_graphs().items():
        onnx.save(graph, folder / "onnx" / f"step_{part}.onnx")
    files = {name: sha256_of(folder / name) for name in manifest.files}
    loop = sha256_of(folder / "onnx" / "step_loop.onnx")
    entries = tuple(
        entry.model_copy(update={"sha256": loop}) if entry.id == STEP else entry for entry in manifest.artifacts
    )
    seal(folder, manifest.model_copy(update={"files": files, "artifacts": entries}))
    return folder


@pytest.fixture(scope="module")
def held_out(original: Path, tmp_path_factory: pytest.TempPathFactory) -> HeldOut:
    """Files of reviews labelled with the model's answers after all loops, so that early exit can only lose."""
    texts = [row.text for row in synthetic_reviews(ROWS, seed=77)]
    answers = predict(at(original), texts, STEP)[1]
    lines = [f"{answer.as_dict()['label']}\t{text}" for answer, text in zip(answers, texts, strict=True)]
    folder = tmp_path_factory.mktemp("held")

    def file(rows: int) -> Path:
        path = folder / f"held-{rows}.tsv"
        path.write_text("label\ttext\n" + "\n".join(lines[:rows]) + "\n", encoding="utf-8")
        return path

    return file


@pytest.fixture(scope="module")
def promised(original: Path, held_out: HeldOut, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a guarantee. Read only."""
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("promised") / "device"))
    calibrate_exits(at(folder), GuaranteeOptions(EvaluateOptions(STEP, data=held_out(ROWS)), 0.08, 0.1))
    return folder


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    """A copy without a guarantee."""
    return Path(shutil.copytree(original, tmp_path / "device"))


def at(folder: Path) -> Location:
    return locate(str(folder), folder.parent)


def first_answers(bundle: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Answers after the first loop."""
    return [answer.as_dict() for answer in predict(at(bundle), texts, confidence=0.0)[1]]


def guarantee_of(bundle: Path, artifact: str = STEP) -> ExitGuarantee:
    return Bundle.open(bundle).artifact(artifact).guarantee


def test_a_report_says_where_texts_leave(promised: Path, tmp_path: Path, edgeformer: Edgeformer) -> None:
    folder = shutil.copytree(promised, tmp_path / "device")
    options = ("--device", "raspberry-pi-5", "--no-host", "--artifact", STEP, "--json")
    (note,) = [text for text in json.loads(edgeformer("profile", str(folder), *options))["notes"] if "exit" in text]
    assert note == f"{STEP} with early exit: {exit_guarantee(guarantee_of(promised))}"
    assert " after loop 1, " in note and " after loop 2)" in note


def test_exits_writes_the_thresholds_that_predict_uses(bundle: Path, held_out: HeldOut, edgeformer: Edgeformer) -> None:
    file = held_out(ROWS)
    printed = edgeformer("exits", str(bundle), "--data", str(file), *GOAL, "--artifact", STEP, "--json")
    guarantee = guarantee_of(bundle)
    assert json.loads(printed)["guarantees"][STEP] == guarantee.model_dump(mode="json")
    settings = (guarantee.rows, guarantee.split, guarantee.max_drop, guarantee.confidence)
    assert settings == (ROWS, "held-400.tsv", 0.08, 0.9)
    assert guarantee.p_value <= guarantee.level == 0.1 and guarantee.won == 0 <= guarantee.lost < 0.08 * guarantee.rows
    assert guarantee.full_accuracy == 1.0 and guarantee.accuracy == pytest.approx(1 - guarantee.lost / ROWS)
    assert sum(guarantee.share.values()) == pytest.approx(1) and 1 <= guarantee.mean_loops < 2
    assert guarantee.mean_loops == pytest.approx(sum(int(loop) * share for loop, share in guarantee.share.items()))
    assert guarantee.time.rows == 300 and set(guarantee.time.early_ms) == {"mean", "p50", "p90", "p95"}
    assert guarantee.time.ratio == pytest.approx(guarantee.time.early_ms["mean"] / guarantee.time.full_ms["mean"])
    assert guarantee.lost > 0 and 0 < guarantee.share["1"] < 1
    texts = [line.split("\t")[1] for line in file.read_text(encoding="utf-8").splitlines()[1:41]]
    loops = [answer.as_dict()["loops"] for answer in predict(at(bundle), texts, confidence="auto")[1]]
    threshold = guarantee.thresholds["1"]
    assert loops == [1 if answer["probability"] >= threshold else 2 for answer in first_answers(bundle, texts)]
    assert set(loops) == {1, 2}
    document = json.loads(edgeformer("predict", str(bundle), texts[0], "--confidence", "auto", "--json"))
    assert document["artifact"] == STEP and document["guarantee"]["thresholds"] == guarantee.thresholds


@pytest.mark.slow
@pytest.mark.parametrize("early_exit", [True, False])
def test_early_exit_is_recommended_where_it_is_faster(bundle, held_out, edgeformer, monkeypatch, early_exit):
    """Slower than the full graph; or faster than all loops of the step artifact, where there is no full graph."""
    run = StepSession.run

    def slow(session: StepSession, inputs: Any) -> Any:
        if (session._early is not None) == early_exit:
            time.sleep(0.004)
        return run(session, inputs)

    monkeypatch.setattr(StepSession, "run", slow)
    if not early_exit:
        opened = Bundle.open(bundle)
        opened.record(opened.artifact("onnx-fp32").model_copy(update={"status": "rejected", "reason": "for the test"}))
    command = ("exits", str(bundle), "--data", str(held_out(ROWS)), *GOAL, "--artifact", STEP)
    document = json.loads(edgeformer(*command, "--json"))
    timing, printed = document["guarantees"][STEP]["time"], edgeformer(*command).replace("\n", " ")
    if early_exit:
        assert (document["recommended"], document["pays"]) == (None, {STEP: False})
        assert timing["full_graph"] == "onnx-fp32" and timing["quickest"] in ("onnx-fp32", STEP)
        assert 1 < timing["ratio_low"] <= timing["quickest_ratio"] <= timing["ratio_high"]
        assert "early exit is slower here; use " in printed and "not recommended on this machine" in printed
        assert "--confidence auto" not in printed
    else:
        assert (document["recommended"], document["pays"]) == (STEP, {STEP: True})
        assert (timing["full_graph"], timing["full_graph_ms"], timing["quickest"]) == (None, {}, STEP)
        assert timing["quickest_ratio"] == timing["ratio"] < 1
        assert "early exit is faster" in printed and f"--confidence auto --artifact {STEP}" in printed


def test_predict_prints_the_guarantee(promised, tmp_path, edgeformer, monkeypatch):
    messages: list[str] = []  # on stderr
    monkeypatch.setattr("edgeformer.cli.options.say", lambda text, **_: messages.append(text))
    bundle = Path(shutil.copytree(promised, tmp_path / "device"))
    guarantee = guarantee_of(bundle)
    for low, high, verdict in (
        (1.5, 1.6, "early exit is slower here; use "),
        (0.9, 1.1, "are too few to decide whether early exit is faster"),
        (0.5, 0.6, None),
    ):
        timing = guarantee.time.model_copy(update={"ratio_low": low, "ratio_high": high})
        opened = Bundle.open(bundle)
        update = {"guarantee": guarantee.model_copy(update={"time": timing})}
        opened.record(opened.artifact(STEP).model_copy(update=update))
        messages.clear()
        edgeformer("predict", str(bundle), "a fine film", "--confidence", "auto")
        printed = " ".join(messages)
        assert ("one text takes" in printed) == (verdict is not None) and (verdict or "") in printed
    assert len(messages) == 1 and "accuracy drops by at most 8.0% (absolute) with 90% confidence" in messages[0]
    messages.clear()
    edgeformer("predict", str(bundle), "a fine film", "--confidence", "0.9")
    assert messages == []


def test_int8_with_a_guarantee_answers_texts_one_by_one(promised: Path, tmp_path: Path) -> None:
    """INT8 scales activations per call, so in a batch a text would get another answer."""
    folder = Path(shutil.copytree(promised, tmp_path / "device"))
    opened, int8 = Bundle.open(folder), "onnx-int8-step"
    opened.record(opened.artifact(int8).model_copy(update={"guarantee": guarantee_of(folder)}))
    texts = [row.text for row in synthetic_reviews(12, seed=3)]

    def answers(*texts: str, confidence: Confidence) -> list[dict[str, object]]:
        return [answer.as_dict() for answer in predict(at(folder), texts, int8, confidence)[1]]

    single = [answers(text, confidence="auto")[0] for text in texts]
    assert answers(*texts, confidence="auto") == single
    batched = answers(*texts, confidence=guarantee_of(folder, int8).thresholds["1"])
    assert batched != single, "without a guarantee the texts are batched"


def test_auto_without_a_guarantee_is_refused(bundle: Path, edgeformer: Edgeformer, tmp_path: Path) -> None:
    command = ("predict", str(bundle), "--confidence", "auto")
    message = edgeformer(*command, "a film", code=2)
    assert "edgeformer exits" in message and "--confidence 0.95" in message
    assert "has no thresholds yet" in edgeformer(*command, "a film", "--artifact", "onnx-fp32", code=2)
    for value in ("often", "1.5", "nan"):
        assert "give a probability" in edgeformer("predict", str(bundle), "a film", "--confidence", value, code=2)
    (tmp_path / "in.txt").write_text("a film\n", encoding="utf-8")
    out = tmp_path / "labels.csv"
    assert "edgeformer exits" in edgeformer(*command, "--file", str(tmp_path / "in.txt"), "--output", str(out), code=2)
    assert not out.exists()


def test_too_few_rows_are_refused_with_the_number_needed(bundle, held_out, edgeformer):
    manifest = (bundle / "bundle.json").read_bytes()
    message = edgeformer("exits", str(bundle), "--data", str(held_out(100)), "--max-drop", "1%", code=2)
    assert "100 held-out rows are too few" in message
    needed = int(re.findall(r"at least ([\d,]+)", message)[0].replace(",", ""))
    assert 400 < needed < 600
    assert (bundle / "bundle.json").read_bytes() == manifest


def test_exits_with_too_large_a_drop_are_refused(bundle, held_out, tmp_path, edgeformer):
    """Enough rows, but on each of them the first answer is wrong."""
    lines = held_out(ROWS).read_text(encoding="utf-8").splitlines()[1:]
    answers = first_answers(bundle, [line.split("\t")[1] for line in lines])
    wrong = [line for line, answer in zip(lines, answers, strict=True) if line.split("\t")[0] != answer["label"]]
    file = tmp_path / "odd.tsv"
    file.write_text("label\ttext\n" + "\n".join(wrong * (200 // len(wrong) + 1)) + "\n", encoding="utf-8")
    message = edgeformer("exits", str(bundle), "--data", str(file), "--max-drop", "5%", "--artifact", STEP, code=2)
    assert "no threshold of" in message and re.search(r"about [\d,]+ such rows", message)
    assert Bundle.open(bundle).artifact(STEP).guarantee is None


def test_nothing_is_written_if_one_artifact_fails(bundle, held_out, monkeypatch, edgeformer):
    opened = Bundle.open(bundle)
    second = opened.artifact(STEP).model_copy(update={"id": "onnx-fp32-step-too"})
    seal(bundle, opened.manifest.model_copy(update={"artifacts": (*opened.artifacts, second)}))
    manifest = (bundle / "bundle.json").read_bytes()
    promise = exits.choose_thresholds
    calls: list[Any] = []

    def promise_first(*arguments: Any) -> Any:
        calls.append(arguments)
        return promise(*arguments) if len(calls) == 1 else None

    monkeypatch.setattr(exits, "choose_thresholds", promise_first)
    command = ("exits", str(bundle), "--data", str(held_out(ROWS)), *GOAL)
    assert "at any threshold" in edgeformer(*command, code=2)
    assert len(calls) == 2 and (bundle / "bundle.json").read_bytes() == manifest
    monkeypatch.setattr(exits, "choose_thresholds", promise)
    both = [candidate for candidate in select_candidates(at(bundle), "all") if candidate.id in (STEP, second.id)]
    monkeypatch.setattr(exits, "select_candidates", lambda *_: both)
    edgeformer(*command)
    assert guarantee_of(bundle).rows == guarantee_of(bundle, second.id).rows == ROWS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-drop", "0%"), "above 0%"),
        (("--risk", "100%"), "below 100%"),
        (("--max-drop", "0.01"), "is not a percentage"),
        (("--split", "train"), "not trained on"),
        (("--artifact", "onnx-fp32"), "one graph"),
        (("--runtime", "all"), "this command uses one runtime; give its name"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, bundle: Path, edgeformer: Edgeformer) -> None:
    assert message in edgeformer("exits", str(bundle), *arguments, code=2)
    language = OLD.parents[1] / "language-v1" / "bundle"
    assert "there is no guarantee for perplexity" in edgeformer("exits", str(language), code=2)
