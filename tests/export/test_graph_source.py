"""Export of imported graphs: each precision is compared with the FP32 graph; older artifacts stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export as export_bundle
from edgeformer.export.import_onnx import OnnxImportOptions, import_onnx
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import golden_score, verify
from edgeformer.runtimes import cannot_run
from tests.cli.run_cli import edgeformer
from tests.export import graphs
from tests.export.graphs import save, save_beside
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
    with opened.session(half) as session:
        outputs = opened.task.golden_outputs(opened.golden(), session.run, None)
    assert golden_score(opened, half, outputs) == half.score, "what verify --write scores on a target"


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
        ({"target": "rtx4050"}, "--target: is the device of an engine, and none is requested; add --trt"),
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
            ({"labels": ("a", "b", "c")}, "and a text classifier gives float32"),
            ({"labels": ("a",)}, "with two labels or more"),
            (
                {"labels": ("good", "good")},
                "--labels good,good: two labels are equal, or one is empty; give 2 different names",
            ),
            (
                {"labels": ("good", "", "bad")},
                "--labels good,,bad: two labels are equal, or one is empty; give 3 different names",
            ),
            ({"tokenizer": None}, "a text classifier needs both"),
            ({"seed": 0, "shapes": {"input_ids": (1, 8)}}, "for graphs without a tokenizer"),
        ],
    )
    def test_invalid_classifier_options(
        self, folder: Path, tmp_path: Path, options: dict[str, object], says: str
    ) -> None:
        with pytest.raises(InputError, match=says):
            self.wrapped(folder, tmp_path / "bundle", **options)


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


ID, FILE = "tensorrt-rtx-fp32", "engines/model.rtx4050.engine"


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
