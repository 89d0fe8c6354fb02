"""Work of operators that no transformer has, against base formulas; and what an estimate says of them."""

from __future__ import annotations

import pytest

from edgeformer.estimate.operators import count_node, trust_of
from edgeformer.estimate.roofline import Rates, range_us
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

Shape = tuple[int, ...]
RATES = Rates(peak=1e11, sure_peak=1e11, vector_peak=1e11, bandwidth=1e10, cache_bytes=1 << 20, overhead_us=1.0)


def node(op: str, inputs: list[Shape], outputs: list[Shape], constant: int = 0) -> ExecutedNode:
    """``constant``: bytes of the inputs that are stored."""
    taken, given = (tuple(Tensor("float", shape) for shape in shapes) for shapes in (inputs, outputs))
    return ExecutedNode(op, "n", taken, given, constant, 1.0)


def bytes_of(*shapes: Shape) -> int:
    return sum(Tensor("float", shape).bytes for shape in shapes)


class TestConvolutions:
    def test_two_operations_per_output_and_weight_of_its_channel(self) -> None:
        """2 · N · C out · H · W · C in · K · K (3 × 3, 16 → 32 channels, 20 × 24 outputs, 2 rows)."""
        kernel = (32, 16, 3, 3)
        work = count_node(node("Conv", [(2, 16, 20, 24), kernel], [(2, 32, 20, 24)], bytes_of(kernel)))
        assert work.operations == 2 * 2 * 32 * 20 * 24 * 16 * 9
        assert work.weight_bytes == bytes_of(kernel) and work.cls == "gemm" and work.columns == 32
        assert work.trust == "convolution"

    def test_groups(self) -> None:
        kernel = (32, 4, 3, 3)  # 16 channels in 4 groups
        work = count_node(node("FusedConv", [(1, 16, 8, 8), kernel, (32,)], [(1, 32, 8, 8)], bytes_of(kernel, (32,))))
        assert work.operations == 2 * 32 * 64 * 4 * 9 and work.trust == "convolution"

    def test_one_channel_at_a_time(self) -> None:
        kernel = (16, 1, 5, 5)
        work = count_node(node("Conv", [(1, 16, 8, 8), kernel], [(1, 16, 8, 8)], bytes_of(kernel)))
        assert work.operations == 2 * 16 * 64 * 25 and work.trust == "narrow"

    def test_one_axis(self) -> None:
        kernel = (8, 4, 3)
        work = count_node(node("Conv", [(2, 4, 100), kernel], [(2, 8, 98)], bytes_of(kernel)))
        assert work.operations == 2 * 2 * 8 * 98 * 4 * 3

    def test_transposed(self) -> None:
        """Every input meets the weights of its channel: 2 · N · C in · H in · W in · C out · K · K."""
        kernel = (24, 12, 2, 2)
        work = count_node(node("ConvTranspose", [(1, 24, 10, 10), kernel], [(1, 12, 20, 20)], bytes_of(kernel)))
        assert work.operations == 2 * 24 * 100 * 12 * 4
        assert work.weight_bytes == bytes_of(kernel) and work.trust == "convolution"


class TestRecurrent:
    @pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    @pytest.mark.parametrize("directions", [1, 2])
    def test_every_step_multiplies_input_and_state(self, op: str, gates: int, directions: int) -> None:
        """2 · T · B · D · gates · H · (I + H)."""
        steps, rows, width, hidden = 7, 3, 10, 16
        w, r = (directions, gates * hidden, width), (directions, gates * hidden, hidden)
        bias = (directions, 2 * gates * hidden)
        listed = node(op, [(steps, rows, width), w, r, bias], [(steps, directions, rows, hidden)], bytes_of(w, r, bias))
        work = count_node(listed)
        assert work.operations == 2 * steps * rows * directions * gates * hidden * (width + hidden)
        assert work.weight_bytes == bytes_of(w, bias) + steps * bytes_of(r), (
            "the state's weights are read in every step"
        )
        assert work.trust == "recurrent"


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_what_holds_a_graph_does_nothing_itself(op: str) -> None:
    work = count_node(node(op, [(1,), (100, 100)], [(100, 100)]))
    assert (work.operations, work.bytes) == (0, 0) and work.trust == "checked"


@pytest.mark.parametrize(
    ("op", "trust"),
    [
        ("MatMul", "checked"), ("ReduceMean", "checked"), ("Softmax", "checked"), ("Resize", "window"),
        ("MaxPool", "window"), ("NonMaxSuppression", "unknown"), ("GridSample", "unknown"), ("STFT", "unknown"),
    ],
)  # fmt: skip
def test_what_is_trusted(op: str, trust: str) -> None:
    assert trust_of(node(op, [(8, 8), (8, 8)], [(8, 8)])) == trust


def test_a_range_is_wider_where_nothing_was_checked() -> None:
    kernel = (32, 16, 3, 3)
    convolution = count_node(node("Conv", [(1, 16, 40, 40), kernel], [(1, 32, 40, 40)], bytes_of(kernel)))
    trusted = convolution.__class__(**{**vars(convolution), "trust": "checked"})
    (low, high), (low_of_trusted, high_of_trusted) = (
        range_us([work], RATES, work.weight_bytes, fused=False) for work in (convolution, trusted)
    )
    assert low < low_of_trusted and high > 1.5 * high_of_trusted
