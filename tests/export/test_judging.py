"""What export says of each file that it wrote, on graphs of a few numbers: run by ONNX Runtime, counted by hand.

The model has three loops and exits after the first and the last. A state is a row of a table times a vector, once per
loop; logits are a state times an exit's head, to which the first exit adds a bias.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, Parity, Precision, Sharing
from edgeformer.artifacts.scores import Score
from edgeformer.export.fp16 import FP16_MAX
from edgeformer.export.graphs import Written
from edgeformer.export.judging import Judge, describe_converted
from edgeformer.export.variants import Variant
from edgeformer.tasks.metric import measure_parity

LOOPS = 3
RNG = np.random.default_rng(3)
TABLE = RNG.normal(size=(6, 4)).astype(np.float32)
VECTOR = np.array([1.5, -0.5, 2.0, 1.0], dtype=np.float32)
HEADS = {loop: RNG.normal(size=(4, 3)).astype(np.float32) for loop in (1, 3)}
BIAS = np.array([0.1, -0.2, 0.3], dtype=np.float32)
IDS = np.array([[1, 2, 3, 0, 0, 0], [5, 4, 3, 2, 1, 0], [2, 2, 2, 5, 0, 0]], dtype=np.int64)
MASK = (IDS > 0).astype(np.int64)
STATES = {loop: (TABLE[IDS] * VECTOR**loop).astype(np.float32) for loop in (1, 2, 3)}
REFERENCES = {
    loop: (STATES[loop].reshape(-1, 4) @ HEADS[loop] + (BIAS if loop == 1 else 0)).astype(np.float32) for loop in (1, 3)
}
NEEDED = {1: 24 + 4 + 12 + 3, 3: 24 + 4 + 12}
PARAMETERS = 24 + 4 + 12 + 12 + 3
READ = "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask"
TOKENS, LOGITS = "float[batch, sequence, 4]", "float[batch, sequence, 3] logits"
STORED = {"table": TABLE, "vector": VECTOR, "head1": HEADS[1], "head3": HEADS[3], "bias": BIAS}
LOOPED = "state_loop0 = Gather(table, input_ids)  " + "  ".join(
    f"state_loop{loop + 1} = Mul(state_loop{loop}, vector)" for loop in range(LOOPS)
)
FIRST_EXIT = "product = MatMul(state, head1)  logits = Add(product, bias)"
# Of windows of six tokens the first three are read at once: it answers for the third and the three after it.
SECOND_HALF = [2, 3, 4, 5, 8, 9, 10, 11, 14, 15, 16, 17]
SCORES = {loop: (Score(n=18, loss=loop + 0.5), Score(n=9, loss=10.0 * loop + 5)) for loop in (1, 3)}
STEPS = {part: f"onnx/{part}.onnx" for part in ("embed", "loop", "readout", "readout_exit1")}


def write(path: Path, takes: str, gives: str, steps: str, **changes: np.ndarray) -> None:
    """An ONNX file of operators in ONNX's own text form, with those stored numbers that they take."""
    graph = onnx.parser.parse_graph(f"tiny ({takes}) => ({gives}) {{ {steps} }}")
    needed = {name for node in graph.node for name in node.input}
    stored = {name: array for name, array in (STORED | changes).items() if name in needed}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def write_decode(path: Path, table: np.ndarray = TABLE) -> None:
    """The whole model, which keeps the tokens that it has seen."""
    takes = "int64[batch, sequence] input_ids, int64[batch, sequence] position_ids"
    steps = f"{LOOPED}  logits = MatMul(state_loop3, head3)  seen = Cast <to = {TensorProto.FLOAT}> (input_ids)"
    steps += "  present_0_key = Concat <axis = 1> (past_key_values_0_key, seen)"
    takes += ", float[batch, past] past_key_values_0_key"
    write(path, takes, f"{LOGITS}, float[batch, all] present_0_key", steps, table=table)
    path.write_bytes(path.read_bytes().replace(b"_0_key", b".0.key"))  # the text form has no dots in names


class Subject:
    """A reference model and its task that record their calls. The loss of the n-th score is n."""

    def __init__(self, inputs: Sequence[str] = ("input_ids", "attention_mask"), states: int = LOOPS) -> None:
        arrays = {"input_ids": IDS, "attention_mask": MASK}
        self.inputs = {name: arrays[name] for name in inputs}
        self.logits, self.exits = REFERENCES, (1, 3)
        self.golden = self.answers = self.data = None
        self.states = {loop: STATES[loop] for loop in range(1, states + 1)}
        self.needed, self.parameters = dict(NEEDED), PARAMETERS
        self.task = self
        self.finds: str | None = None
        self.rejection_hint = ""
        self.scored: list[tuple[int, np.ndarray, Any]] = []
        self.compared: list[Any] = []
        self.validated: list[tuple[Path, int]] = []

    def golden_score(self, exit_: int, logits: Any, answers: Any, rows: np.ndarray | None, data: Any) -> Score:
        self.scored.append((exit_, logits, rows))
        return Score(n=len(logits), loss=float(len(self.scored)))

    def golden_outputs(self, golden: Any, run: Callable[..., Any], max_rows: int | None) -> Any:
        return run(self.inputs)["logits"]

    def parity(self, outputs: Any, expected: Any, precision: Precision, provider: str) -> Parity:
        return measure_parity(outputs, expected, precision, provider)

    def lost(self, result: Score, expected: Score, precision: str, *, trimmed: bool) -> str | None:
        self.compared.append((result.loss, expected.loss, precision, trimmed))
        return self.finds

    def validation(self, run: Callable[..., Any], exit_: int) -> Score:
        session: Any = run.__self__  # type: ignore[attr-defined]
        self.validated.append((session.path, exit_))
        assert set(session.run(self.inputs)) == {"logits"}
        return Score(n=9, loss=10.0 * exit_)


def judge(bundle: Path, subject: Subject, variant: Variant | None = None, **changes: Any) -> Judge:
    arguments: Any = {"validation": subject.validation, "max_activation": 1.0, "baseline": {}, **changes}
    return Judge(folder=bundle, reference=subject, variant=variant or Variant("fp32"), **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    onnx_ = folder / "onnx"
    once = LOOPED[: LOOPED.index("  state_loop2")]
    write(onnx_ / "model.onnx", READ, LOGITS, f"{LOOPED}  logits = MatMul(state_loop3, head3)")
    write(onnx_ / "model_exit1.onnx", READ, LOGITS, f"{once}  {FIRST_EXIT.replace('state', 'state_loop1')}")
    embed = "state = Gather(table, input_ids)"
    write(onnx_ / "embed.onnx", "int64[batch, sequence] input_ids", f"{TOKENS} state", embed)
    write(onnx_ / "loop.onnx", f"{TOKENS} state", f"{TOKENS} next_state", "next_state = Mul(state, vector)")
    write(onnx_ / "readout.onnx", f"{TOKENS} state", LOGITS, "logits = MatMul(state, head3)")
    write(onnx_ / "readout_exit1.onnx", f"{TOKENS} state", LOGITS, FIRST_EXIT)
    write_decode(onnx_ / "decode.onnx")
    states = ", ".join(f"{TOKENS} state_loop{loop}" for loop in (1, 2, 3))
    write(onnx_ / ".states.onnx", READ, states, LOOPED, table=TABLE * np.float32(1.5))
    return folder


def written(**changes: Any) -> Written:
    """Sizes are no file's, so that it shows where they come from."""
    exits = {3: "onnx/model.onnx", 1: "onnx/model_exit1.onnx"}
    files = {"exits": exits, "steps": {}, "decode": None, "states": "onnx/.states.onnx"}
    names = ("model", "model_exit1", "decode", "embed", "loop", "readout", "readout_exit1")
    sizes = {f"onnx/{name}.onnx": 1000 * 2**number for number, name in enumerate(names)}
    arguments: Any = {**files, "size_bytes": sizes, **changes}
    return Written(**arguments)


def judge_one(judge: Judge, kind: str) -> ArtifactManifest:
    files = {"full": {"exits": {3: "onnx/model.onnx"}}, "decode": {"exits": {}, "decode": "onnx/decode.onnx"}}
    (artifact,) = judge.judge_all(written(**files[kind]))
    return artifact


def test_full_graph_entry(bundle: Path) -> None:
    subject = Subject(states=1)
    result = judge_one(judge(bundle, subject), "full")
    path = bundle / "onnx" / "model.onnx"
    assert (result.id, result.file, result.format, result.precision) == ("onnx-fp32", "onnx/model.onnx", "onnx", "fp32")
    assert (result.role, result.exit, result.parts, result.trimmed) == ("full", None, {}, False)
    assert (result.vocabulary, result.drift, result.weights_file) == (None, None, None)
    assert (result.status, result.reason) == ("built", None)
    assert (result.size_bytes, result.sha256, result.opset) == (1000, sha256_of(path), 20)
    assert result.inputs == dict.fromkeys(("input_ids", "attention_mask"), "int64[batch, sequence]")
    assert result.outputs == {"logits": "float32[batch, sequence, 3]"}
    assert (result.ops_in_fp32, result.quantized) == ({}, {})
    assert result.parts_bytes == {"embeddings": 96, "block": 16, "heads": 48, "other": 1000 - 160}
    sharing = Sharing(unique_parameters=40, stored_parameters=40, constant_elements=0, weight_bytes=160)
    assert result.sharing == sharing
    assert result.built_with == {name: version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime")}
    parity = result.parity
    assert parity is not None and parity.max_abs_error is not None and parity.max_abs_error < 1e-5
    assert (parity.provider, parity.n, parity.top1_agreement) == ("CPUExecutionProvider", IDS.size, 1.0)
    assert (result.score, result.validation) == (Score(n=IDS.size, loss=1.0), Score(n=9, loss=30.0))
    ((exit_, logits, rows),) = subject.scored
    assert exit_ == 3 and rows is None
    np.testing.assert_allclose(logits, REFERENCES[3], rtol=1e-5, atol=1e-6)
    assert subject.validated == [(path, 3)]


def test_weights_stored_twice_are_rejected(bundle: Path) -> None:
    subject = Subject()
    subject.needed[3] = 39
    result = judge_one(judge(bundle, subject), "full")
    assert (result.status, result.reason) == ("rejected", "stores 40 parameters for a model of 39")
    subject.finds = "accuracy 0.5 below FP32's"
    fp16 = judge(bundle, subject, Variant("fp16"), baseline={3: (Score(n=1, loss=1.0), None)})
    assert judge_one(fp16, "full").reason == "accuracy 0.5 below FP32's"


def test_judge_all_yields_every_artifact(bundle: Path) -> None:
    all_ = list(judge(bundle, Subject()).judge_all(written(steps=STEPS, decode="onnx/decode.onnx")))
    ids = ["onnx-fp32", "onnx-fp32-exit1", "onnx-fp32-step", "onnx-fp32-decode"]
    assert [result.id for result in all_] == ids
    assert [result.drift is not None for result in all_] == [True, False, False, False], "the full graph's"
    drift = all_[0].drift
    assert drift is not None and drift.tolerance == 1e-4 and drift.first_beyond == 1
    assert [(row.loop, row.rms_error) for row in drift.loops] == [(loop, pytest.approx(0.5)) for loop in (1, 2, 3)]
    subset = list(judge(bundle, Subject()).judge_all(written()))
    assert [result.id for result in subset] == ids[:2]


def test_decode_graph_is_rejected_for_its_first_problem(bundle: Path, tmp_path: Path) -> None:
    subject = Subject(("input_ids",), states=1)
    subject.finds = "perplexity 9% above FP32's"
    result = judge_one(judge(bundle, subject, Variant("int8", trimmed=True)), "decode")
    assert (result.status, result.reason) == ("rejected", subject.finds)
    assert result.score == Score(n=12, loss=1.0), "its own, not the reference's"
    assert subject.compared == [(1.0, 2.0, "int8", True)]
    assert [(exit_, rows.tolist()) for exit_, _, rows in subject.scored] == [(3, SECOND_HALF)] * 2
    assert np.array_equal(subject.scored[1][1], REFERENCES[3][SECOND_HALF])
    write_decode(tmp_path / "onnx" / "decode.onnx", TABLE * np.float32(2))
    result = judge_one(judge(tmp_path, subject, Variant("fp16"), max_activation=1e9), "decode")
    assert "relative error" in str(result.reason) and len(subject.compared) == 1, "the first reason"
    write_decode(tmp_path / "onnx" / "decode.onnx", TABLE * np.float32("nan"))
    for precision in ("fp32", "int8"):
        result = judge_one(judge(tmp_path, subject, Variant(precision)), "decode")  # type: ignore[arg-type]
        assert "not finite" in str(result.reason) and result.score is None


def compare(
    subject: Subject, precision: Any = "fp16", *, exit_: int = 3, error: float = 0.0, validate: bool = True,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compare the reference's own logits, off by an error; the validation score's loss is ten times the exit."""
    changes = {"validation": lambda run, exit_: Score(n=9, loss=10.0 * exit_), "baseline": dict(SCORES), **changes}
    variant = Variant(precision, changes.pop("trimmed", False))
    outputs = REFERENCES[exit_] + np.float32(error)
    run: Any = (lambda inputs: inputs) if validate else None
    return judge(Path(), subject, variant, **changes).compare(exit_, outputs, run, "CPU")


def test_fp32_sets_the_baseline_once() -> None:
    subject, baseline = Subject(), dict[int, Any]()
    result = compare(subject, "fp32", baseline=baseline)
    assert (result["reason"], result["score"]) == (None, Score(n=18, loss=1.0))
    assert result["validation"] == Score(n=9, loss=30.0)
    assert (result["parity"].provider, result["parity"].tolerance_kind) == ("CPU", "absolute")
    assert baseline == {3: (result["score"], result["validation"])} and subject.compared == []
    compare(subject, "fp32", baseline=baseline, validation=None)
    assert baseline == {3: (result["score"], result["validation"])}, "a step artifact does not replace it"


@pytest.mark.parametrize(
    ("arguments", "compared"),
    [
        ({"exit_": 1}, (10.0, 15.0, "fp16", False)),
        ({"exit_": 3}, (30.0, 35.0, "fp16", False)),
        ({"precision": "fp32", "trimmed": True}, (30.0, 35.0, "fp32", True)),
        ({"precision": "int8", "validate": False}, (1.0, 3.5, "int8", False)),
        ({"precision": "int8", "validation": None}, (1.0, 3.5, "int8", False)),
        ({"baseline": {3: (Score(n=2, loss=2.5), None)}}, (1.0, 2.5, "fp16", False)),
        ({"baseline": {1: SCORES[1]}}, None),
        ({"error": 1.0}, None),
    ],
    ids=["exit", "full", "trimmed", "step", "no data", "FP32 without data", "no FP32 score", "out of tolerance"],
)
def test_scores_are_compared_with_the_baseline_of_the_same_rows(arguments: dict[str, Any], compared: Any) -> None:
    subject = Subject()
    subject.finds = "accuracy 0.5 below FP32's"
    result = compare(subject, **arguments)
    assert subject.compared == ([compared] if compared is not None else [])
    if compared is not None:
        assert result["reason"] == subject.finds


@pytest.mark.parametrize(
    ("precision", "max_activation", "overflows"),
    [
        ("fp16", FP16_MAX, False), ("fp16", np.nextafter(FP16_MAX, 1e9), True), ("fp16", float("inf"), True),
        ("fp32", float("inf"), False), ("int8", 1e9, False),
    ],
)  # fmt: skip
def test_an_activation_beyond_fp16_rejects_fp16(precision: str, max_activation: float, overflows: bool) -> None:
    reason = compare(Subject(), precision, max_activation=max_activation)["reason"]
    assert ("above the FP16 maximum of 65504 (overflow)" in str(reason)) is (reason is not None) is overflows


def test_outputs_out_of_tolerance_are_rejected_with_the_references_hint() -> None:
    subject = Subject()
    subject.rejection_hint = "; import real inputs"
    result = compare(subject, error=1.0)
    assert "relative error" in result["reason"] and result["reason"].endswith(subject.rejection_hint)
    result = compare(subject, error=float("nan"))
    assert set(result) == {"parity", "reason"} and "not finite" in result["reason"]


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_an_infinite_loss_on_validation_data_rejects(loss: float) -> None:
    subject, baseline = Subject(), dict[int, Any]()
    broken = Score.model_construct(n=9, loss=loss)
    for precision in ("fp32", "fp16"):
        result = compare(subject, precision, baseline=baseline, validation=lambda run, exit_: broken)
        assert result["reason"] == "its loss on the validation text is not finite"
        assert set(result) == {"parity", "score", "reason"}
    assert baseline == {} and subject.compared == []


@pytest.mark.parametrize(("unique", "is_rejected"), [(40, False), (20, True)])
def test_converted_graph_that_stores_too_much_is_rejected(bundle: Path, unique: int, is_rejected: bool) -> None:
    reason = describe_converted(bundle / "onnx" / "model.onnx", 1000, unique).get("reason")
    assert reason == (f"stores 40 numbers, and the imported graph has {unique}" if is_rejected else None)
