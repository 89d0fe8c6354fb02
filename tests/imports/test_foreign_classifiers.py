"""Import of foreign text classifiers: their answers are those of the tokenizer and ONNX Runtime alone."""

import json
import shutil
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.bundle import Bundle
from edgeformer.data.probes import PROBE_TEXTS
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.run import Location
from edgeformer.tasks.task import Unanswered
from tests.cli.run_cli import edgeformer
from tests.export.graphs import save
from tests.export.hf_models import make_model

LABELS = ("bad", "good")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
POSITIONS = 64
TEXTS = ["good", "a warm and witty film with [SEP] in it", "the plot is dull " * 40, "Crème brûlée 🙂", "word " * 15]
FORMS: dict[str, dict[str, Any]] = {
    "as exported": {}, "int32": {"kind": TensorProto.INT32}, "another output": {"output": "output_0"},
    "one row of 32 tokens": {"shape": (1, 32)}, "one row": {"shape": (1, "sequence")},
    "32 tokens, int32": {"shape": ("batch", 32), "kind": TensorProto.INT32},
    "no types": {"inputs": INPUTS[:2]}, "no mask": {"inputs": INPUTS[:1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT classifier of 64 positions as ONNX, with all three inputs; its tokenizer truncates at 24."""
    import torch

    folder = tmp_path_factory.mktemp("bert")
    model = make_model(folder, "bert", LABELS, attn_implementation="eager")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(24)
    tokenizer.save(str(folder / "tokenizer.json"))

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits

    example = torch.ones((2, 8), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {name: {0: "batch", 1: "sequence"} for name in INPUTS}
        torch.onnx.export(
            Logits(), (example, example, 0 * example), str(folder / "net.onnx"), input_names=[*INPUTS],
            output_names=["logits"], dynamic_axes={**axes, "logits": {0: "batch"}}, dynamo=False,
        )  # fmt: skip
    return folder


def changed(
    folder: Path, target: Path, *, kind: int = TensorProto.INT64, shape: tuple[Any, ...] = ("batch", "sequence"),
    inputs: tuple[str, ...] = INPUTS, output: str = "logits",
) -> Path:  # fmt: skip
    """Save the graph with inputs of another type or shape, fewer inputs (the others constant), or another output."""
    graph = onnx.load(str(folder / "net.onnx"))
    nodes, body = [], graph.graph
    for name in INPUTS:
        for node in body.node:
            node.input[:] = [f"{name}_read" if each == name else each for each in node.input]
        if name in inputs:
            nodes.append(helper.make_node("Cast", [name], [f"{name}_read"], to=TensorProto.INT64))
        else:
            one = numpy_helper.from_array(np.array([int(name == "attention_mask")]), f"{name}_value")
            nodes.append(helper.make_node("Shape", ["input_ids"], [f"{name}_shape"]))
            nodes.append(helper.make_node("ConstantOfShape", [f"{name}_shape"], [f"{name}_read"], value=one))
    kept = list(body.node)
    del body.node[:]
    body.node.extend([*nodes, *kept, helper.make_node("Identity", ["logits"], ["renamed"])])
    for port in (body.input, body.output):
        del port[:]
    body.input.extend(helper.make_tensor_value_info(name, kind, shape) for name in inputs)
    if output != "logits":
        body.node[-1].output[0] = output
    body.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [shape[0], len(LABELS)]))
    target.mkdir(exist_ok=True, parents=True)
    shutil.copyfile(folder / "tokenizer.json", target / "tokenizer.json")
    return save(target, graph)


def imported(graph: Path, **options: Any) -> Bundle:
    folder = graph.parent / "bundle"
    options = {"tokenizer": graph.parent / "tokenizer.json", "labels": LABELS, **options}
    import_onnx(graph, folder, OnnxImportOptions(**options))
    return Bundle.open(folder)


def plain(graph: Path, text: str, length: int, pad_to: int | None = None) -> np.ndarray[Any, Any]:
    """Probabilities by the tokenizer and ONNX Runtime alone."""
    tokenizer = Tokenizer.from_file(str(graph.parent / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.no_padding()
    if pad_to:
        tokenizer.enable_padding(length=pad_to)
    encoding, session = tokenizer.encode(text), ort.InferenceSession(str(graph))
    rows = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    feed = {port.name: np.array([rows[port.name]], types[port.type]) for port in session.get_inputs()}
    logits = session.run(None, feed)[0][0].astype(np.float64)
    return np.exp(logits) / np.exp(logits).sum()  # type: ignore[no-any-return]


def answers(bundle: Bundle, texts: list[str], artifact: str | None = None) -> np.ndarray[Any, Any]:
    _, results = predict(Location(None, bundle.folder), texts, artifact)
    return np.array([list(result.probabilities.values()) for result in results])  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_onnxruntime_alone(bert: Path, tmp_path: Path, form: str) -> None:
    graph = changed(bert, tmp_path / "theirs", **FORMS[form])
    bundle = imported(graph)
    proof, pad_to = bundle.manifest.proof, 32 if "32 tokens" in form else None
    assert isinstance(proof, ImportProof) and proof.reason is None and proof.library == f"onnxruntime {ort.__version__}"
    assert proof.texts >= len([text for text in PROBE_TEXTS if text.strip()]) - 1 and proof.largest_difference < 1e-4
    assert bundle.manifest.max_length == 24, "the tokenizer's"
    expected = np.array([plain(graph, text, 24, pad_to) for text in TEXTS])
    assert np.abs(answers(bundle, TEXTS) - expected).max() < 1e-5
    assert np.ptp(expected[:, 0]) > 0.01, "they differ from text to text"
    assert verify(bundle).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int32", "one row of 32 tokens", "another output", "no mask"])
def test_every_form_is_converted(bert: Path, tmp_path: Path, form: str) -> None:
    bundle = imported(changed(bert, tmp_path / "theirs", **FORMS[form]))
    output = export(bundle.folder, ExportOptions(fp16=True, int8=True, keep_going=True))
    assert {artifact.id: artifact.reason for artifact in output.artifacts} == {
        "onnx-fp32": None, "onnx-int8": None, "onnx-fp16": None,
    }  # fmt: skip
    opened, expected = Bundle.open(bundle.folder), answers(bundle, TEXTS, "onnx-fp32")
    for name, tolerance in (("onnx-fp16", 0.01), ("onnx-int8", 0.1)):
        assert np.abs(answers(opened, TEXTS, name) - expected).max() < tolerance
    assert verify(opened).exit_code == 0


class TestLength:
    def test_a_stated_length_that_the_graph_runs_wins(self, bert: Path, tmp_path: Path) -> None:
        graph = changed(bert, tmp_path / "theirs")
        bundle = imported(graph, max_length=50)
        expected = np.array([plain(graph, text, 50) for text in TEXTS])
        assert bundle.manifest.max_length == 50 and np.abs(answers(bundle, TEXTS) - expected).max() < 1e-5
        with pytest.raises(InputError, match="--max-length 65: the graph runs texts of at most 64 tokens; give"):
            imported(graph, max_length=65, replace=True)

    def test_without_a_statement_it_is_the_longest_that_runs(self, bert: Path, tmp_path: Path) -> None:
        graph = changed(bert, tmp_path / "theirs")
        tokenizer = Tokenizer.from_file(str(graph.parent / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.save(str(graph.parent / "tokenizer.json"))
        bundle = imported(graph)
        assert bundle.manifest.max_length == POSITIONS
        assert any("cut to 64 tokens, because the graph fails on longer ones" in note for note in bundle.manifest.notes)
        config = {"model_max_length": 20, "pad_token": {"content": "[PAD]"}}
        (graph.parent / "tokenizer_config.json").write_text(json.dumps(config))
        assert imported(graph, replace=True).manifest.max_length == 20
        (graph.parent / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
        assert imported(graph, replace=True).manifest.max_length == POSITIONS

    def test_a_fixed_shape_limits_it(self, bert: Path, tmp_path: Path) -> None:
        graph = changed(bert, tmp_path / "theirs", shape=(1, 16))
        assert imported(graph).manifest.max_length == 16
        with pytest.raises(InputError, match="at most 16 tokens; give --max-length 16"):
            imported(graph, max_length=24, replace=True)


def coupled(bert: Path, target: Path, **form: Any) -> Path:
    """A graph that adds the largest logit of a call to the first class of all its texts."""
    graph = changed(bert, target, **form)
    model = onnx.load(str(graph))
    model.graph.node[-1].CopyFrom(helper.make_node("ReduceMax", ["logits"], ["largest"], keepdims=1))
    model.graph.node.append(helper.make_node("Mul", ["largest", "first"], ["part"]))
    model.graph.node.append(helper.make_node("Add", ["logits", "part"], ["answer"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([[0.5, 0.0]], np.float32), "first"))
    model.graph.output[0].name = "answer"
    return save(graph.parent, model)


class TestProof:
    def test_texts_that_affect_each_other_run_alone(self, bert: Path, tmp_path: Path) -> None:
        graph = coupled(bert, tmp_path / "theirs")
        bundle = imported(graph)
        assert bundle.manifest.proof is not None and bundle.manifest.proof.reason is None
        expected = np.array([plain(graph, text, 24) for text in TEXTS])
        assert np.abs(answers(bundle, TEXTS) - expected).max() < 1e-5
        assert any(note.startswith("calls: one text per call") for note in bundle.manifest.notes)

    def test_other_answers_are_refused_or_marked(self, bert: Path, tmp_path: Path) -> None:
        """Its two texts per call affect each other, and no call can have one."""
        graph = coupled(bert, tmp_path / "theirs", shape=(2, "sequence"))
        with pytest.raises(InputError, match=r"the answer to '.*'.* differs by .* onnxruntime .*--unproven"):
            imported(graph)
        assert not (tmp_path / "theirs/bundle").exists()
        proof = imported(graph, unproven=True).manifest.proof
        assert proof is not None and "differs by" in str(proof.reason) and (proof.largest_difference or 0) > 1e-4

    def test_what_cannot_be_called(self, bert: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"input 'input_ids' float32.*int64 or int32.*optimum-cli export onnx"):
            imported(changed(bert, tmp_path / "floats", kind=TensorProto.FLOAT))
        graph = changed(bert, tmp_path / "theirs")
        with pytest.raises(InputError, match="the graph has 2 classes; give 2 names"):
            imported(graph, labels=("a", "b", "c"))
        model = onnx.load(str(graph))
        model.graph.node[-1].CopyFrom(helper.make_node("Softmax", ["logits"], ["probabilities"]))
        model.graph.output[0].name = "probabilities"
        with pytest.raises(InputError, match="`probabilities` holds probabilities instead of logits"):
            imported(save(graph.parent, model))


class TestOneBadText:
    """A graph that fails on a token: the other texts of the call get their answers."""

    @pytest.fixture
    def bundle(self, bert: Path, tmp_path: Path) -> Path:
        graph = changed(bert, tmp_path / "theirs", inputs=INPUTS[:2])
        model, tokenizer = onnx.load(str(graph)), Tokenizer.from_file(str(graph.parent / "tokenizer.json"))
        tokenizer.add_tokens(["boom"])
        tokenizer.save(str(graph.parent / "tokenizer.json"))
        # A table that lacks the token's row, read through an operator that hides the table from the outline.
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        gather = next(node for node in model.graph.node if node.op_type == "Gather" and "word" in node.input[0])
        zero = numpy_helper.from_array(np.array(0.0, np.float32), "zero")
        model.graph.node.insert(0, helper.make_node("Add", [gather.input[0], "zero"], ["hidden_table"]))
        model.graph.initializer.append(zero)
        assert stored[gather.input[0]].dims[0] == tokenizer.get_vocab_size() - 1
        gather.input[0] = "hidden_table"
        (tmp_path / "rows.tsv").write_text("text\tlabel\n" + "a good film\tgood\na dull plot\tbad\n" * 5)
        imported(save(graph.parent, model), max_length=40, data=tmp_path / "rows.tsv")
        return tmp_path / "theirs" / "bundle"

    def test_predict_and_files(self, bundle: Path, tmp_path: Path) -> None:
        opened = Bundle.open(bundle)
        texts = ["good film", "boom goes the plot", "dull", "a long text " * 30, ""]
        _, results = predict(Location(None, bundle), texts)
        assert [isinstance(result, Unanswered) for result in results] == [False, True, False, False, True]
        assert "outside the model's vocabulary" in str(getattr(results[1], "error", None))
        alone = answers(opened, [texts[0], texts[2], texts[3]])
        kept = np.array([list(results[place].probabilities.values()) for place in (0, 2, 3)])  # type: ignore[union-attr]
        assert np.abs(alone - kept).max() < 1e-6
        with pytest.raises(InputError, match="outside the model's vocabulary"):
            predict(Location(None, bundle), ["boom", "boom boom"])
        (tmp_path / "texts.txt").write_text("".join(f"text number {n}\n" for n in range(3000)) + "boom\nlast\n")
        files = ("--file", "texts.txt", "--output", "out.jsonl", "--columns", "none")
        outcome = edgeformer("predict", str(bundle), *files, cwd=tmp_path)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert outcome.code in (0, 3) and len(rows) == 3002, outcome.err
        assert [number for number, row in enumerate(rows) if row.get("error")] == [3000]

    def test_served(self, bundle: Path) -> None:
        from edgeformer.serve.queue import BatchingQueue, open_served_predictor
        from edgeformer.serve.service import Metrics, ServeLimits

        with (
            open_served_predictor(Bundle.open(bundle), None) as model,
            closing(BatchingQueue(model, ServeLimits(), Metrics())) as queue,
        ):
            results = queue.submit(["boom"]).result(60), queue.submit(["good", "boom boom", "boom"]).result(60)
        unanswered = [[isinstance(answer, Unanswered) for answer in result] for result in results]
        assert unanswered == [[True], [False, True, True]]
