"""Operations and bytes of nodes against counts made by hand, and what an estimate says of unchecked operators."""

import math
from typing import Any

import pytest

from edgeformer.artifacts.manifest import ArtifactManifest, Sharing
from edgeformer.estimate.operators import count_node, count_nodes, fuse, stored_weight_bytes, total
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

Shape = tuple[int, ...]


def node(op, inputs, output, *, constant=0, dtype="float", name="n") -> ExecutedNode:
    """``inputs``: shapes, or tensors of another type; ``constant``: bytes of the inputs that are stored."""
    tensors = [of if isinstance(of, Tensor) else Tensor(dtype, of) for of in inputs]
    return ExecutedNode(op, name, tuple(tensors), (Tensor(dtype, output),), constant, 1.0)


def bytes_of(*shapes: Shape) -> int:
    return sum(Tensor("float", shape).bytes for shape in shapes)


LINEAR = node("MatMul", [(2, 16, 64), (64, 192)], (2, 16, 192), constant=64 * 192 * 4)
SCORES = node("FusedMatMul", [(2, 4, 16, 8), (2, 4, 8, 16)], (2, 4, 16, 16))
TABLE = node("Gather", [(500, 64), Tensor("int64", (1, 16))], (1, 16, 64), constant=500 * 64 * 4)
# [64, 192] in blocks of 32: two numbers in a byte, and a scale and half a byte for each block.
PACKED = [(2, 16, 64), Tensor("uint8", (192, 2, 16)), (384,), Tensor("uint8", (192,))]
FOUR_BITS = node("MatMulNBits", PACKED, (2, 16, 192), constant=192 * 32 + 4 * 384 + 192)
PACKED = [Tensor("uint4", (30522, 256)), Tensor("int64", (1, 16)), (30522, 8), Tensor("uint4", (30522, 8))]
FOUR_BIT_TABLE = node("GatherBlockQuantized", PACKED, (1, 16, 256), constant=30522 * (128 + 32 + 4))
# Attention to the keys of earlier tokens reads all of them.
NEW, KEPT, ALL_KEYS = Tensor("float", (2, 1, 64)), Tensor("float", (2, 4, 40, 16)), Tensor("float", (2, 4, 41, 16))
CACHED = ExecutedNode("MultiHeadAttention", "n", (NEW, NEW, NEW, KEPT, KEPT), (NEW, ALL_KEYS, ALL_KEYS), 0, 1.0)
KERNEL, GROUPED, TRANSPOSED = (32, 16, 3, 3), (32, 4, 3, 3), (24, 12, 2, 2)


@pytest.mark.parametrize(
    ("listed", "counts"),
    [
        (LINEAR, {"cls": "gemm", "operations": 2 * 32 * 64 * 192, "weight_bytes": 4 * 64 * 192,
                  "moved_bytes": 4 * (32 * 64 + 32 * 192), "quantized": False}),
        (FOUR_BITS, {"cls": "gemm", "operations": 2 * 32 * 64 * 192, "weight_bytes": 192 * 32 + 4 * 384 + 192,
                     "quantized": True}),
        (SCORES, {"cls": "attention", "operations": 2 * 2 * 4 * 16 * 16 * 8, "weight_bytes": 0}),
        # Transposed on the right: the inner size is the same.
        (node("FusedMatMul", [(2, 4, 16, 8), (2, 4, 16, 8)], (2, 4, 16, 16)), {"operations": 2 * 2 * 4 * 16 * 16 * 8}),
        # The second input is the weight, also where an activation has its shape.
        (node("MatMul", [(64, 64), (64, 64)], (64, 64), constant=64 * 64 * 4),
         {"weight_bytes": 64 * 64 * 4, "moved_bytes": 2 * 64 * 64 * 4}),
        (node("MatMul", [(4, 8), (8, 1)], (4, 1)), {"operations": 2 * 4 * 8}),
        (node("MatMul", [(8,), (8,)], ()), {"operations": 2 * 8}),
        (node("MatMul", [(0, 8), (8, 4)], (0, 4)), {"operations": 0}),
        (node("MatMul", [(4, 8), (8, 0)], (4, 0)), {"operations": 0}),
        # A bias alone makes no weight, and neither does a single number.
        (node("Gemm", [(4, 8), (8, 16), (16,)], (4, 16), constant=16 * 4), {"cls": "attention", "weight_bytes": 0}),
        (node("Gemm", [(4, 1), (1, 1)], (4, 1), constant=4), {"cls": "attention"}),
        (node("Gemm", [(4, 1), (1, 2)], (4, 2), constant=8), {"cls": "gemm", "weight_bytes": 8}),
        # Convolutions: 2 · N · C out · H · W · C in / groups · K · K.
        (node("Conv", [(2, 16, 20, 24), KERNEL], (2, 32, 20, 24), constant=bytes_of(KERNEL)),
         {"cls": "gemm", "operations": 2 * 2 * 32 * 20 * 24 * 16 * 9, "weight_bytes": bytes_of(KERNEL),
          "trust": "convolution"}),
        (node("FusedConv", [(1, 16, 8, 8), GROUPED, (32,)], (1, 32, 8, 8), constant=bytes_of(GROUPED, (32,))),
         {"operations": 2 * 32 * 64 * 4 * 9, "trust": "convolution", "weight_bytes": bytes_of(GROUPED, (32,))}),
        (node("FusedConv", [(1, 16, 8, 8), GROUPED, (32,)], (1, 32, 8, 8), constant=bytes_of(GROUPED, (32,)) - 4),
         {"weight_bytes": bytes_of(GROUPED), "moved_bytes": 4 * (16 * 64 + 32 + 32 * 64)}),
        (node("Conv", [(1, 16, 8, 8), (16, 1, 5, 5)], (1, 16, 8, 8), constant=bytes_of((16, 1, 5, 5))),
         {"operations": 2 * 16 * 64 * 25, "trust": "narrow"}),
        (node("Conv", [(2, 4, 100), (8, 4, 3)], (2, 8, 98), constant=bytes_of((8, 4, 3))),
         {"operations": 2 * 2 * 8 * 98 * 4 * 3}),
        # Every input meets the weights of its channel: 2 · N · C in · H in · W in · C out · K · K.
        (node("ConvTranspose", [(1, 24, 10, 10), TRANSPOSED], (1, 12, 20, 20), constant=bytes_of(TRANSPOSED)),
         {"operations": 2 * 24 * 100 * 12 * 4, "weight_bytes": bytes_of(TRANSPOSED), "trust": "convolution"}),
        (CACHED, {"cls": "attention", "operations": 2 * 2 * 41 * 2 * 64, "trust": "checked",
                  "moved_bytes": 4 * (4 * 2 * 64 + 2 * 2 * 64 * (40 + 41))}),
        # Whole attention: two products with the keys' length.
        (node("MultiHeadAttention", [(2, 16, 64), (2, 20, 64), (2, 24, 64)], (2, 16, 64)),
         {"cls": "attention", "operations": 4 * (2 * 16 * 64) * 20}),
        (node("Attention", [(2, 16, 192)], (2, 16, 64)), {"operations": 4 * (2 * 16 * 64) * 16}),
        (node("MultiHeadAttention", [(16, 64), (20, 64)], (16, 64)), {"operations": 4 * (16 * 64) * 20}),
        (node("MultiHeadAttention", [(64,), (64,)], (64,)), {"operations": 4 * 64}),
        (node("MultiHeadAttention", [(), (20, 64)], (64,)), {"operations": 0}),
        # A lookup moves its rows and not the table; sizes out of a shape are no lookup.
        (TABLE, {"cls": "lookup", "operations": 0, "bytes": 2 * 16 * 64 * 4}),
        (FOUR_BIT_TABLE, {"cls": "lookup", "moved_bytes": 2 * 4 * 16 * 256, "trust": "checked"}),
        (node("Gather", [(3,), ()], ()), {"cls": "layout"}),
        (ExecutedNode("Gather", "n", (), (Tensor("float", (3,)),), 0, 1.0), {"cls": "layout"}),
        (node("Gather", [(3, 5), (2,)], (2, 5)), {"cls": "lookup"}),
        # What holds a graph does nothing itself.
        (node("Loop", [(1,), (100, 100)], (100, 100)), {"operations": 0, "bytes": 0, "trust": "checked"}),
    ],
)  # fmt: skip
def test_work_of_a_node(listed: ExecutedNode, counts: dict[str, Any]) -> None:
    work = count_node(listed)
    assert {name: getattr(work, name) for name in counts} == counts


@pytest.mark.parametrize(
    ("op", "cls", "per_element", "reduces"),
    [
        ("Transpose", "layout", 0, False), ("Reshape", "layout", 0, False), ("Cast", "layout", 0, False),
        ("Softmax", "attention", 5, True), ("Add", "elementwise", 1, False), ("QuickGelu", "elementwise", 5, False),
        ("SimplifiedLayerNormalization", "elementwise", 4, True), ("ReduceMean", "elementwise", 1, True),
        ("LogSoftmax", "attention", 1, True), ("SkipLayerNormalization", "elementwise", 1, True),
        ("CumSum", "elementwise", 1, True),
    ],
)  # fmt: skip
def test_classes(op: str, cls: str, per_element: int, reduces: bool) -> None:
    work, elements = count_node(node(op, [(2, 16, 64)], (2, 16, 64))), 2 * 16 * 64
    assert (work.cls, work.operations, work.reduces) == (cls, per_element * elements, reduces)
    assert work.bytes == (0 if op == "Reshape" else 2 * 4 * elements)


def test_fp16_on_a_gpu_has_two_bytes_and_none_of_the_casts_that_cpus_need() -> None:
    stored = node("Cast", [(64, 192)], (64, 192), constant=64 * 192 * 2, name="InsertedPrecisionFreeCast_w")
    widened = ExecutedNode("Cast", stored.name, (Tensor("float16", (64, 192)),), stored.outputs, 64 * 192 * 2, 1.0)
    product = node("MatMul", [(2, 16, 64), (64, 192)], (2, 16, 192))
    (work,) = count_nodes([widened, product], float_bytes=2)
    assert (work.cls, work.weight_bytes) == ("gemm", 64 * 192 * 2)
    assert [work.cls for work in count_nodes([widened, product])] == ["layout", "gemm"]
    computed = node("Mul", [(64, 192), (64, 192)], (64, 192), constant=64 * 192 * 4)
    assert [work.cls for work in count_nodes([computed, product])] == ["elementwise", "attention"], "no cast"


def test_chains_between_products_become_one_kernel_and_sums_begin_a_new_one() -> None:
    same = [(2, 16, 64)]
    chain = [
        node("SimplifiedLayerNormalization", same, same[0]), LINEAR, node("Add", [*same, (64,)], same[0]),
        node("Mul", same * 2, same[0]), node("Reshape", same, (32, 64)), SCORES, node("Add", same * 2, same[0]),
        node("Softmax", same, same[0]), node("Shape", same, (3,), dtype="int64"), SCORES,
    ]  # fmt: skip
    works = count_nodes(chain)
    assert [[work.operator for work in kernel] for kernel in fuse(works)] == [
        ["SimplifiedLayerNormalization"], ["MatMul"], ["Add", "Mul"], ["product of activations"],
        ["Add"], ["Softmax"], ["product of activations"],
    ]  # fmt: skip
    counted = total(works)
    assert (counted.operators, counted.kernels) == (10, 7)
    assert counted.operations == math.fsum(work.operations for work in works)
    assert fuse(works[2:3]) == [works[2:3]] and fuse([]) == [], "a chain may come first"


def artifact(weight_bytes: int | None, precision: Any = "fp32") -> ArtifactManifest:
    sharing = None
    if weight_bytes is not None:
        sharing = Sharing(unique_parameters=1, stored_parameters=1, weight_bytes=weight_bytes)
    return ArtifactManifest(id="a", file="a", format="onnx", precision=precision, status="built", sharing=sharing)


def stored(nodes: list[ExecutedNode], of: ArtifactManifest) -> float:
    return stored_weight_bytes(nodes, count_nodes(nodes), of)


def test_a_weight_that_every_loop_reads_and_a_tied_table_are_stored_once() -> None:
    weight, table = 64 * 192 * 4, 500 * 64 * 4
    nodes = [TABLE, LINEAR, LINEAR, LINEAR, LINEAR]
    assert stored(nodes, artifact(table + weight)) == pytest.approx(weight)
    assert stored(nodes, artifact(table + 4 * weight)) == pytest.approx(4 * weight)
    assert stored(nodes, artifact(None)) == 4 * weight
    assert stored([], artifact(100)) == 0
    head = node("MatMul", [(1, 16, 64), (64, 500)], (1, 16, 500), constant=64 * 500 * 4)
    both = (64 * 192 + 64 * 500) * 4
    assert stored([TABLE, LINEAR, head], artifact(both)) == both
    # A lookup in what another node computed stores nothing.
    computed = ExecutedNode("Gather", "n", TABLE.inputs, TABLE.outputs, 16 * 8, 1.0)
    other = node("MatMul", [(1, 16, 64), (64, 100)], (1, 16, 100), constant=64 * 100 * 4)
    both = (64 * 192 + 64 * 100) * 4
    assert stored([computed, LINEAR, other], artifact(both)) == both


@pytest.mark.parametrize(("precision", "times"), [("fp32", 1), ("fp16", 2), ("int8", 4)])
def test_weights_that_are_widened_to_compute_take_that_many_bytes(precision: str, times: int) -> None:
    weight = 64 * 192 * 4
    for count in (1, 2):
        of = artifact(count * weight // times, precision)
        assert stored([LINEAR, LINEAR, LINEAR], of) == pytest.approx(count * weight)
