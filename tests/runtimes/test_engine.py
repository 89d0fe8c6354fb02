"""TensorRT engines: real ones of tiny graphs where tensorrt-rtx is installed, and the bars that judge them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.manifest import Engine, Precision
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.run import read_run
from edgeformer.runtimes.runtime import BuildJob, Target
from edgeformer.runtimes.tensorrt.engine import (
    BuiltEngine,
    build_engine,
    graph_bytes,
    read_listing,
    read_total,
    why_engine_rejected,
)

needs_rtx = pytest.mark.skipif(
    util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx, of the extra rtx, is not installed"
)
POSITIONS, LENGTH = 512, 64
ENGINE = "model_fp16.rtx4050.engine"


TARGET = Target("tensorrt-rtx", "rtx4050", "8.9")


def job(precision: Precision = "fp16", progress: Progress = SILENT) -> BuildJob:
    return BuildJob(Path(), (), precision, LENGTH, POSITIONS, None, progress, print, lambda: None)


@dataclass
class Counting:
    """Progress that records its calls."""

    done: int = 0
    lines: list[str] = field(default_factory=list)

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.lines.append(description)

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.done += amount

    def finish(self) -> None:
        pass

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def graph(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looped model's FP16 graph with its weights inside; the same one with weights beside it is ``beside.onnx``."""
    folder = tmp_path_factory.mktemp("graph")
    path = Path(shutil.copy(finished_run / "bundle" / "onnx" / "model_fp16.onnx", folder))
    with weights_file(folder / "beside.onnx_data") as weights:
        write_graph(onnx_ir.load(path), folder / "beside.onnx", weights)
    return path


@pytest.fixture(scope="module")
def parameters(finished_run: Path) -> int:
    return read_run(finished_run).parameters


@pytest.fixture(scope="module")
def built(graph: Path) -> BuiltEngine:
    pytest.importorskip("tensorrt_rtx")
    return build_engine(graph, graph.parent / ENGINE, TARGET, job())


@needs_rtx
class TestRealEngine:
    def test_says_what_it_is_and_for_whom(self, built: BuiltEngine, graph: Path, parameters: int) -> None:
        import tensorrt_rtx

        engine = built.engine
        assert built.reason is None
        assert built.built_for == {"compute_capability": "8.9", "tensorrt-rtx": tensorrt_rtx.__version__}
        assert engine.builder == f"tensorrt-rtx {tensorrt_rtx.__version__}"
        assert (graph.parent / ENGINE).stat().st_size > parameters * 2
        assert engine.graph_bytes == graph.stat().st_size
        assert engine.shapes == dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (1, LENGTH), (16, 128)))

    def test_is_fp16_by_the_builders_own_listing(self, built: BuiltEngine) -> None:
        engine = built.engine
        assert engine.checked_by == "builder log"
        assert engine.layers is not None and engine.layers > 10
        assert engine.layers_by_precision["FP16"] > engine.layers_by_precision["FP32"]
        assert engine.weight_elements["FP16"] > engine.weight_elements["FP32"]

    def test_stores_every_weight_once(self, built: BuiltEngine, graph: Path, parameters: int) -> None:
        unique = parameters * 2
        assert built.engine.weight_bytes is not None
        rotary = 2 * POSITIONS * 8 * 4  # stays in FP32, like the norms
        assert unique <= built.engine.weight_bytes < (unique + rotary) * 1.1
        # The same seen in the engine itself: a row of each matrix, which two iterations use, is there once.
        plan = (graph.parent / ENGINE).read_bytes()
        matrices = [
            numpy_helper.to_array(tensor)
            for tensor in onnx.load(str(graph)).graph.initializer
            if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT16
        ]
        parsed = [plan.count(matrix[3].tobytes()) for matrix in matrices if min(matrix.shape) >= 16]
        assert len(parsed) == 6  # the table, q·k·v, their output, and the three of the feed-forward network
        assert max(parsed) == 1 and sum(parsed) > len(parsed) / 2  # a few are stored in another layout

    def test_weights_beside_the_graph_are_found(self, built: BuiltEngine, graph: Path) -> None:
        progress = Counting()
        external = graph.parent / "beside.onnx"
        rebuilt = build_engine(external, graph.parent / "beside.engine", TARGET, job(progress=progress))
        assert external.stat().st_size < graph.stat().st_size / 2
        assert graph_bytes(external) == pytest.approx(graph_bytes(graph), rel=0.05)
        assert rebuilt.reason is None
        assert rebuilt.engine.weight_bytes == built.engine.weight_bytes
        assert progress.done > 0
        assert "built in" in progress.lines[-1] and "of weights" in progress.lines[-1]

    def test_nothing_is_printed_and_an_exception_cancels_the_build(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class Stopping(Counting):
            def advance(self, amount: int = 1, **fields: float) -> None:
                raise KeyboardInterrupt

        graph = small_graph(tmp_path / "small.onnx")
        with pytest.raises(KeyboardInterrupt):
            build_engine(graph, tmp_path / "small.engine", TARGET, job(progress=Stopping()))
        assert not list(tmp_path.glob("*.engine*"))
        assert build_engine(graph, tmp_path / "small.engine", TARGET, job()).reason is None
        assert capfd.readouterr() == ("", "")

    def test_a_graph_in_fp32_is_no_fp16_engine(self, tmp_path: Path) -> None:
        graph = small_graph(tmp_path / "small.onnx", np.float32)
        wide = build_engine(graph, tmp_path / "small.engine", TARGET, job())
        assert wide.reason is not None
        assert wide.reason.startswith("is not FP16:") and wide.reason.endswith("elements are FP32, 0 FP16")
        assert build_engine(graph, tmp_path / "small.engine", TARGET, job("fp32")).reason is None

    def test_a_normalisation_in_fp16_is_rejected(self, tmp_path: Path) -> None:
        graph = small_graph(tmp_path / "norm.onnx", norm=True)
        reason = build_engine(graph, tmp_path / "norm.engine", TARGET, job()).reason
        assert reason is not None and "Detected layernorm nodes in FP16" in reason

    def test_damaged_graphs_are_refused(self, graph: Path, tmp_path: Path) -> None:
        content = graph.read_bytes()
        for name, damaged in (("half", content[: len(content) // 2]), ("empty", b""), ("text", b"not a graph " * 99)):
            path = tmp_path / f"{name}.onnx"
            path.write_bytes(damaged)
            with pytest.raises(ArtifactError, match=rf"{name}\.onnx: truncated, damaged, or not an ONNX graph"):
                build_engine(path, tmp_path / "x.engine", TARGET, job())
        with pytest.raises(ArtifactError, match="no such file"):
            build_engine(tmp_path / "nothing.onnx", tmp_path / "x.engine", TARGET, job())
        assert not list(tmp_path.glob("*.engine*"))

    def test_what_the_parser_does_not_take_is_named(self, tmp_path: Path) -> None:
        incomplete = onnx.load(str(small_graph(tmp_path / "lost.onnx")))
        del incomplete.graph.initializer[1]
        onnx.save(incomplete, tmp_path / "lost.onnx")
        with pytest.raises(ArtifactError, match=r"not an ONNX graph \(MatMul .*was not registered"):
            build_engine(tmp_path / "lost.onnx", tmp_path / "x.engine", TARGET, job())
        strange = onnx.load(str(small_graph(tmp_path / "strange.onnx")))
        strange.graph.node[1].op_type = "NoSuchOperator"
        onnx.save(strange, tmp_path / "strange.onnx")
        with pytest.raises(EdgeformerError, match="parser does not take this graph: NoSuchOperator"):
            build_engine(tmp_path / "strange.onnx", tmp_path / "x.engine", TARGET, job())

    def test_a_graph_with_caches_is_out_of_scope(self, tmp_path: Path) -> None:
        graph = onnx.load(str(small_graph(tmp_path / "cache.onnx")))
        graph.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "past"
        onnx.save(graph, tmp_path / "cache.onnx")
        with pytest.raises(InputError, match="dynamic axis 'past'"):
            build_engine(tmp_path / "cache.onnx", tmp_path / "x.engine", TARGET, job())


def small_graph(path: Path, dtype: type[np.floating] = np.float16, *, norm: bool = False) -> Path:
    """Table, product, product; with ``norm`` a layer normalisation between, spelled out in the graph's own type."""
    rng = np.random.default_rng(0)
    shapes = {"table": (100, 64), "wide": (64, 32), "head": (32, 8), "one": (1,), "two": (1,)}
    weights = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    weights["two"][:] = 2
    nodes = [("Gather", ["table", "input_ids"], "x"), ("MatMul", ["x", "wide"], "y")]
    if norm:
        nodes += [
            ("ReduceMean", ["y", "last"], "mean"),
            ("Sub", ["y", "mean"], "centred"),
            ("Pow", ["centred", "two"], "squares"),
            ("ReduceMean", ["squares", "last"], "variance"),
            ("Add", ["variance", "one"], "safe"),
            ("Sqrt", ["safe"], "deviation"),
            ("Div", ["centred", "deviation"], "normal"),
        ]
    nodes += [("MatMul", ["normal" if norm else "y", "head"], "narrow")]
    kept = [name for name in weights if any(name in inputs for _, inputs, _ in nodes)]
    graph = helper.make_graph(
        [
            *(helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes),
            helper.make_node("Cast", ["narrow"], ["logits"], to=TensorProto.FLOAT),
        ],
        "small",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 8])],
        [numpy_helper.from_array(weights[name], name) for name in kept]
        + [numpy_helper.from_array(np.array([-1]), "last")] * norm,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


class TestBars:
    engine = Engine(
        builder="tensorrt-rtx 1",
        seconds=1.0,
        checked_by="builder log",
        weight_elements={"FP16": 900, "FP32": 30},
        weight_bytes=2000,
        graph_bytes=2100,
        shapes={},
    )

    def changed(self, **changes: object) -> Engine:
        return self.engine.model_copy(update=changes)

    def test_code_beside_the_weights_does_not_count(self) -> None:
        assert why_engine_rejected(self.engine, size_bytes=9000, precision="fp16") is None

    def test_weights_that_were_copied(self) -> None:
        reason = why_engine_rejected(self.changed(weight_bytes=4000), 9000, "fp16")
        assert reason is not None and "its weights take 3.9 KiB, more than 1.2 × the graph of 2.1 KiB" in reason

    def test_where_the_builder_does_not_tell_the_engines_size_is_judged(self) -> None:
        unknown = self.changed(weight_bytes=None, weight_elements={}, checked_by="size")
        assert why_engine_rejected(unknown, 2400, "fp16") is None
        assert "it take" in str(why_engine_rejected(unknown, 2600, "fp16"))

    def test_ordinary_warnings_are_no_fault(self) -> None:
        noted = self.changed(warnings=("Make sure input input_ids has Int64 binding.",))
        assert why_engine_rejected(noted, 2400, "fp16") is None
        norm = self.changed(warnings=("Running layernorm after self-attention with FP16 Reduce may cause overflow.",))
        assert "layernorm" in str(why_engine_rejected(norm, 2400, "fp16"))


class TestListings:
    def test_what_is_no_listing_is_none_and_not_a_guess(self) -> None:
        assert read_listing("Layers:\nsomething in another format") is None
        assert read_total("Total Weights Memory: 4096 bytes", "Total Weights Memory") == 4096
        assert read_total("something else", "Total Weights Memory") is None
