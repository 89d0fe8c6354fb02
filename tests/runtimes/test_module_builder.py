"""Builders that convert torch modules: Core ML and ExecuTorch models of a looped classifier, whose layer is shared."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import verify
from edgeformer.runtimes import OpenOptions, cannot_run, provider_facts, requested_providers, runtime_of
from edgeformer.runtimes.coreml import session as coreml
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.executorch import session as executorch
from edgeformer.runtimes.executorch.builder import ExecuTorchBuilder
from edgeformer.runtimes.module_builder import MAX_BATCH, StoredModel
from edgeformer.runtimes.runtime import ArtifactFiles, BuildJob, Target, Unavailable

INPUTS, LENGTH, VOCABULARY, WIDTH = ("input_ids", "attention_mask"), 12, 50, 64
Built = tuple[Path, dict[str, ArtifactManifest]]
"""A bundle and the entries of its models."""
needs_executorch = pytest.mark.skipif(
    executorch.EXECUTORCH.missing() is not None, reason="the extra executorch is not installed, which makes programs"
)


class Looped(torch.nn.Module):
    """A classifier whose only layer runs ``loops`` times, with a table of constants.

    ``stacked``: a copy of the layer for each loop.
    """

    def __init__(self, loops: int = 3, width: int = WIDTH, *, stacked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loops = loops
        self.table = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(loops if stacked else 1))
        self.head = torch.nn.Linear(width, 3)
        self.register_buffer("angles", torch.rand(LENGTH, width), persistent=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        angles: Any = self.angles
        state = self.table(input_ids) * attention_mask[..., None].float() + angles[: input_ids.shape[1]]
        for loop in range(self.loops):
            state = state + torch.sigmoid(self.layers[loop % len(self.layers)](state))
        return self.head(state[:, 0]).float()

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Branching(Looped):
    """Its result depends on a branch in Python, which torch.export refuses."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, attention_mask if attention_mask.sum() > 3 else input_ids)


def graph(precision: Any = "fp32", **changes: Any) -> ArtifactManifest:
    """An ONNX graph of the classifier, as a manifest lists it."""
    facts = {
        "id": f"onnx-{precision}", "file": "model.onnx", "format": "onnx", "precision": precision, "status": "built",
        "inputs": dict.fromkeys(INPUTS, "int64[batch, sequence]"), "outputs": {"scores": "float32[batch, 3]"},
    }  # fmt: skip
    return ArtifactManifest.model_validate({**facts, **changes})


def job_for(bundle: Path, *precisions: Any, **changes: Any) -> BuildJob:
    """A job with graphs of these precisions."""
    (bundle / "engines").mkdir(exist_ok=True)
    (bundle / "model.onnx").write_bytes(b"graph")
    job = BuildJob(
        bundle=bundle, graphs=tuple(map(graph, precisions)), precision="fp32", max_length=LENGTH,
        max_positions=2 * LENGTH, progress=SILENT, note=print, module=lambda graph: Looped().eval(),
    )  # fmt: skip
    return replace(job, **changes)


@pytest.mark.parametrize(
    ("builder", "problem"),
    [
        (CoreMLBuilder(), "coremltools cannot convert this model"),
        (ExecuTorchBuilder(), "ExecuTorch cannot lower this model"),
    ],
    ids=["coreml", "executorch"],
)
def test_what_cannot_be_built_says_why(builder, problem, tmp_path, monkeypatch):
    def no_module(graph: ArtifactManifest) -> Any:
        raise EdgeformerError("an imported graph has no torch module")

    if isinstance(missing := builder.plan(None), Unavailable):
        pytest.skip(missing.reason)
    target = Target(builder.name, precision=next(iter(builder.endings)))
    job = job_for(tmp_path, "fp32", module=no_module)
    (imported,) = builder.build(target, job)
    assert (imported.status, imported.reason) == ("unavailable", "an imported graph has no torch module")
    (branching,) = builder.build(target, replace(job, module=lambda graph: Branching().eval()))
    assert branching.status == "rejected" and problem in str(branching.reason)
    (refused,) = builder.build(target, replace(job, graphs=(graph(id="onnx-fp32-decode", role="decode"),)))
    assert refused.status == "rejected" and "caches of earlier tokens are not supported" in str(refused.reason)
    monkeypatch.setattr("edgeformer.system.capability.installed_version", lambda name: None)
    plan = builder.plan(None)
    assert isinstance(plan, Unavailable) and f"[{builder.name}]" in plan.reason


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if (missing := coreml.COREMLTOOLS.missing()) is not None:
        pytest.skip(missing)
    bundle = tmp_path_factory.mktemp("coreml")
    entries = CoreMLBuilder().build(Target("coreml", precision="fp16"), job_for(bundle, "fp32", "int8"))
    return bundle, {entry.id: entry for entry in entries}


@pytest.mark.slow
def test_models_take_any_batch_and_length_and_store_weights_once(built: Built, tmp_path: Path) -> None:
    bundle, entries = built
    assert [(entry.id, entry.status, entry.reason) for entry in entries.values()] == [
        ("coreml-fp16", "built", None), ("coreml-int8", "built", None),
    ]  # fmt: skip
    coremltools = pytest.importorskip("coremltools")
    for entry in entries.values():
        assert entry.engine is not None and entry.engine.shapes["input_ids"][-1] == (MAX_BATCH, LENGTH)
        with zipfile.ZipFile(bundle / str(entry.file)) as archive:
            archive.extractall(tmp_path / entry.id)
        spec = coremltools.utils.load_spec(str(tmp_path / entry.id / coreml.PACKAGE))
        assert [value.name for value in spec.description.output] == ["scores"]
        for value in spec.description.input:
            ranges = value.type.multiArrayType.shapeRange.sizeRanges
            bounds = [(size.lowerBound, size.upperBound) for size in ranges]
            assert value.name in INPUTS and bounds == [(1, MAX_BATCH), (1, LENGTH)]
    unique = Looped().count()
    sizes = {}
    for name, entry in entries.items():
        assert entry.sharing is not None
        assert entry.sharing.stored_parameters == entry.sharing.unique_parameters == unique
        assert entry.sharing.constant_elements >= LENGTH * WIDTH
        sizes[name] = entry.sharing.weight_bytes
    assert 2 * unique <= sizes["coreml-fp16"] < 2.5 * unique and sizes["coreml-int8"] < 0.8 * sizes["coreml-fp16"]
    assert entries["coreml-int8"].quantized == {"weights": 2}  # of more than 2,048 numbers: table and layer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML runs here")
def test_it_runs_on_apple_devices_only(built: Built) -> None:
    bundle, entries = built
    entry = entries["coreml-fp16"]
    assert lacks_parity(entry) and entry.parity is not None and entry.parity.tolerance is not None
    assert entry.parity.reason == "Core ML runs on Apple devices only; run there: edgeformer verify --write"
    assert cannot_run(entry) == coreml.NOT_APPLE and requested_providers(entry, "coreml") == ("coreml",)
    files = ArtifactFiles(entry, bundle / str(entry.file))
    with pytest.raises(ArtifactError, match="Core ML runs on Apple devices only"):
        runtime_of(entry).open(files, OpenOptions())


def entry(precision: Any = "fp32", **changes: Any) -> ArtifactManifest:
    facts = {"id": f"executorch-{precision}", "file": "engines/model.pte", "format": "executorch"}
    return graph(precision, **facts, **changes)


def texts(batch: int, length: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(batch * length).integers(0, VOCABULARY, (batch, length))
    mask = np.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def expected(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with torch.inference_mode():
        answers: torch.Tensor = module(*(torch.from_numpy(inputs[name]) for name in INPUTS))
    return answers.numpy()


def write_program(module: torch.nn.Module, path: Path, precision: Any = "fp32") -> StoredModel:
    return ExecuTorchBuilder().write(module, INPUTS, ("scores",), LENGTH, path, precision)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Looped, Path, Any]:
    if (missing := executorch.EXECUTORCH.missing()) is not None:
        pytest.skip(missing)
    module = Looped(loops=3).eval()
    path = tmp_path_factory.mktemp("executorch") / "model.pte"
    return module, path, write_program(module, path)


@pytest.mark.slow
def test_it_takes_any_batch_and_length_up_to_the_largest_and_nothing_else(program: tuple[Looped, Path, Any]) -> None:
    module, path, _ = program
    with executorch.ExecuTorchSession(path, entry(), threads=1) as session:
        for batch, length in ((1, 1), (MAX_BATCH, LENGTH), (3, 5), (1, LENGTH), (2, 1)):
            inputs = texts(batch, length)
            outputs = session.run(inputs)
            assert list(outputs) == ["scores"] and outputs["scores"].dtype == np.float32
            np.testing.assert_allclose(outputs["scores"], expected(module, inputs), atol=1e-4)
        assert session.settings() == {"threads": 1, "shares_packed_weights": executorch.share_packed_weights()}
        good = texts(2, 5)
        usual = session.run(good)["scores"]
        for broken, why in (
            (texts(MAX_BATCH + 1, 5), r"int64\[1 to 16, 1 to 12\]"),
            (texts(2, LENGTH + 1), r"int64\[1 to 16, 1 to 12\]"),
            ({**good, "attention_mask": good["attention_mask"][:, :4]}, "same shape"),
            ({**good, "input_ids": good["input_ids"].astype(np.int32)}, "must be int64"),
            ({**good, "input_ids": np.full_like(good["input_ids"], VOCABULARY)}, "does not accept"),
            ({**good, "input_ids": np.full_like(good["input_ids"], -1)}, "does not accept"),
        ):
            with pytest.raises(InputError, match=why):
                session.run(broken)
        np.testing.assert_array_equal(session.run(good)["scores"], usual)


def test_damaged_files_are_refused_with_the_cause(program: tuple[Looped, Path, Any], tmp_path: Path) -> None:
    path, contents = tmp_path / "cut.pte", program[1].read_bytes()
    for size in (0, 100, len(contents) // 2, len(contents) - 1):
        path.write_bytes(contents[:size])
        with pytest.raises(ArtifactError, match=r"cut\.pte: cannot be opened by ExecuTorch .*export the run again"):
            executorch.ExecuTorchSession(path, entry(), threads=1)
    two_inputs = entry().model_copy(update={"inputs": {"input_ids": "int64[batch, sequence]"}})
    with pytest.raises(ArtifactError, match=r"takes 2 inputs, and bundle\.json names 1"):
        executorch.ExecuTorchSession(program[1], two_inputs, threads=1)


def test_sessions_with_other_threads_may_alternate(program: tuple[Looped, Path, Any]) -> None:
    inputs = texts(4, 8)
    reference = expected(program[0], inputs)
    sessions = [executorch.ExecuTorchSession(program[1], entry(), threads) for threads in (1, 2, 1)]
    for session in (*sessions, *sessions):
        np.testing.assert_allclose(session.run(inputs)["scores"], reference, atol=1e-4)
        assert executorch.library()._threadpool_get_thread_count() == session.threads
    for session in sessions:
        session.close()


@pytest.mark.slow
def test_a_shared_layer_is_stored_once(program: tuple[Looped, Path, Any], tmp_path: Path) -> None:
    module, path, written = program
    assert written.parameters == module.count()
    assert 4 * module.count() <= written.weight_bytes < path.stat().st_size
    stacked = Looped(loops=3, stacked=True).eval()
    assert write_program(stacked, tmp_path / "stacked.pte").parameters == stacked.count()
    quantized = write_program(module, tmp_path / "int8.pte", "int8")
    assert quantized.parameters == module.count() and quantized.quantized == {"linear": 4}
    assert quantized.weight_bytes < written.weight_bytes
    inputs = texts(5, 7)
    with executorch.ExecuTorchSession(tmp_path / "int8.pte", entry("int8"), threads=1) as session:
        difference = np.abs(session.run(inputs)["scores"] - expected(module, inputs)).max()
    assert 0 < difference < 0.1


@pytest.mark.slow
@needs_executorch
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets the option through Linux's library")
def test_a_shared_layer_is_packed_once(tmp_path: Path) -> None:
    """In a process of its own: with the weight cache six loops need the memory of one layer of 2.4 MB."""
    module, path = Looped(loops=6, width=768).eval(), tmp_path / "wide.pte"
    write_program(module, path)
    script = (
        "import sys, numpy as np\nfrom pathlib import Path\n"
        "from edgeformer.artifacts.manifest import ArtifactManifest\n"
        "from edgeformer.runtimes.executorch import session\n"
        "def anonymous():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) * 1024\n"
        "session.library()\n"
        "if sys.argv[3] == 'no': session.share_packed_weights = lambda: False\n"
        "entry = ArtifactManifest.model_validate_json(sys.argv[1], strict=False)\n"
        "ids, before = np.ones((1, 4), np.int64), anonymous()\n"
        "opened = session.ExecuTorchSession(Path(sys.argv[2]), entry, 1)\n"
        "opened.run({'input_ids': ids, 'attention_mask': ids})\n"
        "print(anonymous() - before, opened.settings()['shares_packed_weights'])\n"
    )
    used = {}
    for share in ("yes", "no"):
        command = [sys.executable, "-W", "ignore", "-c", script, entry().model_dump_json(), str(path), share]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        size, shares = done.stdout.split()
        assert shares == str(share == "yes")
        used[share] = int(size)
    layer = 4 * 768 * 768
    assert 4 * layer < used["no"] - used["yes"] < 6 * layer


@pytest.mark.slow
def test_operators_outside_xnnpack_are_named(program: tuple[Looped, Path, Any]) -> None:
    facts = program[2].engine
    assert facts["delegated"] >= 3 * 3 and facts["not_delegated"]["embedding_default"] == 1
    job = job_for(program[1].parent, "fp32")
    (built,) = ExecuTorchBuilder().build(Target("executorch", precision="fp32"), job)
    assert built.engine is not None and built.engine.not_delegated == facts["not_delegated"]
    assert built.engine.shapes["input_ids"][-1] == (MAX_BATCH, LENGTH)
    with executorch.ExecuTorchSession(program[1].parent / str(built.file), built, threads=1) as session:
        (caveat,) = [text for text in session.caveats() if "outside XNNPACK's kernels" in text]
    outside = sum(facts["not_delegated"].values())
    assert f"{outside} of {outside + facts['delegated']} operators" in caveat and "embedding_default (1)" in caveat


@pytest.mark.slow
@needs_executorch
def test_export_judges_and_verifies_programs(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / finished_run.name))
    options = ExportOptions(int8=True, exits=(1,), build=("executorch",), keep_going=True, replace=True)
    export(run, options)
    bundle = Bundle.open(run / "bundle")
    built = {artifact.id: artifact for artifact in bundle.artifacts if artifact.format == "executorch"}
    assert {*built} == {f"executorch-{precision}{role}" for precision in ("fp32", "int8") for role in ("", "-exit1")}
    for name, artifact in built.items():
        source = bundle.artifact(name.replace("executorch", "onnx"))
        assert artifact.status == "built", artifact.reason
        assert artifact.parity is not None and artifact.parity.provider == "executorch" and artifact.sharing is not None
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters == bundle.manifest.parameters
        score, source_score = artifact.validation, source.validation
        assert score.accuracy == pytest.approx(source_score.accuracy, abs=0.01)  # type: ignore[union-attr]
        if artifact.precision == "fp32":
            assert artifact.parity.max_abs_error is not None and artifact.parity.max_abs_error < 1e-4
    assert built["executorch-int8"].quantized == {"linear": 11}
    assert requested_providers(entry(), "executorch") == ("executorch",) and cannot_run(entry()) is None
    assert provider_facts("executorch").counts_threads
    checks = [check for check in verify(bundle, runtime="executorch").artifacts if check.artifact in built]
    assert [check.status for check in checks] == ["verified"] * len(built)
    inputs = bundle.golden().inputs(INPUTS)
    with bundle.session(built["executorch-fp32"], OpenOptions()) as session:
        assert session.run({name: array[:3] for name, array in inputs.items()})["logits"].shape == (3, 2)
