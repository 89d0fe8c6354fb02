from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.golden import Golden, read_golden
from edgeformer.tasks.task import make_buffers
from tests.runtimes.tiny_bundle import write_golden


@pytest.mark.parametrize(
    ("row", "seq", "expected"),
    [
        ([101, 7, 8, 102], 3, [101, 7, 8]),
        ([101, 7, 8, 102], 4, [101, 7, 8, 102]),
        ([101, 7, 8, 102], 9, [101, 7, 8, 102, 7, 8, 102, 7, 8]),
        ([5], 3, [5, 5, 5]),
    ],
)
def test_a_row_is_cut_or_repeats_its_own_tokens_behind_the_first(row: list[int], seq: int, expected: list[int]) -> None:
    golden = Golden(Path("golden.npz"), {"input_ids": np.array([row])})
    assert make_buffers(golden, 1, seq, 1)[0]["input_ids"].tolist() == [expected]


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 16), (16, 128), (3, 5)])
def test_buffers_have_the_stated_shape_and_differ(tmp_path: Path, batch: int, seq: int) -> None:
    write_golden(tmp_path / "golden.npz")
    golden = read_golden(tmp_path / "golden.npz")
    buffers = make_buffers(golden, batch, seq, count=3)
    real = {int(token) for row in golden.texts() for token in row}
    for buffer in buffers:
        assert buffer["input_ids"].shape == buffer["attention_mask"].shape == (batch, seq)
        assert buffer["input_ids"].dtype == buffer["attention_mask"].dtype == np.int64
        assert buffer["attention_mask"].all(), "every position is work"
        assert set(buffer["input_ids"].ravel().tolist()) <= real, "tokens of real rows only"
        assert (buffer["input_ids"][:, 0] == 1).all()
    if seq > 4:
        assert not np.array_equal(buffers[0]["input_ids"], buffers[1]["input_ids"])
