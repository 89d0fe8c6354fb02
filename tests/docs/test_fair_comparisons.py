"""What the benchmarks of speed compare with: the processor's floor."""

import onnx
import pytest
from onnx import numpy_helper

from benchmarks.floors import floor_s, needed_by
from edgeformer.bundle import Bundle
from tests.docs.document import ROOT


def test_the_floor_reads_the_weights_of_a_loop_once() -> None:
    bundle = Bundle.open(ROOT / "tests" / "old_format" / "classifier-v1" / "bundle")
    graph = onnx.load(str(bundle.folder / str(bundle.artifact("onnx-fp32").file))).graph
    sizes = {item.name: numpy_helper.to_array(item).nbytes for item in graph.initializer}
    read = [name for node in graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input if name in sizes]
    single, in_every_loop = sum(sizes[name] for name in {*read}), sum(sizes[name] for name in read)
    needed = needed_by(bundle, (1, 16))
    # The file's other small arrays are no products', but the manifest does not tell them apart.
    assert single <= needed.weight_bytes < 0.7 * in_every_loop
    slow_memory = {"fp32": 1e30, "int8": 1e30, "bandwidth": 1e6}
    assert floor_s(needed, slow_memory, "fp32") == pytest.approx(needed.weight_bytes / 1e6)
    assert floor_s(needed, slow_memory, "int8") == pytest.approx(needed.weight_bytes / 4e6)
