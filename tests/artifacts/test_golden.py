"""golden.npz has one schema: what does not keep to it is neither read nor written; inputs are made of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.golden import GOLDEN_FILE, Golden, GoldenError, read_golden, write_golden
from edgeformer.tasks import get_task
from tests.runtimes import tiny_bundle

IDS = np.array([[1, 5, 6, 0], [1, 7, 0, 0]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
LOGITS = np.array([[0.5, 1.5], [2.5, -1.0]], dtype=np.float32)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_golden(tmp_path, {"input_ids": IDS, "attention_mask": MASK, "logits": LOGITS, "spread": np.array(2.0)})
    golden = read_golden(tmp_path / GOLDEN_FILE)
    assert len(golden) == 2
    assert list(golden.inputs(("attention_mask", "input_ids"))) == ["attention_mask", "input_ids"]
    assert [row.tolist() for row in golden.texts()] == [[1, 5, 6], [1, 7]]
    assert golden.arrays["logits"].dtype == np.float32 and float(golden.arrays["spread"]) == 2.0
    golden = Golden(tmp_path, {"input_ids": IDS})
    with pytest.raises(GoldenError, match="has no 'attention_mask', because an older version wrote it"):
        golden.inputs(("input_ids", "attention_mask"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"attention_mask": MASK}, "it has no input_ids"),
        ({"input_ids": IDS.astype(np.int32)}, "must be int64"),
        ({"input_ids": IDS, "attention_mask": MASK.astype(np.float32)}, "must be int64"),
        ({"input_ids": IDS, "attention_mask": MASK[:, :3]}, "a mask and types of the same shape"),
        ({"input_ids": IDS, "token_type_ids": IDS[:, :3]}, "a mask and types of the same shape"),
        ({"input_ids": IDS[:0]}, "must be int64"),
        ({"input_ids": IDS, "attention_mask": MASK * [[1], [0]]}, "a row holds padding only"),
        ({"input_ids": IDS, "logits": LOGITS[:1]}, "does not fit 2 rows"),
        ({"input_ids": IDS, "logits": LOGITS[:, :0]}, "does not fit 2 rows"),
        ({"input_ids": IDS, "names": np.array(["a", "b"])}, "names holds <U1, not numbers"),
    ],
)
def test_what_does_not_keep_to_the_schema(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match=message):
        write_golden(tmp_path, arrays)
    assert not (tmp_path / GOLDEN_FILE).exists()
    np.savez(tmp_path / GOLDEN_FILE, **arrays)
    with pytest.raises(GoldenError, match=message):
        read_golden(tmp_path / GOLDEN_FILE)


def test_nothing_is_unpickled_and_damage_is_named(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    np.savez(tmp_path / GOLDEN_FILE, input_ids=IDS, logits=np.array([Trap()], dtype=object))
    with pytest.raises(GoldenError, match="damaged"):
        read_golden(tmp_path / GOLDEN_FILE)
    assert not (tmp_path / "sprung").exists()
    (tmp_path / GOLDEN_FILE).unlink()
    with pytest.raises(GoldenError, match=r"golden\.npz: the golden inputs are missing"):
        read_golden(tmp_path / GOLDEN_FILE)
    path = write_golden(tmp_path, {"input_ids": IDS}).path
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(GoldenError, match=r"golden\.npz: damaged"):
        read_golden(path)


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
    assert get_task("classification").calls(golden, {}, (1, seq), 1)[0]["input_ids"].tolist() == [expected]


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (1, 16), (16, 128), (3, 5)])
def test_buffers_have_the_stated_shape_and_differ(tmp_path: Path, batch: int, seq: int) -> None:
    tiny_bundle.write_golden(tmp_path / "golden.npz")
    golden = read_golden(tmp_path / "golden.npz")
    buffers = get_task("classification").calls(golden, {}, (batch, seq), 3)
    real = {int(token) for row in golden.texts() for token in row}
    for buffer in buffers:
        assert buffer["input_ids"].shape == buffer["attention_mask"].shape == (batch, seq)
        assert buffer["input_ids"].dtype == buffer["attention_mask"].dtype == np.int64
        assert buffer["attention_mask"].all(), "every position is work"
        assert set(buffer["input_ids"].ravel().tolist()) <= real, "tokens of real rows only"
        assert (buffer["input_ids"][:, 0] == 1).all()
    if seq > 4:
        assert not np.array_equal(buffers[0]["input_ids"], buffers[1]["input_ids"])
