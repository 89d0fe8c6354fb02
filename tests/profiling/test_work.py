"""Operations and bytes of nodes, against counts made by hand."""

from __future__ import annotations

import math

import pytest

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode, Tensor
from edgeformer.formats.manifest import ArtifactManifest, Sharing
from edgeformer.stages.profiling.estimating.work import count_node, count_nodes, fuse, stored_weight_bytes, total

Shape = tuple[int, ...]


def node(
    op: str, inputs: list[Shape], output: Shape, *, constant: int = 0, dtype: str = "float", name: str = "n"
) -> ExecutedNode:
    return ExecutedNode(
        op, name, tuple(Tensor(dtype, shape) for shape in inputs), (Tensor(dtype, output),), constant, 1.0
    )


LINEAR = node("MatMul", [(2, 16, 64), (64, 192)], (2, 16, 192), constant=64 * 192 * 4)
SCORES = node("FusedMatMul", [(2, 4, 16, 8), (2, 4, 8, 16)], (2, 4, 16, 16))


def test_a_product_with_a_weight() -> None:
    work = count_node(LINEAR)
    assert work.cls == "gemm"
    assert work.operations == 2 * (2 * 16) * 64 * 192
    assert work.weight_bytes == 64 * 192 * 4
    assert work.moved_bytes == 4 * (2 * 16 * 64 + 2 * 16 * 192)
    assert (work.rows, work.columns) == (32, 192)


def test_a_product_of_activations() -> None:
    work = count_node(SCORES)
    assert (work.cls, work.weight_bytes) == ("attention", 0)
    assert work.operations == 2 * 2 * 4 * 16 * 16 * 8
    # transposed on the right: the inner size is the same
    transposed = node("FusedMatMul", [(2, 4, 16, 8), (2, 4, 16, 8)], (2, 4, 16, 16))
    assert count_node(transposed).operations == work.operations


def test_an_activation_of_a_weights_shape_is_no_weight() -> None:
    work = count_node(node("MatMul", [(64, 64), (64, 64)], (64, 64), constant=64 * 64 * 4))
    assert (work.weight_bytes, work.moved_bytes) == (64 * 64 * 4, 2 * 64 * 64 * 4)


def test_a_convolution() -> None:
    work = count_node(node("Conv", [(1, 8, 20), (16, 8, 3), (16,)], (1, 16, 18), constant=(16 * 8 * 3 + 16) * 4))
    assert work.cls == "gemm"
    assert work.operations == 2 * 16 * 18 * 8 * 3


def test_a_lookup_moves_its_rows_and_not_the_table() -> None:
    table = ExecutedNode(
        "Gather", "n", (Tensor("float", (30522, 256)), Tensor("int64", (1, 16))), (Tensor("float", (1, 16, 256)),),
        30522 * 256 * 4, 1.0,
    )  # fmt: skip
    work = count_node(table)
    assert (work.cls, work.operations, work.bytes) == ("lookup", 0, 2 * 16 * 256 * 4)


@pytest.mark.parametrize(
    ("op", "cls"),
    [("Transpose", "layout"), ("Reshape", "layout"), ("Softmax", "attention"), ("Add", "elementwise"),
     ("SimplifiedLayerNormalization", "elementwise"), ("QuickGelu", "elementwise"), ("Cast", "layout")],
)  # fmt: skip
def test_classes(op: str, cls: str) -> None:
    work = count_node(node(op, [(2, 16, 64)], (2, 16, 64)))
    assert work.cls == cls
    assert work.bytes == (0 if op == "Reshape" else 2 * 4 * 2 * 16 * 64)


def test_broadcasting_is_an_operator_of_its_own() -> None:
    assert count_node(node("Mul", [(2, 16, 64), (64,)], (2, 16, 64))).key == "Mul broadcast"
    assert count_node(node("Mul", [(2, 16, 64), ()], (2, 16, 64))).key == "Mul"


def test_fp16_on_a_gpu_has_two_bytes_and_none_of_the_casts_that_cpus_need() -> None:
    stored = node("Cast", [(64, 192)], (64, 192), constant=64 * 192 * 2, name="InsertedPrecisionFreeCast_w")
    widened = ExecutedNode("Cast", stored.name, (Tensor("float16", (64, 192)),), stored.outputs, 64 * 192 * 2, 1.0)
    product = node("MatMul", [(2, 16, 64), (64, 192)], (2, 16, 192))
    works = count_nodes([widened, product], float_bytes=2)
    assert len(works) == 1
    assert (works[0].cls, works[0].weight_bytes) == ("gemm", 64 * 192 * 2)
    here = count_nodes([widened, product])
    assert [work.cls for work in here] == ["layout", "gemm"]


def test_chains_between_products_become_one_kernel_and_sums_begin_a_new_one() -> None:
    same = [(2, 16, 64)]
    chain = [
        node("SimplifiedLayerNormalization", same, same[0]), LINEAR, node("Add", [*same, (64,)], same[0]),
        node("Mul", same * 2, same[0]), node("Reshape", same, (32, 64)), SCORES, node("Add", same * 2, same[0]),
        node("Softmax", same, same[0]), node("Shape", same, (3,), dtype="int64"), SCORES,
    ]  # fmt: skip
    works = count_nodes(chain)
    kernels = [[work.key for work in kernel] for kernel in fuse(works)]
    assert kernels == [
        ["SimplifiedLayerNormalization"], ["MatMul"], ["Add broadcast", "Mul"], ["product of activations"],
        ["Add"], ["Softmax"], ["product of activations"],
    ]  # fmt: skip
    counted = total(works)
    assert (counted.operators, counted.kernels) == (10, 7)
    assert counted.operations == math.fsum(work.operations for work in works)


def artifact(weight_bytes: int | None) -> ArtifactManifest:
    sharing = None
    if weight_bytes is not None:
        sharing = Sharing(unique_parameters=1, stored_parameters=1, weight_bytes=weight_bytes)
    return ArtifactManifest(id="a", file="a", format="onnx", precision="fp32", status="built", sharing=sharing)


def test_a_weight_that_every_loop_reads_is_stored_once() -> None:
    one = 64 * 192 * 4
    table = ExecutedNode(
        "Gather", "n", (Tensor("float", (500, 64)), Tensor("int64", (1, 16))), (Tensor("float", (1, 16, 64)),),
        500 * 64 * 4, 1.0,
    )  # fmt: skip
    nodes = [table, LINEAR, LINEAR, LINEAR, LINEAR]
    works = count_nodes(nodes)
    assert sum(work.weight_bytes for work in works) == 4 * one
    assert stored_weight_bytes(nodes, works, artifact(500 * 64 * 4 + one)) == pytest.approx(one)
    assert stored_weight_bytes(nodes, works, artifact(500 * 64 * 4 + 4 * one)) == pytest.approx(4 * one)
    assert stored_weight_bytes(nodes, works, artifact(None)) == 4 * one
