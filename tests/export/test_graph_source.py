"""Export of imported graphs: each precision is compared with the FP32 graph; older artifacts stay."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export as export_bundle
from edgeformer.export.import_onnx import OnnxImportOptions, import_onnx
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import verify
from edgeformer.runtimes import cannot_run
from edgeformer.runtimes.tensorrt.state import tensorrt_state
from tests.cli.run_cli import edgeformer
from tests.export import graphs
from tests.export.graphs import save, save_beside
from tests.fakes.install import installed
from tests.inference.golden_bundle import update
from tests.runtimes.tiny_bundle import CLASSES, VOCABULARY, classifier_graph

ROWS = "text\tlabel\n" + "".join(f"word{number % 7} word{number % 3}\tl{number % CLASSES}\n" for number in range(60))


def export(folder: Path, **options: object) -> dict[str, tuple[str, str | None]]:
    """Artifact → status and reason."""
    output = export_bundle(folder, ExportOptions(**options))  # type: ignore[arg-type]
    return {artifact.id: (artifact.status, artifact.reason) for artifact in output.artifacts}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    import_onnx(save(tmp_path / "theirs", graphs.embedding(rows=64, width=16)), tmp_path / "bundle")
    return tmp_path / "bundle"


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


def test_int8_of_convolutions_only_is_rejected(tmp_path: Path) -> None:
    graph = graphs.convolutions()
    del graph.graph.node[4:], graph.graph.initializer[3:]
    graph.graph.output[0].CopyFrom(graphs.value("pooled", graphs.FLOAT, ["batch", 8, 1, 1]))
    import_onnx(save(tmp_path, graph), tmp_path / "bundle")
    status, reason = export(tmp_path / "bundle", int8=True)["onnx-int8"]
    assert status == "rejected" and "convolutions and recurrent operators stay FP32" in str(reason)
    assert not (tmp_path / "bundle/onnx/model_int8.onnx").exists()


def test_rejection_names_the_worst_output(tmp_path: Path) -> None:
    """A row of weights that no token ever meets takes all of the scale: 7 bits hold nothing of the others."""
    graph = graphs.embedding(rows=64, width=16)
    tokens, products = (onnx.numpy_helper.to_array(tensor).copy() for tensor in graph.graph.initializer[:2])
    tokens[:, 0], products[0] = 0, 10_000
    graph.graph.initializer[0].CopyFrom(graphs.constant("table", tokens))
    graph.graph.initializer[1].CopyFrom(graphs.constant("w", products))
    import_onnx(save(tmp_path, graph), tmp_path / "bundle")
    status, reason = export(tmp_path / "bundle", int8=True)["onnx-int8"]
    assert status == "rejected" and "rms error" in str(reason) and "--inputs FILE.npz" in str(reason)


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
        ({"exits": "all"}, "--exit: .* loops and vocabulary are unknown"),
        ({"vocab_trim": True}, "--vocab-trim"),
        ({"vocab_keep": 0}, "--vocab-keep"),
        ({"vocab_max": 9}, "--vocab-max"),
        ({"build": ("tensorrt",)}, "which device"),
        ({"target": "rtx4050"}, "--target: says what is built for; add --trt"),
        ({"target": "rtx4050", "fp16": True}, "--target: says what is built for; add --trt"),
    ],
)
def test_invalid_options_are_refused(bundle: Path, options: dict[str, object], says: str) -> None:
    old = sha256_of(bundle / "bundle.json")
    with pytest.raises(InputError, match=says):
        export(bundle, **options)
    assert sha256_of(bundle / "bundle.json") == old


def test_target_without_a_device_builder_is_refused(bundle: Path) -> None:
    reason = "--target: reference: what it builds is the same"
    with installed("reference_runtime"), pytest.raises(InputError, match=reason):
        export(bundle, build=("reference",), target="rtx4050")


def test_replace_keeps_only_the_imported_graph(bundle: Path, tmp_path: Path) -> None:
    export(bundle, fp16=True)
    import_onnx(bundle / "onnx/model_fp16.onnx", tmp_path / "half")
    for flag in ("fp16", "int8", "int4"):
        with pytest.raises(InputError, match="its graph is FP16 already; import the FP32 one"):
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
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
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
        result = edgeformer("predict", "bundle", "word1 word2", "--json", cwd=tmp_path)
        assert result.code == 0 and json.loads(result.out)["predictions"][0]["label"] in ("l0", "l1"), result.err
        scored = edgeformer("evaluate", "bundle", "--data", str(folder / "rows.tsv"), "--json", cwd=tmp_path)
        assert scored.code == 0 and json.loads(scored.out)["rows"][0]["n"] == 60, scored.err
        nothing = edgeformer("evaluate", "bundle", cwd=tmp_path)
        assert nothing.code == 2 and "--data FILE" in nothing.err

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"labels": ("a", "b", "c")}, "of 64 rows and 3 labels"),
            ({"labels": ("a",)}, "two labels or more"),
            ({"labels": ("good", "good")}, "--labels good,good: needs 2 different names, none of them empty"),
            ({"labels": ("good", "", "bad")}, "--labels good,,bad: needs 3 different names, none of them empty"),
            ({"tokenizer": None}, "belong together"),
            ({"seed": 0, "shapes": {"input_ids": (1, 8)}}, "for graphs without a tokenizer"),
        ],
    )
    def test_invalid_classifier_options(
        self, folder: Path, tmp_path: Path, options: dict[str, object], says: str
    ) -> None:
        with pytest.raises(InputError, match=says):
            self.wrapped(folder, tmp_path / "bundle", **options)

    def test_graph_without_logits_is_no_classifier(self, folder: Path, tmp_path: Path) -> None:
        options = OnnxImportOptions(tokenizer=folder / "tokenizer.json", labels=("l0", "l1"))
        with pytest.raises(InputError, match="has an output `logits`, this one has states, length, largest"):
            import_onnx(save(tmp_path, graphs.embedding()), tmp_path / "b", options)


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


def test_the_command(bundle: Path, tmp_path: Path) -> None:
    output = edgeformer("export", "bundle", "--int8", "--json", cwd=tmp_path)
    assert output.code == 0, output.err
    document = json.loads(output.out)
    assert document["bundle"] == "bundle" and [a["id"] for a in document["artifacts"]] == ["onnx-fp32", "onnx-int8"]
    assert np.isfinite(document["artifacts"][1]["parity"]["rms_error"])


ID, FILE = "tensorrt-rtx-fp32", "engines/model.rtx4050.engine"


@pytest.fixture
def engine_bundle(wrapped_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wrapped_engine, tmp_path / "bundle"))


def built(engine_bundle: Path, device: str = "rtx4050", **options: object) -> ArtifactManifest:
    export_bundle(engine_bundle, ExportOptions(build=("tensorrt",), target=device, **options))  # type: ignore[arg-type]
    return Bundle.open(engine_bundle).artifact(ID)


def intact(engine_bundle: Path) -> bool:
    return {check.status for check in verify(Bundle.open(engine_bundle)).files} == {"intact"}


def test_engine_has_input_shapes_and_no_parity_without_its_gpu(wrapped_engine: Path) -> None:
    opened = Bundle.open(wrapped_engine)
    output = opened.artifact(ID)
    assert (output.status, output.file, output.precision) == ("built", FILE, "fp32") and output.engine is not None
    assert output.engine.shapes == dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (1, 64), (16, 512)))
    assert output.built_for is not None and output.built_for["compute_capability"] == "8.9"
    assert output.engine.weight_bytes is not None and output.engine.weight_bytes >= 4 * (64 * 16 + 16 * 16)
    assert output.size_bytes == (wrapped_engine / FILE).stat().st_size > output.engine.weight_bytes
    if cannot_run(output) is not None:
        assert output.parity is not None and "verify --write" in str(output.parity.reason)


def test_engine_that_cannot_be_rebuilt_stays(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt_rtx", None)  # how Python says that there is no such package
        tensorrt_state.cache_clear()
        remaining = built(engine_bundle)
    tensorrt_state.cache_clear()
    assert (remaining.status, remaining.kept, remaining.file) == ("built", True, FILE)
    assert str(remaining.reason).startswith("kept; it cannot be made again: NVIDIA GeForce RTX 4050")
    assert "tensorrt-rtx builds for it on any machine, but here package: not installed" in str(remaining.reason)
    assert intact(engine_bundle)
    export_bundle(engine_bundle, ExportOptions(fp16=True))
    assert Bundle.open(engine_bundle).artifact(remaining.id).reason is None


def test_rejected_engine_leaves_no_file(wrapped_engine: Path, tmp_path: Path) -> None:
    """An engine of another time, of a graph that today's builder refuses: TensorRT has no determinants."""
    node = helper.make_node("Det", ["x"], ["y"])
    ends = ([graphs.value("x", graphs.FLOAT, ["batch", 4, 4])], [graphs.value("y", graphs.FLOAT, ["batch"])])
    bundle = tmp_path / "bundle"
    import_onnx(graphs.save(tmp_path, graphs.model([node], *ends)), bundle)
    (bundle / FILE).parent.mkdir()
    shutil.copy(wrapped_engine / FILE, bundle / FILE)
    update(bundle, artifacts=(*Bundle.open(bundle).artifacts, Bundle.open(wrapped_engine).artifact(ID)))
    assert intact(bundle)
    output = built(bundle)
    assert (output.status, output.file) == ("rejected", None) and "Det" in str(output.reason)
    assert not (bundle / FILE).exists() and intact(bundle)


def test_engine_for_another_device_needs_replace(engine_bundle: Path) -> None:
    old = Bundle.open(engine_bundle).artifact(ID)
    with pytest.raises(InputError, match=f"would lose {ID} .*another device than --target rtx3050-6gb"):
        built(engine_bundle, "rtx3050-6gb")
    assert Bundle.open(engine_bundle).artifact(ID) == old and (engine_bundle / FILE).is_file()
    new = built(engine_bundle, "rtx3050-6gb", replace=True)
    assert new.file == "engines/model.rtx3050-6gb.engine" and not (engine_bundle / FILE).exists()
    assert new.built_for is not None and new.built_for["compute_capability"] == "8.6"
    assert intact(engine_bundle)
