"""Operations and bytes of nodes, against counts made by hand."""

from __future__ import annotations

import math

import pytest

from edgeformer.artifacts.manifest import ArtifactManifest, Sharing
from edgeformer.estimate.operators import count_node, count_nodes, fuse, stored_weight_bytes, total
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

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


def test_a_product_with_a_weight_of_four_bits() -> None:
    """[64, 192] in blocks of 32: two numbers in a byte, and a scale and half a byte for each block."""
    inputs = (
        Tensor("float", (2, 16, 64)), Tensor("uint8", (192, 2, 16)), Tensor("float", (384,)), Tensor("uint8", (192,)),
    )  # fmt: skip
    stored = 192 * 32 + 4 * 384 + 192
    work = count_node(ExecutedNode("MatMulNBits", "n", inputs, (Tensor("float", (2, 16, 192)),), stored, 1.0))
    assert (work.cls, work.operations) == ("gemm", 2 * (2 * 16) * 64 * 192)
    assert work.weight_bytes == stored
    assert work.quantized
    assert (work.rows, work.columns) == (32, 192)


def test_a_lookup_in_four_bits_moves_its_rows_and_not_the_table() -> None:
    table = Tensor("uint4", (30522, 256))
    assert table.bytes == 30522 * 128
    inputs = (table, Tensor("int64", (1, 16)), Tensor("float", (30522, 8)), Tensor("uint4", (30522, 8)))
    stored = 30522 * (128 + 32 + 4)
    work = count_node(ExecutedNode("GatherBlockQuantized", "n", inputs, (Tensor("float", (1, 16, 256)),), stored, 1.0))
    assert (work.cls, work.moved_bytes, work.trust) == ("lookup", 2 * 4 * 16 * 256, "checked")


def test_attention_to_what_is_kept_reads_all_of_it() -> None:
    new, kept = Tensor("float", (2, 1, 64)), Tensor("float", (2, 4, 40, 16))
    base = Tensor("float", (2, 4, 41, 16))
    work = count_node(ExecutedNode("MultiHeadAttention", "n", (new, new, new, kept, kept), (new, base, base), 0, 1.0))
    assert (work.cls, work.operations, work.trust) == ("attention", 2 * 2 * 41 * 2 * 64, "checked")
    assert work.moved_bytes == 4 * (4 * 2 * 64 + 2 * 2 * 64 * (40 + 41))


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
    kernels = [[work.operator for work in kernel] for kernel in fuse(works)]
    assert kernels == [
        ["SimplifiedLayerNormalization"], ["MatMul"], ["Add", "Mul"], ["product of activations"],
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


def test_elementwise_operations_are_per_element_written_and_layout_computes_nothing() -> None:
    same = [(2, 16, 64)]
    elements = 2 * 16 * 64
    counted = {
        op: count_node(node(op, same, same[0])).operations for op in ("Add", "Softmax", "QuickGelu", "Transpose")
    }
    assert counted == {"Add": elements, "Softmax": 5 * elements, "QuickGelu": 5 * elements, "Transpose": 0}


@pytest.mark.parametrize(
    ("op", "output", "dtype", "host"),
    [
        ("Shape", (300,), "int64", True),
        ("Add", (64,), "int64", True),
        ("Add", (65,), "int64", False),
        ("Add", (64,), "float", False),
    ],
)
def test_bookkeeping_on_shapes_is_the_hosts(op: str, output: Shape, dtype: str, host: bool) -> None:
    assert count_node(node(op, [output], output, dtype=dtype)).host_only is host


@pytest.mark.parametrize(
    ("op", "reduces"),
    [("ReduceMean", True), ("LogSoftmax", True), ("SkipLayerNormalization", True), ("CumSum", True), ("Add", False)],
)
def test_sums_over_an_axis(op: str, reduces: bool) -> None:
    assert count_node(node(op, [(2, 300)], (2, 300))).reduces is reduces


@pytest.mark.parametrize(
    ("weights", "inputs", "quantized"),
    [("int8", "uint8", True), ("uint8", "uint8", True), ("float", "int8", False)],
)
def test_what_computes_in_int8_is_told_by_its_weights(weights: str, inputs: str, quantized: bool) -> None:
    product = ExecutedNode(
        "MatMulInteger", "n", (Tensor(inputs, (16, 64)), Tensor(weights, (64, 192))), (Tensor("int32", (16, 192)),),
        Tensor(weights, (64, 192)).bytes, 1.0,
    )  # fmt: skip
    assert count_node(product).quantized is quantized


def test_whole_attention_is_two_products_with_the_keys_length() -> None:
    across = node("MultiHeadAttention", [(2, 16, 64), (2, 20, 64), (2, 24, 64)], (2, 16, 64))
    assert count_node(across).operations == 4 * (2 * 16 * 64) * 20
    assert count_node(across).cls == "attention"
    packed = node("Attention", [(2, 16, 192)], (2, 16, 64))
    assert count_node(packed).operations == 4 * (2 * 16 * 64) * 16
    flat = node("MultiHeadAttention", [(16, 64), (20, 64)], (16, 64))
    assert count_node(flat).operations == 4 * (16 * 64) * 20
    assert count_node(node("MultiHeadAttention", [(64,), (64,)], (64,))).operations == 4 * 64
    assert count_node(node("MultiHeadAttention", [(), (20, 64)], (64,))).operations == 0


def test_products_at_the_edge() -> None:
    vector = count_node(node("MatMul", [(4, 8), (8, 1)], (4, 1)))
    assert (vector.operations, vector.rows, vector.columns) == (2 * 4 * 8, 4, 1)
    inner = count_node(node("MatMul", [(8,), (8,)], ()))
    assert (inner.operations, inner.rows, inner.columns) == (2 * 8, 1, 1)
    nothing = count_node(node("MatMul", [(0, 8), (8, 4)], (0, 4)))
    assert (nothing.operations, nothing.rows) == (0, 0)
    empty = count_node(node("MatMul", [(4, 8), (8, 0)], (4, 0)))
    assert (empty.operations, empty.rows, empty.columns) == (0, 1, 0)


def test_constants_are_told_by_their_bytes_from_the_second_input_on() -> None:
    shapes, kernel, bias = [(1, 8, 20), (16, 8, 3), (16,)], 16 * 8 * 3 * 4, 16 * 4
    assert count_node(node("Conv", shapes, (1, 16, 18), constant=kernel + bias)).weight_bytes == kernel + bias
    without_bias = count_node(node("Conv", shapes, (1, 16, 18), constant=kernel + bias - 4))
    assert without_bias.weight_bytes == kernel
    assert without_bias.moved_bytes == 4 * (8 * 20 + 16 + 16 * 18)
    activations = count_node(node("Gemm", [(4, 8), (8, 16), (16,)], (4, 16), constant=16 * 4))
    assert (activations.cls, activations.weight_bytes) == ("attention", 0), "a bias alone makes no weight"
    scalar = count_node(node("Gemm", [(4, 1), (1, 1)], (4, 1), constant=4))
    assert scalar.cls == "attention"
    two = count_node(node("Gemm", [(4, 1), (1, 2)], (4, 2), constant=8))
    assert (two.cls, two.weight_bytes) == ("gemm", 8)


def test_gathering_sizes_out_of_a_shape_is_no_lookup() -> None:
    assert count_node(node("Gather", [(3,), ()], ())).cls == "layout"
    assert count_node(ExecutedNode("Gather", "n", (), (Tensor("float", (3,)),), 0, 1.0)).cls == "layout"
    assert count_node(node("Gather", [(3, 5), (2,)], (2, 5))).cls == "lookup"


def test_only_a_cast_for_cpus_makes_an_activation_a_weight() -> None:
    made = node("Mul", [(64, 192), (64, 192)], (64, 192), constant=64 * 192 * 4)
    product = node("MatMul", [(2, 16, 64), (64, 192)], (2, 16, 192))
    assert [work.cls for work in count_nodes([made, product])] == ["elementwise", "attention"]


def test_a_chain_may_come_first() -> None:
    work = count_node(node("Add", [(2, 64)] * 2, (2, 64)))
    assert fuse([work]) == [[work]]
    assert fuse([]) == []


def test_a_table_that_is_also_the_heads_weights_is_read_whole() -> None:
    table = ExecutedNode(
        "Gather", "n", (Tensor("float", (500, 64)), Tensor("int64", (1, 16))), (Tensor("float", (1, 16, 64)),),
        500 * 64 * 4, 1.0,
    )  # fmt: skip
    head = node("MatMul", [(1, 16, 64), (64, 500)], (1, 16, 500), constant=64 * 500 * 4)
    nodes = [table, LINEAR, head]
    both = (64 * 192 + 64 * 500) * 4
    assert stored_weight_bytes(nodes, count_nodes(nodes), artifact(both)) == both
    # a lookup in what another node computed stores nothing
    computed = ExecutedNode("Gather", "n", table.inputs, table.outputs, 16 * 8, 1.0)
    nodes = [computed, LINEAR, node("MatMul", [(1, 16, 64), (64, 100)], (1, 16, 100), constant=64 * 100 * 4)]
    both = (64 * 192 + 64 * 100) * 4
    assert stored_weight_bytes(nodes, count_nodes(nodes), artifact(both)) == both


@pytest.mark.parametrize(("precision", "times"), [("fp32", 1), ("fp16", 2), ("int8", 4)])
def test_weights_that_are_widened_to_compute_take_that_many_bytes(precision: str, times: int) -> None:
    one = 64 * 192 * 4
    nodes = [LINEAR, LINEAR, LINEAR]
    stored = artifact(one // times).model_copy(update={"precision": precision})
    assert stored_weight_bytes(nodes, count_nodes(nodes), stored) == pytest.approx(one)
    two = artifact(2 * one // times).model_copy(update={"precision": precision})
    assert stored_weight_bytes(nodes, count_nodes(nodes), two) == pytest.approx(2 * one)


def test_a_graph_without_products_reads_no_weights() -> None:
    assert stored_weight_bytes([], [], artifact(100)) == 0
