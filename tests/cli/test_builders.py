"""Which builders `export` runs for --trt, --trt-via and --build."""

from __future__ import annotations

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.export import builder_names


@pytest.mark.parametrize(
    ("trt", "via", "names", "expected"),
    [
        (False, "onnx", [], ()),
        (True, "onnx", [], ("tensorrt",)),
        # Beside TensorRT's own engine, so that profile can compare the two.
        (True, "torch-tensorrt", [], ("torch-tensorrt", "tensorrt")),
        (False, "onnx", ["torch-tensorrt"], ("torch-tensorrt",)),
        (True, "onnx", ["tensorrt", "other", "other"], ("tensorrt", "other")),
    ],
)
def test_each_flag_selects_its_builder(trt: bool, via: str, names: list[str], expected: tuple[str, ...]) -> None:
    assert builder_names(trt, via, names) == expected


def test_ways_that_do_not_exist_or_have_nothing_to_do_are_refused() -> None:
    with pytest.raises(InputError, match="--trt-via 'x': must be onnx or torch-tensorrt"):
        builder_names(True, "x", [])
    with pytest.raises(InputError, match="--trt-via: selects the compiler of engines; add --trt"):
        builder_names(False, "torch-tensorrt", [])
