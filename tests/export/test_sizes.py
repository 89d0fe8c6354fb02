"""Which size of an input is a number of rows, which a length, and which has to be given."""

from __future__ import annotations

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.onnx_outline import Port
from edgeformer.export.foreign_graph import GOLDEN_SEQ, find_axes, parse_range, parse_shape, role_of
from edgeformer.tasks.tensors import Axis


def port(name: str, *shape: int | str | None) -> Port:
    return Port(name, "tensor", "float32", shape)


@pytest.mark.parametrize("name", ["batch", "batch_size", "N", "n", "bs", "Batch", "batch_dim"])
def test_names_of_rows(name: str) -> None:
    assert role_of(name) == "batch"


@pytest.mark.parametrize(
    "name", ["seq", "sequence", "sequence_length", "seq_len", "max_seq_len", "tokens", "length", "S"]
)
def test_names_of_lengths(name: str) -> None:
    assert role_of(name) == "seq"


@pytest.mark.parametrize(
    "name", ["past_sequence_length", "height", "unk__214", "?", "", 3, None, "nbatch", "p2o.Dim.0"]
)
def test_other_names(name: str | int | None) -> None:
    assert role_of(name) is None


def test_sizes_by_name_and_by_letter() -> None:
    result = find_axes([port("x", "batch", 3, "seq_len"), port("y", "unk", 5)], {"y": ("B", 5)}, {})
    row, length = Axis(size=1, takes="batch", role="batch"), Axis(size=GOLDEN_SEQ, takes="seq", role="seq")
    assert result == {"x": (row, Axis(size=3), length), "y": (row, Axis(size=5))}


def test_a_size_that_is_given_stays() -> None:
    (axes,) = find_axes([port("x", "batch", "sequence")], {"x": (1, 512)}, {}).values()
    assert axes == (Axis(size=1, role="batch"), Axis(size=512, role="seq"))


def test_a_name_that_is_given_once_is_known_everywhere() -> None:
    result = find_axes([port("x", "N", "width"), port("y", "width")], {"x": ("B", 7)}, {})
    assert result["y"] == (Axis(size=7),)


def test_but_question_marks_are_no_names() -> None:
    with pytest.raises(InputError, match=r"input 'y'.*axis 0 \(\?\)"):
        find_axes([port("x", "?", "?"), port("y", "?")], {"x": (2, 3)}, {})


def test_two_sizes_of_one_name() -> None:
    with pytest.raises(InputError, match="'width' is 7 in another input"):
        find_axes([port("x", "width"), port("y", "width")], {"x": (7,), "y": (8,)}, {})


def test_text_by_the_names_of_inputs() -> None:
    (axes,) = find_axes([port("input_ids", "a", "b")], {}, {}).values()
    assert [axis.takes for axis in axes] == ["batch", "seq"]
    (fixed,) = find_axes([port("input_ids", 1, 128)], {}, {}).values()
    assert [(axis.size, axis.takes, axis.role) for axis in fixed] == [(1, None, "batch"), (128, None, "seq")]


def test_everything_that_is_unknown_is_said_at_once() -> None:
    with pytest.raises(InputError, match=r"input 'x'.*input 'y'.*--shape x=Bx… --shape y=2xBx…"):
        find_axes([port("x", None, None), port("y", 2, "batch", "h")], {}, {})


@pytest.mark.parametrize(
    ("text", "result"),
    [("x=1x512", ("x", (1, 512))), ("a=b=Bx3xS", ("a=b", ("B", 3, "S"))), ("x=7", ("x", (7,))), ("x=", ("x", ()))],
)
def test_written_shapes(text: str, result: object) -> None:
    assert parse_shape(text) == result


@pytest.mark.parametrize("text", ["x", "=3", "x=0x3", "x=-1", "x=1y2", "x=1xb"])
def test_slips_in_shapes(text: str) -> None:
    with pytest.raises(InputError, match="write NAME=SIZE"):
        parse_shape(text)


@pytest.mark.parametrize(("text", "result"), [("x=0:9", ("x", (0, 9))), ("x=-1.5", ("x", (-1.5, -1.5)))])
def test_written_ranges(text: str, result: object) -> None:
    assert parse_range(text) == result


@pytest.mark.parametrize("text", ["x", "x=9:0", "x=a", "x=0:inf", "=1:2", "x=1:2:3"])
def test_slips_in_ranges(text: str) -> None:
    with pytest.raises(InputError, match="write NAME=LOW:HIGH"):
        parse_range(text)
