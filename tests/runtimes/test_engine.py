"""TensorRT engines: real ones of tiny graphs where tensorrt-rtx is installed, and the limits that judge them."""

import shutil
import sys
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, numpy_helper

from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import EngineBuild, Precision
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.bundle import Bundle
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.models.weights import load_model
from edgeformer.run import Run, read_run
from edgeformer.runtimes.runtime import BuildJob, Target
from edgeformer.runtimes.tensorrt import RTX_INT8, TensorRTBuilder, TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt import engine as engine_builder
from edgeformer.runtimes.tensorrt.engine import BuiltEngine, axis_sizes, build_engine, graph_bytes, why_engine_rejected
from edgeformer.tasks.scoring import max_batch_rows
from tests.conftest import OLD_FORMAT
from tests.measurement.measuring_child import Interrupting, Recorder
from tests.runtimes.tiny_bundle import parsed

needs_rtx = pytest.mark.skipif(util.find_spec("tensorrt_rtx") is None, reason="the extra rtx is not installed")
POSITIONS, LENGTH = 512, 64
TARGET = Target("tensorrt-rtx", "rtx4050", "8.9")
ENGINE = EngineBuild(
    builder="tensorrt-rtx 1", seconds=1.0, checked_by="builder log", weight_elements={"FP16": 900, "FP32": 30},
    weight_bytes=2000, graph_bytes=2100, shapes={},
)  # fmt: skip


def job(precision: Precision = "fp16", progress: Progress = SILENT, **changes: Any) -> BuildJob:
    build_job = BuildJob(Path(), (), precision, LENGTH, POSITIONS, progress, print, lambda: None)
    return replace(build_job, **changes)


def small_graph(path: Path, dtype: type[np.floating] = np.float16) -> Path:
    """Table, product, product."""
    rng = np.random.default_rng(0)
    shapes = {"table": (100, 64), "wide": (64, 32), "head": (32, 8)}
    weights = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    nodes = "x = Gather (table, input_ids) y = MatMul (x, wide) z = MatMul (y, head) logits = Cast <to = 1> (z)"
    ports = "(int64[batch, sequence] input_ids) => (float[batch, sequence, 8] logits)"
    onnx.save(parsed(f"small {ports} {{ {nodes} }}", opset=20, **weights), path)
    return path


@pytest.fixture(scope="module")
def graph(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looped model's FP16 graph with its weights inside."""
    source = finished_run / "bundle" / "onnx" / "model_fp16.onnx"
    return Path(shutil.copy(source, tmp_path_factory.mktemp("graph")))


@pytest.fixture(scope="module")
def built(graph: Path) -> BuiltEngine:
    pytest.importorskip("tensorrt_rtx")
    return build_engine(graph, graph.with_suffix(".engine"), TARGET, job())


@needs_rtx
class TestRealEngine:
    def test_states_what_it_is_and_stores_every_weight_once(self, built, graph, finished_run):
        import tensorrt_rtx

        engine, unique_bytes = built.engine, read_run(finished_run).parameters * 2
        assert built.reason is None
        assert built.built_for == {"compute_capability": "8.9", "tensorrt-rtx": tensorrt_rtx.__version__}
        assert engine.builder == f"tensorrt-rtx {tensorrt_rtx.__version__}" and engine.checked_by == "builder log"
        assert engine.graph_bytes == graph.stat().st_size
        assert engine.shapes == dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (1, LENGTH), (16, 128)))
        assert engine.layers is not None and engine.layers > 10
        assert engine.layers_by_precision["FP16"] > engine.layers_by_precision["FP32"]
        assert engine.weight_elements["FP16"] > engine.weight_elements["FP32"]
        rotary = 2 * POSITIONS * 8 * 4  # stays in FP32, like the norms
        assert engine.weight_bytes is not None and unique_bytes <= engine.weight_bytes < (unique_bytes + rotary) * 1.1
        # The same seen in the engine itself: a row of each matrix, which two iterations use, is there once.
        plan = graph.with_suffix(".engine").read_bytes()
        matrices = [
            numpy_helper.to_array(tensor)
            for tensor in onnx.load(str(graph)).graph.initializer
            if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT16
        ]
        counts = [plan.count(matrix[3].tobytes()) for matrix in matrices if min(matrix.shape) >= 16]
        assert len(counts) == 6  # the table, q·k·v, their output, and the three of the feed-forward network
        assert max(counts) == 1 and sum(counts) > len(counts) / 2  # a few are stored in another layout

    def test_weights_beside_the_graph_are_read(self, built: BuiltEngine, graph: Path, tmp_path: Path) -> None:
        progress, external = Recorder(), tmp_path / "beside.onnx"
        with weights_file(tmp_path / "beside.onnx_data") as weights:
            write_graph(onnx_ir.load(graph), external, weights)
        rebuilt = build_engine(external, tmp_path / "beside.engine", TARGET, job(progress=progress))
        assert external.stat().st_size < graph.stat().st_size / 2
        assert graph_bytes(external) == pytest.approx(graph_bytes(graph), rel=0.05)
        assert rebuilt.reason is None and rebuilt.engine.weight_bytes == built.engine.weight_bytes
        assert progress.advanced > 0 and "of weights" in progress.messages[-1]

    def test_nothing_is_printed_and_an_exception_cancels_the_build(self, tmp_path, capfd):
        small = small_graph(tmp_path / "small.onnx")
        with pytest.raises(KeyboardInterrupt):
            build_engine(small, tmp_path / "small.engine", TARGET, job(progress=Interrupting()))
        assert not list(tmp_path.glob("*.engine*"))
        assert build_engine(small, tmp_path / "small.engine", TARGET, job()).reason is None
        assert capfd.readouterr() == ("", "")

    def test_an_fp32_graph_is_no_fp16_engine(self, tmp_path: Path) -> None:
        small = small_graph(tmp_path / "small.onnx", np.float32)
        reason = build_engine(small, tmp_path / "small.engine", TARGET, job()).reason
        assert reason is not None and reason.startswith("the engine is not FP16:")
        assert reason.endswith("FP32 and 0 FP16")
        assert build_engine(small, tmp_path / "small.engine", TARGET, job("fp32")).reason is None

    def test_unusable_graphs_are_refused(self, tmp_path: Path) -> None:
        path, content = tmp_path / "x.onnx", small_graph(tmp_path / "small.onnx").read_bytes()

        def expect(error: type[EdgeformerError], message: str) -> None:
            with pytest.raises(error, match=message):
                build_engine(path, tmp_path / "x.engine", TARGET, job())

        expect(ArtifactError, "no such file")
        for damaged in (content[: len(content) // 2], b"", b"not a graph " * 99):
            path.write_bytes(damaged)
            expect(ArtifactError, r"x\.onnx: truncated, damaged, or not an ONNX graph")
        changed = onnx.load_from_string(content)
        changed.graph.node[1].op_type = "NoSuchOperator"
        onnx.save(changed, path)
        expect(EdgeformerError, "cannot parse this graph: NoSuchOperator")
        changed = onnx.load_from_string(content)
        changed.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "past"
        onnx.save(changed, path)
        expect(InputError, "dynamic axis 'past'; engines take batch and sequence")
        assert not list(tmp_path.glob("*.engine*"))


@needs_rtx
class TestBuilder:
    @pytest.mark.slow
    def test_step_and_decode_engines(self, tmp_path: Path) -> None:
        folder = shutil.copytree(OLD_FORMAT / "language-v1" / "bundle", tmp_path / "bundle")
        (folder / "engines").mkdir()
        graphs = tuple(graph for graph in Bundle.open(folder).built("step", "decode") if graph.precision == "fp16")
        built = TensorRTBuilder().build(TARGET, job(bundle=folder, graphs=graphs, max_positions=64))
        engines = {entry.role: entry for entry in built}
        decode, step = engines["decode"], engines["step"]
        assert (decode.id, decode.status, decode.reason) == ("tensorrt-rtx-fp16-decode", "built", None)
        assert decode.engine is not None
        shapes = decode.engine.shapes
        smallest, best, largest = shapes["past_key_values.0.key"]
        assert smallest[2] == 0 and best[2] > 0 and largest[2] >= 63
        assert shapes["input_ids"][0] == shapes["input_ids"][1] == (1, 1), "tuned for a token at a time"
        assert max_batch_rows(decode) == max_batch_rows(step) == 4, "the loop's number is no row"
        assert not any("self-consistent" in warning for warning in decode.engine.warnings)
        assert (step.id, step.status, step.reason) == ("tensorrt-rtx-fp16-step", "built", None)
        assert step.parts.keys() == {"embed", "loop", "readout", "readout_exit"} and step.file == step.parts["loop"]
        assert step.size_bytes == sum((folder / file).stat().st_size for file in step.parts.values())
        assert step.sha256 == sha256_of(folder / str(step.file))
        assert step.engine is not None and step.engine.weight_bytes is not None
        assert step.parity is not None and "verify --write" in str(step.parity.reason)

    @pytest.mark.slow
    def test_trimmed_and_int8_engines(self, tmp_path: Path) -> None:
        """INT8 is quantised for TensorRT, with NNCF."""
        pytest.importorskip("nncf")
        folder = shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", tmp_path / "bundle")
        (folder / "engines").mkdir(exist_ok=True)
        opened = Bundle.open(folder)
        golden = opened.golden().inputs(("input_ids", "attention_mask"))
        calls = [{name: array[row : row + 1] for name, array in golden.items()} for row in range(8)]
        graphs = tuple(opened.artifact(id_) for id_ in ("onnx-fp32", "onnx-int8", "onnx-fp16", "onnx-fp16-trim"))
        notes: list[str] = []
        builds = job(bundle=folder, graphs=graphs, max_positions=64, note=notes.append, calibration=lambda: calls)
        full, small, int8 = TensorRTBuilder().build(TARGET, builds)
        assert (small.id, small.trimmed, small.status) == ("tensorrt-rtx-fp16-trim", True, "built")
        assert small.vocabulary == graphs[3].vocabulary and full.file != small.file
        assert small.file == "engines/model_fp16_trim.rtx4050.engine" and (folder / small.file).is_file()
        assert (int8.id, int8.precision, int8.status, int8.reason) == ("tensorrt-rtx-int8", "int8", "built", None)
        assert int8.parity is not None and int8.parity.tolerance_kind == "score"
        assert RTX_INT8 in notes, "an INT8 engine may gain nothing on an RTX card"
        assert int8.engine is not None and int8.engine.layers_by_precision["INT8"] > 0
        assert int8.engine.weight_elements["INT8"] > int8.engine.weight_elements["FP32"]
        assert sorted(path.suffix for path in (folder / "engines").iterdir() if "int8" in path.name) == [".engine"]

        def no_rows() -> NoReturn:
            raise DataError("lost")

        (without,) = TensorRTBuilder().build(TARGET, replace(builds, graphs=graphs[:2], calibration=no_rows))
        assert without.status == "unavailable" and "no rows to calibrate with: lost" in str(without.reason)


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "reason"), [(1, None), (4, "shared weights were copied, or FP16 was widened")])
def test_torch_tensorrt_compiles_and_its_engine_is_judged_by_size(finished_run, tmp_path, monkeypatch, copies, reason):
    """torch-tensorrt needs a card; a stand-in takes its place, and everything up to it runs on the processor."""
    folder = Path(shutil.copytree(finished_run / "bundle", tmp_path / "bundle"))
    (folder / "engines").mkdir(exist_ok=True)
    opened, run = Bundle.open(folder), Run.open(finished_run)
    graph = opened.artifact("onnx-fp32")
    weights = (folder / str(graph.file)).stat().st_size
    calls: list[dict[str, Any]] = []

    def convert(program: Any, *, use_explicit_typing: bool = False, **options: Any) -> bytes:
        calls.append({"program": program, "use_explicit_typing": use_explicit_typing, **options})
        return bytes(engine_builder.CODE_BYTES + copies * weights)

    import_module("torch._dynamo")  # which looks for an installed TensorRT while it is imported
    package, tensorrt = ModuleType("torch_tensorrt"), ModuleType("tensorrt")
    dynamo = SimpleNamespace(convert_exported_program_to_serialized_trt_engine=convert)
    vars(package).update({"Input": SimpleNamespace, "__version__": "2.13.0", "dynamo": dynamo})
    vars(tensorrt).update({"__version__": "11.0"})
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setattr(engine_builder, "TORCH_DEVICE", "cpu")
    monkeypatch.setattr(engine_builder, "measured_on", lambda: {"gpu": "a card"})
    adapter = run.model_spec.adapter
    module = adapter.whole(adapter.exported(load_model(finished_run))).eval()
    lengths = {"max_length": run.recipe.data.tokens_at_once, "max_positions": run.recipe.model.max_positions}
    builds = job("fp32", bundle=folder, graphs=(graph,), module=lambda graph: module, **lengths)
    batch, sequence = axis_sizes(builds).values()
    (entry,) = TorchTensorRTBuilder().build(Target("torch-tensorrt", "h200", "9.0"), builds)
    (call,) = calls
    assert call["disable_tf32"] and call["offload_module_to_cpu"] and call["use_explicit_typing"]
    assert [tensor.name for tensor in call["arg_inputs"]] == list(graph.inputs)
    for tensor in call["arg_inputs"]:
        assert [tensor.min_shape, tensor.opt_shape, tensor.max_shape] == [*zip(batch, sequence, strict=True)]
    limits = call["program"].range_constraints.values()
    assert {(int(limit.lower), int(limit.upper)) for limit in limits} == {(1, batch[2]), (1, sequence[2])}
    assert entry.built_for == {
        "compute_capability": "9.0", "torch-tensorrt": "2.13.0", "tensorrt": "11.0", "gpu": "a card",
    }  # fmt: skip
    assert entry.status == ("built" if reason is None else "rejected") and entry.file is not None
    assert reason in str(entry.reason) if reason else entry.reason is None
    assert entry.engine is not None and (entry.engine.checked_by, entry.engine.graph_bytes) == ("size", weights)
    monkeypatch.delattr(dynamo, "convert_exported_program_to_serialized_trt_engine")
    (failed,) = TorchTensorRTBuilder().build(Target("torch-tensorrt", "h200", "9.0"), builds)
    assert failed.status == "rejected" and failed.file is None
    assert "model.h200.torch.engine: torch-tensorrt cannot compile this model: AttributeError" in str(failed.reason)


def test_size_and_warnings_decide() -> None:
    of_size = {"weight_bytes": None, "weight_elements": {}, "checked_by": "size"}
    for changes, size_bytes, message in (
        ({}, 9000, None),  # code beside the weights does not count
        ({"weight_bytes": 4000}, 9000, "its weights take 3.9 KiB, more than 1.2 × the graph of 2.1 KiB"),
        (of_size, engine_builder.CODE_BYTES + 2400, None),
        (of_size, engine_builder.CODE_BYTES + 2600, "its weights take 2.5 KiB"),
        ({"warnings": ("Make sure input input_ids has Int64 binding.",)}, 2400, None),
        ({"warnings": ("Running layernorm with FP16 Reduce may cause overflow.",)}, 2400, "layernorm"),
    ):
        reason = why_engine_rejected(ENGINE.model_copy(update=changes), size_bytes, "fp16")
        assert reason is None if message is None else message in str(reason)
