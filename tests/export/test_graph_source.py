"""Export of imported graphs: each precision is compared with the FP32 graph; older artifacts stay."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.bundle import Bundle
from edgeformer.export import graph_source
from edgeformer.export.export import export as export_bundle
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx
from edgeformer.inference.verify import golden_score, verify
from edgeformer.runtimes import cannot_run
from tests.cli.run_cli import edgeformer, run_json
from tests.export import graphs
from tests.export.graphs import save, save_beside
from tests.runtimes.tiny_bundle import CLASSES, VOCABULARY, classifier_graph

ROWS = "text\tlabel\n" + "".join(f"word{number % 7} word{number % 3}\tl{number % CLASSES}\n" for number in range(60))
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["h"])
"""A product that can be quantised, in front of one that cannot."""
EQUAL = "two labels are equal, or one is empty"


def export(folder: Path, **options: object) -> dict[str, tuple[str, str | None]]:
    """Artifact → status and reason."""
    output = export_bundle(folder, ExportOptions(**options))  # type: ignore[arg-type]
    return {artifact.id: (artifact.status, artifact.reason) for artifact in output.artifacts}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    import_onnx(save(tmp_path / "theirs", graphs.embedding(rows=64, width=16)), tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.slow
def test_every_precision_is_built(bundle: Path) -> None:
    old = sha256_of(bundle / "onnx/model.onnx")
    built = export(bundle, fp16=True, int8=True, int4=True)
    assert built == dict.fromkeys(("onnx-fp32", "onnx-fp16", "onnx-int8", "onnx-int4"), ("built", None))
    opened = Bundle.open(bundle)
    full, eighth, narrow, half = opened.artifacts
    assert narrow.file == "onnx/model_q4.onnx" and narrow.parity is not None and narrow.parity.rms_error is not None
    assert sha256_of(bundle / "onnx/model.onnx") == old
    assert full.sharing and half.sharing and eighth.sharing
    assert half.sharing.weight_bytes < 0.6 * full.sharing.weight_bytes
    assert eighth.sharing.weight_bytes < 0.4 * full.sharing.weight_bytes
    assert half.sharing.stored_parameters == full.sharing.unique_parameters
    assert eighth.sharing.stored_parameters == full.sharing.unique_parameters  # scales and zero points do not count
    assert half.parity and half.parity.tolerance_kind == "rms" and eighth.parity and eighth.parity.tolerance == 0.2
    assert eighth.quantized == {"MatMulInteger": 1, "Gather": 1}
    assert eighth.score is not None and 0.99 < eighth.score.cosine < 1  # type: ignore[attr-defined]
    assert verify(opened).exit_code == 0
    with opened.session(half) as session:
        outputs = opened.task.golden_outputs(opened.golden(), session.run, None)
    assert golden_score(opened, half, outputs) == half.score, "what verify --write scores on a target"


def odd(*nodes: onnx.NodeProto, weight: onnx.TensorProto, shape: list[int | str | None]) -> onnx.ModelProto:
    """x [batch, 32] → a product with w → the ``nodes`` with v → y."""
    inputs = [graphs.value("x", graphs.FLOAT, ["batch", 32])]
    stored = [graphs.weights("w", 32, 32, scale=0.2), weight]
    return graphs.model([PRODUCT, *nodes], inputs, [graphs.value("y", graphs.FLOAT, shape)], stored)


def branch() -> onnx.ModelProto:
    """A matrix that a product reads, and one inside of an ``If``."""
    then, other = (
        helper.make_graph(graphs.nodes(node), "branch", [], [graphs.value(node[0], graphs.FLOAT, None)])
        for node in ("a = MatMul(h, v)", "b = Identity(h)")
    )
    choice = helper.make_node("If", ["way"], ["c"], then_branch=then, else_branch=other)
    condition, product = "top = ReduceMax <keepdims = 0> (x)  way = Greater(top, limit)", "y = MatMul(c, v)"
    nodes = [*graphs.nodes(condition), choice, *graphs.nodes(product)]
    graph = odd(*nodes, weight=graphs.weights("v", 32, 32, scale=0.2), shape=["batch", 32])
    graph.graph.initializer.append(graphs.constant("limit", np.array(2.2, np.float32)))
    return graph


SPOILED = np.where(np.arange(512).reshape(32, 16) == 5, np.nan, 0.1).astype(np.float32)
TURN, SECOND = helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["h", "v"], ["y"])
LEFT, SUM = helper.make_node("MatMul", ["v", "t"], ["y"]), graphs.nodes("i = MatMul(h, v)  y = Add(i, v)")
MASKED = graphs.nodes("g = MatMul(h, v)  n = IsNaN(g)  y = Where(n, h, h)")
ODD = {
    "left": odd(TURN, LEFT, weight=graphs.weights("v", 16, 32), shape=[16, 1]),
    "3-D": odd(SECOND, weight=graphs.weights("v", 3, 32, 16), shape=[3, 1, 16]),
    "1-D": odd(SECOND, weight=graphs.weights("v", 32), shape=["batch"]),
    "NaN": odd(*MASKED, weight=graphs.constant("v", SPOILED[:, [5] * 32]), shape=["batch", 32]),
    "two roles": odd(*SUM, weight=graphs.weights("v", 32, 32, scale=0.2), shape=[32, 32]),
    "If": branch(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_weight_that_must_stay_fp32_blocks_no_other(tmp_path: Path, name: str) -> None:
    shapes: dict[str, tuple[int | str, ...]] = {"x": (32, 32)} if name == "two roles" else {"x": (1, 32)}
    import_onnx(save(tmp_path / "theirs", ODD[name]), tmp_path / "bundle", OnnxImportOptions(shapes=shapes))
    built = export(tmp_path / "bundle", fp16=True, int8=True)
    assert built == dict.fromkeys(("onnx-fp32", "onnx-int8", "onnx-fp16"), ("built", None))
    opened = Bundle.open(tmp_path / "bundle")
    assert opened.artifact("onnx-int8").quantized == {"MatMulInteger": 1}
    (note,) = (note for note in opened.manifest.notes if note.startswith("onnx-int8: weights that stay FP32"))
    assert re.search(r": v of MatMul ", note) and "finite matrices" in note
    assert verify(opened).exit_code == 0


@pytest.mark.parametrize(
    ("attributes", "inputs", "products"),
    [
        ({"alpha": 0.5, "beta": 2.0}, ["h", "v", "b"], 2), ({"alpha": 3.0, "transB": 1}, ["h", "v"], 2),
        ({"transA": 1, "beta": 0.5}, ["t", "v", "b"], 1),
    ],
)  # fmt: skip
def test_a_gemm_with_factors_is_quantized(tmp_path, attributes, inputs, products):
    nodes = [*([TURN] if "t" in inputs else []), helper.make_node("Gemm", inputs, ["y"], **attributes)]
    graph = odd(*nodes, weight=graphs.weights("v", 32, 32, scale=0.2), shape=["batch", 32])
    graph.graph.initializer.extend([graphs.weights("b", 32)] if "b" in inputs else [])
    bundle = tmp_path / "bundle"
    import_onnx(save(tmp_path / "theirs", graph), bundle)
    built = export(bundle, int8=True, int4=True)
    assert built == dict.fromkeys(("onnx-fp32", "onnx-int8", "onnx-int4"), ("built", None))
    assert Bundle.open(bundle).artifact("onnx-int8").quantized == {"MatMulInteger": products}
    x = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    files = [str(bundle / str(artifact.file)) for artifact in Bundle.open(bundle).artifacts[:2]]
    results = [ort.InferenceSession(file).run(None, {"x": x})[0] for file in files]
    assert np.abs(results[1] - results[0]).max() < 0.05 * np.abs(results[0]).max()


def test_a_rejected_precision_names_those_that_were_not_made(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EdgeformerError("INT8: no")

    monkeypatch.setattr(graph_source, "quantize_int8", refuse)
    built = export(bundle, int8=True, fp16=True)
    reason = "not made, because onnx-int8 was rejected; make it with --keep-going"
    stopped = {"onnx-int8": ("rejected", "INT8: no"), "onnx-fp16": ("unavailable", reason)}
    assert built == {"onnx-fp32": ("built", None), **stopped}
    monkeypatch.undo()
    assert export(bundle, fp16=True)["onnx-fp16"] == ("built", None)


@pytest.mark.slow
def test_older_artifacts_and_reports_stay(bundle: Path) -> None:
    export(bundle, fp16=True)
    (bundle / "reports").mkdir()
    (bundle / "reports/host.json").write_text("{}")
    half = sha256_of(bundle / "onnx/model_fp16.onnx")
    assert list(export(bundle, int8=True)) == ["onnx-fp32", "onnx-int8", "onnx-fp16"]
    assert sha256_of(bundle / "onnx/model_fp16.onnx") == half and (bundle / "reports/host.json").is_file()
    notes = Bundle.open(bundle).manifest.notes
    assert [note.partition(":")[0] for note in notes] == ["golden inputs", "FP16", "INT8"]
    assert verify(Bundle.open(bundle)).exit_code == 0


@pytest.mark.slow
def test_weights_beside_the_graph_are_never_overwritten(tmp_path: Path) -> None:
    """One graph has a weights file of its own name, the other one with the name that its FP16 graph would have."""
    for name, status in (("net.weights", "built"), ("model_fp16.onnx_data", "rejected")):
        folder = tmp_path / name
        import_onnx(save_beside(tmp_path / "theirs", graphs.embedding(rows=64, width=16), name), folder)
        old = sha256_of(folder / "onnx" / name)
        outcome, reason = export(folder, fp16=True)["onnx-fp16"]
        assert outcome == status and ("keeps its weights in onnx/model_fp16" in str(reason)) == (status == "rejected")
        assert sha256_of(folder / "onnx" / name) == old and verify(Bundle.open(folder)).exit_code == 0
    opened = Bundle.open(tmp_path / "net.weights")
    assert opened.artifact("onnx-fp16").weights_file == "onnx/model_fp16.onnx_data"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exits": "all"}, "--exit: .* without known loops and vocabulary"),
        ({"vocab_trim": True}, "--vocab-trim"),
        ({"vocab_keep": 0}, "--vocab-keep"),
        ({"vocab_max": 9}, "--vocab-max"),
        ({"build": ("tensorrt",)}, "the device is unknown"),
        ({"target": "rtx4050", "fp16": True}, "--target: is the device of an engine, and none is requested; add --trt"),
    ],
)
def test_invalid_options_are_refused(bundle: Path, options: dict[str, object], says: str) -> None:
    old = sha256_of(bundle / "bundle.json")
    with pytest.raises(InputError, match=says):
        export(bundle, **options)
    assert sha256_of(bundle / "bundle.json") == old


def test_replace_keeps_only_the_imported_graph(bundle: Path, tmp_path: Path) -> None:
    export(bundle, fp16=True)
    import_onnx(bundle / "onnx/model_fp16.onnx", tmp_path / "half")
    for flag in ("fp16", "int8", "int4"):
        with pytest.raises(InputError, match="its graph is FP16 already; import the FP32 graph"):
            export(tmp_path / "half", **{flag: True})
    assert list(export(bundle, int8=True, replace=True)) == ["onnx-fp32", "onnx-int8"]
    assert not (bundle / "onnx/model_fp16.onnx").exists()
    notes = Bundle.open(bundle).manifest.notes
    assert [note.partition(":")[0] for note in notes] == ["golden inputs", "INT8"]
    assert verify(Bundle.open(bundle)).exit_code == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    place = tmp_path_factory.mktemp("classifier")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "rows.tsv").write_text(ROWS)
    save(place, classifier_graph())
    return place


class TestClassifiers:
    """A graph from token ids to logits, with its tokenizer and a labelled file."""

    def wrapped(self, folder: Path, target: Path, **options: object) -> BundleManifest:
        arguments = {"tokenizer": folder / "tokenizer.json", "labels": ("l0", "l1"), "max_length": 16, **options}
        return import_onnx(folder / "net.onnx", target, OnnxImportOptions(**arguments))  # type: ignore[arg-type]

    def test_with_data_every_artifact_is_scored_on_it(self, folder: Path, tmp_path: Path) -> None:
        output = self.wrapped(folder, tmp_path / "bundle", data=folder / "rows.tsv")
        assert (output.task, output.labels) == ("classification", ("l0", "l1"))
        export(tmp_path / "bundle", fp16=True)
        opened = Bundle.open(tmp_path / "bundle")
        scores = [artifact.validation for artifact in opened.artifacts]
        assert [score.n if score else None for score in scores] == [60, 60]
        assert len(opened.golden()) == 60 and verify(opened).exit_code == 0

    def test_without_data_the_graph_agrees_with_itself(self, folder: Path, tmp_path: Path) -> None:
        output = self.wrapped(folder, tmp_path / "bundle")
        assert output.artifacts[0].score is not None and output.artifacts[0].score.accuracy == 1.0  # type: ignore[attr-defined]
        assert output.artifacts[0].validation is None and "agreement with FP32" in output.notes[0]
        answered = run_json("predict", "bundle", "word1 word2", cwd=tmp_path)
        assert answered["predictions"][0]["label"] in ("l0", "l1")
        assert run_json("evaluate", "bundle", "--data", str(folder / "rows.tsv"), cwd=tmp_path)["rows"][0]["n"] == 60
        nothing = edgeformer("evaluate", "bundle", cwd=tmp_path)
        assert nothing.code == 2 and "--data FILE" in nothing.err

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"labels": ("a", "b", "c")}, "and a text classifier gives float32"),
            ({"labels": ("a",)}, "with two labels or more"),
            ({"labels": ("good", "good")}, f"--labels good,good: {EQUAL}; give 2 different names"),
            ({"labels": ("good", "", "bad")}, f"--labels good,,bad: {EQUAL}; give 3 different names"),
            ({"tokenizer": None}, "a text classifier needs both"),
            ({"seed": 0, "shapes": {"input_ids": (1, 8)}}, "for graphs without a tokenizer"),
        ],
    )
    def test_invalid_classifier_options(self, folder, tmp_path, options, says):
        with pytest.raises(InputError, match=says):
            self.wrapped(folder, tmp_path / "bundle", **options)


@pytest.mark.slow
def test_export_works_inside_the_bundle_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``.`` has no name for a lock or temporary folder, and the working folder is replaced."""
    monkeypatch.chdir(bundle)
    assert list(export(Path(), int8=True)) == ["onnx-fp32", "onnx-int8"]
    assert Path.cwd() == bundle and Path("onnx/model_int8.onnx").is_file(), "in the new one"
    assert verify(Bundle.open(Path())).exit_code == 0
    output = import_onnx(tmp_path / "theirs" / "net.onnx", Path(), OnnxImportOptions(replace=True))
    assert [artifact.id for artifact in output.artifacts] == ["onnx-fp32"] and not Path("onnx/model_int8.onnx").exists()
    (bundle / "onnx").mkdir(exist_ok=True)
    monkeypatch.chdir(bundle / "onnx")
    export(Path(".."), fp16=True)
    assert Path("model_fp16.onnx").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "theirs"]


@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx, which builds engines without a GPU")
def test_engine_has_input_shapes_and_no_parity_without_its_gpu(bundle: Path) -> None:
    export(bundle, build=("tensorrt",), target="rtx4050")
    opened = Bundle.open(bundle)
    output, file = opened.artifact("tensorrt-rtx-fp32"), "engines/model.rtx4050.engine"
    assert (output.status, output.file, output.precision) == ("built", file, "fp32") and output.engine is not None
    assert output.engine.shapes == dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (1, 64), (16, 512)))
    assert output.built_for is not None and output.built_for["compute_capability"] == "8.9"
    assert output.engine.weight_bytes is not None and output.engine.weight_bytes >= 4 * (64 * 16 + 16 * 16)
    assert output.size_bytes == (bundle / file).stat().st_size > output.engine.weight_bytes
    if cannot_run(output) is not None:
        assert output.parity is not None and "verify --write" in str(output.parity.reason)


def test_sparse_initializers_are_named(tmp_path: Path) -> None:
    inputs, outputs = [graphs.value("x", graphs.FLOAT, ["N", 8])], [graphs.value("y", graphs.FLOAT, ["N", 8])]
    model = graphs.model([helper.make_node("MatMul", ["x", "w"], ["y"])], inputs, outputs)
    values, places = graphs.weights("w", 5), graphs.constant("places", np.arange(5))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 8]))
    import_onnx(save(tmp_path / "theirs", model), tmp_path / "bundle", OnnxImportOptions())
    reasons = export(tmp_path / "bundle", int8=True, fp16=True, keep_going=True)
    for name in ("onnx-int8", "onnx-fp16"):
        assert reasons[name][0] == "rejected" and "input 'w' has no source" in str(reasons[name][1])
