"""LiteRT: .tflite files of text encoders in FP32 and INT8, their sessions, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT
from edgeformer.bundle import Bundle
from edgeformer.cli.export import builder_names
from edgeformer.export.export import export
from edgeformer.export.previous import PreviousBundle
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.onnx import import_onnx
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.models.weights import load_model
from edgeformer.run import locate
from edgeformer.runtimes import OpenOptions, cannot_run, find_builder, provider_of
from edgeformer.runtimes.litert import builder, session
from edgeformer.runtimes.litert.session import LiteRTSession
from edgeformer.runtimes.runtime import BuildJob, Target, Unavailable
from tests.export import graphs

pytestmark = pytest.mark.slow

SHAPES = [(1, 16), (8, 16), (1, 64)]
"""Signatures of the tests' files: converting each takes seconds."""
UNUSED = 32
"""The type embedding's second row, which no graph reads: LiteRT's converter drops it."""
UNIQUE = 33154
IMPORTED = "an imported graph has no torch module"


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package}, of the extra litert, is not installed")


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small looped classifier, exported in FP32, FP16 and INT8, with its first exit. Read it only."""
    needs("ai_edge_litert", "litert_torch", "ai_edge_quantizer")
    folder = shutil.copytree(finished_run, tmp_path_factory.mktemp("litert") / "artifacts" / finished_run.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "signature_shapes", lambda job: SHAPES)
        export(folder, ExportOptions(int8=True, fp16=True, build=("litert",), exits=(1,), keep_going=True))
    return folder


@pytest.fixture(scope="module")
def bundle(run: Path) -> Bundle:
    return Bundle.open(run / "bundle")


def text(rows: int, tokens: int) -> dict[str, np.ndarray]:
    """Random ids; every second row ends in padding."""
    ids = np.random.default_rng(rows * tokens).integers(5, 700, (rows, tokens))
    mask = np.ones_like(ids)
    mask[1::2, max(1, tokens // 2) :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_fp32_is_what_torch_computes_for_every_length_and_number_of_rows(run: Path, bundle: Bundle) -> None:
    model = load_model(run)
    with bundle.session(bundle.artifact("litert-fp32"), OpenOptions(threads=1)) as opened:
        assert isinstance(opened, LiteRTSession) and opened.lengths == (16, 64)
        for rows, tokens in ((1, 1), (1, 5), (3, 16), (8, 16), (9, 12), (17, 16), (2, 40), (1, 64)):
            inputs = text(rows, tokens)
            with torch.inference_mode():
                expected = model(*map(torch.from_numpy, inputs.values())).numpy()
            logits = opened.run(inputs)["logits"]
            assert logits.dtype == np.float32
            np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_every_artifact_is_judged_and_verified_and_stores_weights_once(bundle: Bundle) -> None:
    for id_ in ("litert-fp32", "litert-fp32-exit1", "litert-int8", "litert-int8-exit1"):
        artifact, graph = bundle.artifact(id_), bundle.artifact(id_.replace("litert", "onnx"))
        assert (artifact.status, artifact.reason, artifact.format) == ("built", None, "litert")
        assert (artifact.role, artifact.exit, artifact.outputs) == (graph.role, graph.exit, graph.outputs)
        assert artifact.inputs == dict.fromkeys(graph.inputs, "int64[batch, 16|64]")
        parity, validation = artifact.parity, artifact.validation
        assert parity is not None and parity.max_abs_error is not None and parity.provider == "litert"
        assert validation is not None and graph.validation is not None
        assert abs(validation.loss - graph.validation.loss) < (1e-4 if artifact.precision == "fp32" else 0.02)
        assert parity.max_abs_error < 1e-4 or artifact.precision == "int8"
        assert artifact.built_with.keys() == {"ai-edge-litert", "litert-torch", "ai-edge-quantizer", "torch"}
    assert bundle.artifact("litert-fp32").parity != bundle.artifact("litert-fp32-exit1").parity
    assert bundle.artifact("litert-int8").quantized == {"EMBEDDING_LOOKUP": 1, "FULLY_CONNECTED": 11}
    assert any("no FP16 file" in note for note in bundle.manifest.notes)
    assert not any(artifact.format == "litert" and artifact.precision == "fp16" for artifact in bundle.artifacts)
    for id_ in ("litert-fp32", "litert-int8", "litert-fp32-exit1"):
        sharing = bundle.artifact(id_).sharing
        assert sharing is not None and sharing.unique_parameters == UNIQUE
        assert sharing.stored_parameters == UNIQUE - UNUSED
    fp32, int8 = (bundle.artifact(id_).sharing for id_ in ("litert-fp32", "litert-int8"))
    assert fp32 is not None and int8 is not None
    assert 4 * UNIQUE <= fp32.weight_bytes < 4.3 * UNIQUE and int8.weight_bytes < 0.3 * fp32.weight_bytes
    with bundle.session(bundle.artifact("litert-int8"), OpenOptions(threads=2)) as opened:
        settings, (caveat,) = opened.settings(), opened.caveats()
    assert (settings["threads"], settings["lengths"]) == (2, [16, 64])
    nodes = settings["nodes_by_provider"]
    assert nodes["XNNPACK"] > 100 and nodes["LiteRT"] < 5
    assert "not in XNNPACK: CAST (1), EMBEDDING_LOOKUP (1)" in caveat
    assert provider_of(bundle.artifact("litert-fp32")) == "litert"
    assert cannot_run(bundle.artifact("litert-fp32")) is None
    checks = {check.artifact: check.status for check in verify(bundle, runtime="litert").artifacts}
    assert checks["litert-fp32"] == checks["litert-int8-exit1"] == "verified"


def test_what_cannot_be_computed_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = bundle.folder / str(bundle.artifact("litert-fp32").file)
    opened, inputs = LiteRTSession(path, 1), text(2, 8)
    logits = opened.run(inputs)["logits"]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for broken, why in (
        (text(1, 65), "has 65 tokens, and the file's longest signature has 64"),
        ({"input_ids": ids, "attention_mask": mask[:, :-1]}, "the same shape"),
        ({"input_ids": np.full_like(ids, 700), "attention_mask": mask}, "outside the model's vocabulary"),
        ({"input_ids": np.full_like(ids, -1), "attention_mask": mask}, "outside the model's vocabulary"),
        ({"input_ids": np.full_like(ids, 2**40), "attention_mask": mask}, "outside the model's vocabulary"),
        ({"input_ids": ids}, "'attention_mask' is missing"),
        ({"input_ids": ids.astype(np.int32), "attention_mask": mask}, "must be int64"),
    ):
        with pytest.raises(InputError, match=why):
            opened.run(broken)
    np.testing.assert_array_equal(opened.run(inputs)["logits"], logits)
    opened.close()
    damaged = tmp_path / "damaged.tflite"
    for content in (b"", b"no flatbuffer", path.read_bytes()[:-1]):
        damaged.write_bytes(content)
        with pytest.raises(ArtifactError, match="damaged"):
            LiteRTSession(damaged, size_bytes=path.stat().st_size)


def test_a_process_that_uses_it_prints_nothing(bundle: Bundle) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from edgeformer.runtimes.litert.session import LiteRTSession\n"
        "ids = np.ones((9, 12), np.int64)\n"
        "with LiteRTSession(Path(sys.argv[1]), 1) as session:\n"
        "    print(*session.run({'input_ids': ids, 'attention_mask': ids})['logits'].shape)\n"
        "print('said', file=sys.stderr)\n"
    )
    path = bundle.folder / str(bundle.artifact("litert-fp32").file)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "9 2\n", "said\n")


def test_a_changed_model_is_exported_again_without_losses(run: Path) -> None:
    options = ExportOptions(int8=True, fp16=True, build=("litert",), exits=(1,))
    target = Target("litert", precision="fp32")
    previous = PreviousBundle.of(run / "bundle", options, [target], {"model/model.safetensors": "another"}, (1, 2))
    assert {"litert-fp32", "litert-int8", "litert-int8-exit1"} <= previous.rebuilt.keys()
    assert previous.losses.keys() <= previous.rebuilt.keys()


def test_lengths_double_up_to_the_longest_text() -> None:
    job = BuildJob(Path(), (), "fp32", 100, 512, SILENT, print, lambda graph: None)
    assert builder.signature_shapes(job) == [(1, 16), (1, 32), (1, 64), (1, 128), (8, 16), (8, 32)]
    lengths = [tokens for _, tokens in builder.signature_shapes(replace(job, max_length=200))]
    assert lengths[:5] == [16, 32, 64, 128, 200]
    assert builder.signature_shapes(replace(job, max_positions=12)) == [(1, 12), (8, 12)]


def test_an_imported_graph_and_a_language_model_say_why_they_have_no_file(tmp_path: Path) -> None:
    needs("ai_edge_litert", "litert_torch", "ai_edge_quantizer")
    import_onnx(graphs.save(tmp_path, graphs.embedding(rows=64, width=16)), tmp_path / "bundle")
    manifest = export(tmp_path / "bundle", ExportOptions(build=("litert",)))
    (entry,) = (artifact for artifact in manifest.artifacts if artifact.format == "litert")
    assert (entry.status, entry.file) == ("unavailable", None) and IMPORTED in str(entry.reason)
    graph = ArtifactManifest(
        id="onnx-fp32", file="onnx/model.onnx", format="onnx", precision="fp32", status="built",
        inputs={"input_ids": "int64[batch, sequence]"},
    )  # fmt: skip
    job = BuildJob(tmp_path, (graph,), "fp32", 32, 64, SILENT, print, lambda graph: None)
    (entry,) = builder.LiteRTBuilder().build(Target("litert"), job)
    assert entry.status == "rejected" and "no cache that grows" in str(entry.reason)


def test_the_quantizer_falls_back_and_says_why_it_fails(bundle, tmp_path, monkeypatch):
    from ai_edge_quantizer import recipe

    source = bundle.folder / str(bundle.artifact("litert-fp32").file)
    monkeypatch.delattr(recipe, "dynamic_wi8_afp32")
    assert builder.quantize(source, tmp_path / "model.tflite") == "weight_only_wi8_afp32"
    sharing, quantized = builder.audit_file(tmp_path / "model.tflite", None)
    assert sharing.stored_parameters == UNIQUE - UNUSED and quantized["DEQUANTIZE"] > 5
    with LiteRTSession(tmp_path / "model.tflite", 1) as opened, LiteRTSession(source, 1) as exact:
        inputs = text(3, 16)
        np.testing.assert_allclose(opened.run(inputs)["logits"], exact.run(inputs)["logits"], atol=0.1)
    monkeypatch.delattr(recipe, "weight_only_wi8_afp32")
    with pytest.raises(EdgeformerError, match=r"cannot quantize it: AttributeError.*dynamic_wi8_afp32"):
        builder.quantize(source, tmp_path / "model.tflite")


def test_without_the_packages_it_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert builder_names(False, "onnx", [], {"--litert": True}) == ("litert",)
    monkeypatch.setattr("edgeformer.system.capability.installed_version", lambda *names: None)
    plan = find_builder("litert").plan(None)
    assert isinstance(plan, Unavailable) and "ai-edge-litert and litert-torch" in plan.reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    session.load_library.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"ai-edge-litert is not installed .*\[litert\]"):
        LiteRTSession(tmp_path / "a.tflite")


def test_a_logger_that_starts_while_output_is_hidden_still_works_afterwards() -> None:
    program = (
        "import logging, os, sys\n"
        "from edgeformer.system.output import capture_native_stderr\n"
        "with capture_native_stderr():\n"
        "    logging.basicConfig(format='%(message)s')\n"
        "    os.write(2, b'hidden')\n"
        "    print('visible', file=sys.stderr)\n"
        "logging.warning('warning')\n"
        "os.write(2, b'native')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "visible\nwarning\nnative")


class TwoNorms(torch.nn.Module):
    """A layer that is applied twice, behind another norm each time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shared = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 32)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(32) for _ in range(2))
        for parameter in self.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        h = self.table(input_ids)
        for norm in self.norms:
            h = h + self.shared(norm(h))
        return (h * attention_mask[..., None].float()).sum(1)


def test_a_shared_layer_behind_different_norms_is_stored_once(tmp_path: Path) -> None:
    needs("ai_edge_litert", "litert_torch", "ai_edge_quantizer")
    module, path, inputs = TwoNorms().eval(), tmp_path / "model.tflite", text(2, 16)
    inputs["input_ids"] %= 50
    unique, stored = sum(parameter.numel() for parameter in module.parameters()), []
    with torch.inference_mode():
        expected = module(*map(torch.from_numpy, inputs.values())).numpy()
    for bounds_norms in (False, True):
        builder.convert(module, tuple(inputs), ("logits",), [(1, 16)], path, bounds_norms=bounds_norms)
        stored.append(builder.audit_file(path, unique)[0].stored_parameters)
        with LiteRTSession(path, 1) as opened:
            np.testing.assert_allclose(opened.run(inputs)["logits"], expected, atol=1e-4)
            assert bounds_norms or opened.lengths == (16,)
    assert stored[0] > unique >= stored[1], stored
    assert not any(norm._forward_hooks for norm in module.norms)


@pytest.mark.parametrize(("artifact", "tolerance"), [("litert-fp32", 1e-5), ("litert-int8", 1e-3)])
def test_the_client_without_edgeformer_gives_the_same_answers(run, bundle, artifact, tolerance):
    texts = ["a warm film", "dull " * 100, "a dull and slow film that never ends, with more than sixteen tokens in all"]
    client = Path(__file__).parents[2] / "examples" / "litert_client.py"
    command = [sys.executable, str(client), str(bundle.folder), *texts, "--artifact", artifact]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert output.returncode == 0, output.stderr
    answers = [json.loads(line) for line in output.stdout.splitlines()]
    for answer, text in zip(answers, texts, strict=True):
        (expected,) = predict(locate(str(run), run.parent), [text], artifact=artifact, runtime="litert")[1]
        assert answer["label"] == expected.as_dict()["label"]
        assert answer["probability"] == pytest.approx(expected.as_dict()["probability"], abs=tolerance)
