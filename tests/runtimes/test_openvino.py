"""OpenVINO: FP32 and bfloat16, INT8 by NNCF, fused rotations, no telemetry, and what is said where it is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.errors import InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.progress import SILENT
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.run import locate
from edgeformer.runtimes import OpenOptions, cannot_run, opener_of, provider_facts, requested_providers
from edgeformer.runtimes.openvino import Int8Builder
from edgeformer.runtimes.openvino import session as runtime
from edgeformer.runtimes.openvino.session import OpenVINOSession, fuse_rotations
from edgeformer.runtimes.runtime import BuildJob, Target
from tests.conftest import OLD_FORMAT
from tests.runtimes.tiny_bundle import VOCABULARY, write_bundle

NEEDS_OPENVINO = pytest.mark.skipif(runtime.OPENVINO.missing() is not None, reason="openvino is not installed")
CPU, BF16 = runtime.CPU, runtime.CPU_BF16


def has_bf16() -> bool:
    return "BF16" in runtime.core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.fixture
def tiny(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle"))


def test_runtimes_are_asked_for_by_name(tiny: Bundle) -> None:
    (entry,) = tiny.artifacts
    assert requested_providers(entry, "onnxruntime") == ("CPUExecutionProvider",)
    assert requested_providers(entry, "openvino") == (CPU, BF16) and requested_providers(entry, BF16) == (BF16,)
    assert opener_of(entry, CPU).name == "openvino" and opener_of(entry).name == "onnxruntime"
    assert provider_facts(BF16).rounds_to == "bf16" and provider_facts(CPU).rounds_to is None
    engine = entry.model_copy(update={"format": "tensorrt-rtx"})
    assert requested_providers(engine, "openvino") == ()
    # Its tables are an operator of ONNX Runtime's own.
    assert requested_providers(entry.model_copy(update={"precision": "int4"}), "openvino") == ()
    with pytest.raises(InputError, match="no such runtime; give one of onnxruntime, openvino, torch, all"):
        requested_providers(entry, "tflite")


def test_without_the_package_it_says_which_one_is_missing(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (entry,) = tiny.artifacts
    assert cannot_run(entry) is None
    assert requested_providers(entry, "all") == ("CPUExecutionProvider",)
    monkeypatch.delitem(sys.modules, "edgeformer.runtimes.openvino.session", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)  # also where another test has imported it
    with pytest.raises(MissingDependencyError, match=r"openvino is not installed .*\[openvino\]"):
        tiny.session(entry, OpenOptions(CPU))


@NEEDS_OPENVINO
def test_fp32_is_what_onnx_runtime_computes_and_bf16_is_close(tiny: Bundle) -> None:
    (entry,) = tiny.artifacts
    inputs = {name: tiny.golden().arrays[name] for name in ("input_ids", "attention_mask")}
    answers = {}
    for provider in (None, CPU, *([BF16] if has_bf16() else [])):
        with tiny.session(entry, OpenOptions(provider, 1)) as session:
            answers[provider] = session.run(inputs)["logits"]
            if provider is not None:
                hints = {"inference_precision_hint": runtime.HINTS[provider], "performance_hint": "LATENCY"}
                expected = {"num_streams": 1, "inference_num_threads": 1, **hints}
                assert (session.provider, session.settings()) == (provider, expected)
    np.testing.assert_allclose(answers[CPU], answers[None], atol=1e-6)
    assert 0 < abs(answers.get(BF16, answers[None] + 1e-3) - answers[None]).max() < 0.1


@NEEDS_OPENVINO
def test_a_named_runtime_answers_and_its_scores_are_shown_and_not_kept(tmp_path: Path) -> None:
    run = tmp_path / "artifacts" / "classifier-v1"
    shutil.copytree(OLD_FORMAT / "classifier-v1", run)
    kept = (run / "evaluation.json").read_bytes()
    result = evaluate(locate(str(run), run.parent), EvaluateOptions("onnx-fp32", runtime="all"))
    providers = [row.provider for row in result.rows]
    assert providers[:2] == ["CPUExecutionProvider", CPU] and len(set(providers)) == len(providers)
    assert result.rows[0].loss == pytest.approx(result.rows[1].loss, abs=1e-5)
    assert (run / "evaluation.json").read_bytes() == kept
    (_, usual), (_, other) = (
        predict(locate(str(run), run.parent), ["a fine film"], runtime=runtime) for runtime in (None, "openvino")
    )
    first, second = usual[0].as_dict(), other[0].as_dict()
    assert first["label"] == second["label"] and first["probability"] == pytest.approx(second["probability"], abs=1e-5)
    with pytest.raises(InputError, match="--runtime all: this command uses one"):
        predict(locate(str(run), run.parent), ["a fine film"], runtime="all")


@NEEDS_OPENVINO
def test_a_processor_without_bfloat16_is_told_so(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "core", lambda: SimpleNamespace(get_property=lambda *_: ["FP32"]))
    with pytest.raises(InputError, match=r"openvino-cpu-bf16.*no bfloat16 instructions"):
        tiny.session(tiny.artifacts[0], OpenOptions(BF16))


@NEEDS_OPENVINO
def test_what_openvino_would_answer_with_anything_is_refused(tiny: Bundle) -> None:
    """It takes unknown ids for rows of zeros, and texts beyond the positions without a word."""
    inputs = {name: tiny.golden().arrays[name] for name in ("input_ids", "attention_mask")}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with tiny.session(tiny.artifacts[0], OpenOptions(CPU)) as session:
        for broken, why in (
            ({"input_ids": np.full_like(ids, VOCABULARY), "attention_mask": mask}, "outside the model's vocabulary"),
            ({"input_ids": ids, "attention_mask": mask[:, :-1].copy()}, "the graph does not accept"),
            ({"input_ids": np.tile(ids, 3), "attention_mask": np.tile(mask, 3)}, "takes at most"),
        ):
            with pytest.raises(InputError, match=why):
                session.run(broken)


@pytest.mark.slow
@NEEDS_OPENVINO
def test_importing_it_sends_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    """In a process of its own, whose home is empty and in which opening a connection ends it."""
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from edgeformer.runtimes.openvino.session import core\n"
        "core()\n"
        "from edgeformer.runtimes.openvino.session import without_telemetry\n"
        "with without_telemetry():\n"
        "    try:\n        import nncf\n"
        "    except ImportError: pass\n"
        "import threading\n"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry')], threading.active_count())\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "USERPROFILE": str(home), "PYTHONPATH": str(Path(runtime.__file__).parents[3])}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "[] 1"), done.stderr
    assert [path for path in home.rglob("*") if "intel" in str(path).lower() or "openvino" in str(path)] == []


def test_int8_has_seven_bits_and_fuses_no_rotations_in_bfloat16(finished_run: Path, tmp_path: Path) -> None:
    """Of a graph that is calibrated with its golden inputs."""
    pytest.importorskip("nncf", reason="nncf is not installed")
    folder = shutil.copytree(finished_run / "bundle", tmp_path / "bundle")
    (folder / "engines").mkdir(exist_ok=True)
    bundle = Bundle.open(folder)
    golden = bundle.golden().inputs(("input_ids", "attention_mask"))
    calls = [{name: array[row : row + 1] for name, array in golden.items()} for row in range(8)]
    job = BuildJob(
        folder, (bundle.artifact("onnx-fp32"),), "fp32", 24, 64, SILENT, print, lambda: None,
        calibration=lambda: calls,
    )  # fmt: skip
    (entry,) = Int8Builder().build(Target("openvino", precision="int8"), job)
    assert (entry.id, entry.status, entry.precision) == ("openvino-int8", "built", "int8") and entry.built_with["nncf"]
    assert entry.sha256 == sha256_of(bundle.folder / str(entry.file))
    graph = onnx.load(str(bundle.folder / str(entry.file))).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    used = [pairs.get(name) for node in graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input]
    weights = {name for name in used if name in stored}
    assert len(used) > 2 * len(weights) > 8, "both loops multiply by the same stored weight"
    assert max(int(abs(stored[name].astype(int)).max()) for name in weights) == 64
    named = [name for name in stored if name.endswith(("_scale", "_zero_point"))]
    assert len(named) > len(weights), "which do not count as parameters"
    # In bfloat16 the kernel of rotations is slower than its parts.
    for provider in (CPU, BF16)[: 2 if has_bf16() else 1]:
        with runtime.OpenVINOSession(bundle.folder / str(entry.file), provider, 1) as session:
            assert (kernels_of(session._request.get_compiled_model()) > 0) == (provider == CPU)


@pytest.mark.slow
def test_export_judges_and_verifies_int8(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="nncf is not installed")
    run = shutil.copytree(finished_run, tmp_path / finished_run.name)
    export(run, ExportOptions(int8=True, joining=True, keep_going=True))
    bundle = Bundle.open(run / "bundle")
    result = bundle.artifact("openvino-int8")
    assert (result.status, result.format, result.precision) == ("built", "openvino", "int8"), result.reason
    fp32 = bundle.artifact("onnx-fp32")
    assert result.size_bytes is not None and fp32.size_bytes is not None and result.size_bytes < 0.6 * fp32.size_bytes
    assert result.parity is not None and result.parity.provider == CPU and result.parity.top1_agreement is not None
    assert result.parity.top1_agreement > 0.9 and result.validation is not None
    assert result.sharing is not None and fp32.sharing is not None
    assert result.sharing.stored_parameters == fp32.sharing.stored_parameters == result.sharing.unique_parameters
    assert result.quantized["MatMul"] >= 8 and result.built_with["nncf"]
    checks = {
        (check.artifact, check.parity.provider if check.parity else None): check
        for check in verify(bundle, runtime="all").artifacts
    }
    assert checks["openvino-int8", CPU].status == "verified"
    assert requested_providers(bundle.artifact("onnx-int8"), "openvino") == (CPU,)
    assert requested_providers(result, "all") == (CPU, BF16)
    if has_bf16():  # what is not INT8 in it is computed in bfloat16, and that was judged, too
        assert result.rounded[BF16].validation is not None and result.rounded[BF16].reason is None
        assert checks["openvino-int8", BF16].status == "verified"
        assert checks["openvino-int8", BF16].parity == result.rounded[BF16].parity != result.parity
    else:
        assert result.rounded == {} and ("openvino-int8", BF16) not in checks
    file = bundle.folder / "engines" / "model_int8.openvino.onnx"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(InputError, match="changed since it was exported"):
        Bundle.open(run / "bundle").session(result)


def rotated(
    shape: tuple[int, ...] = (2, 3, 5, 8), table: tuple[int, ...] = (5, 4), kind: str = "float32", joined: int = 3,
    look_alike: str = "",
) -> Any:  # fmt: skip
    """Rotate the halves of the last axis of x by tables; a look-alike adds the wrong products or another x."""
    runtime.core()
    import openvino as package

    ops = package.opset13
    x, other = (ops.parameter(shape, np.dtype(kind)) for _ in range(2))
    cos, sin = (ops.parameter(table, np.dtype(kind)) for _ in range(2))
    first, second = ops.split(x, ops.constant(3), 2).outputs()
    third, fourth = ops.split(other if look_alike == "another x" else x, ops.constant(3), 2).outputs()
    if look_alike != "another x":
        third, fourth = first, second
    angles = (cos, sin) if look_alike == "the same products" else (sin, cos)
    terms = [ops.multiply(angles[1], fourth), ops.multiply(angles[0], third)]
    turned = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin))
    return package.Model([ops.concat([turned, ops.add(*terms)], joined)], [x, other, cos, sin])


@NEEDS_OPENVINO
def test_an_encoder_is_computed_with_fused_rotations(finished_run: Path) -> None:
    bundle = Bundle.open(finished_run / "bundle")
    config = json.loads((bundle.folder / "config.json").read_text(encoding="utf-8"))["edgeformer"]
    entry = bundle.artifact("onnx-fp32")
    rows = {"input_ids": np.array([[5, 6, 7, 8, 9, 10]]), "attention_mask": np.array([[1, 1, 1, 1, 0, 0]])}
    with bundle.session(entry, OpenOptions(runtime.CPU)) as fused, bundle.session(entry) as plain:
        assert isinstance(fused, OpenVINOSession)
        per_pass = 2 * config["layers"]
        assert kernels_of(fused._request.get_compiled_model()) == per_pass * config["iterations"] > 0
        actual, expected = fused.run(rows), plain.run(rows)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-5)


@NEEDS_OPENVINO
@pytest.mark.parametrize(
    ("changes", "rewritten"),
    [
        ({}, 1), ({"kind": "float16"}, 1), ({"table": (3, 5, 4)}, 0), ({"shape": (2, 3, 1, 8)}, 0),
        ({"table": (1, 4)}, 0), ({"joined": 2}, 0), ({"look_alike": "the same products"}, 0),
        ({"look_alike": "another x"}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_only_rotations_are_rewritten_and_stay_what_they_are(changes: dict[str, Any], rewritten: int) -> None:
    draw = np.random.default_rng(0)
    plain, changed = rotated(**changes), rotated(**changes)
    feed = [draw.normal(size=list(port.shape)).astype(port.element_type.to_dtype()) for port in plain.inputs]
    assert fuse_rotations(changed) == rewritten
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = [runtime.core().compile_model(model, "CPU", options) for model in (plain, changed)]
    expected, actual = (next(iter(model(feed).values())) for model in compiled)
    assert [*map(kernels_of, compiled)] == [0, rewritten]
    assert actual == pytest.approx(expected, abs=(2e-3 if "kind" in changes else 1e-6) * rewritten)


def kernels_of(compiled: Any) -> int:
    """Rotations in what OpenVINO made of a graph."""
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    return sum((kind if isinstance(kind, str) else kind.astype(str)) == "RoPE" for kind in kinds)
