"""Whether a model reads single texts or pairs: one rule for every command."""

from pathlib import Path

import pytest

from edgeformer.artifacts.data_config import DataSection, FileSource, Source, SyntheticSource
from edgeformer.artifacts.errors import InputError
from edgeformer.inference.predict import predict
from edgeformer.run import Run, locate
from edgeformer.tasks import RowSource, all_tasks, get_task

OLD = Path(__file__).parents[1] / "old_format"
SINGLE = FileSource(kind="file", path="x")
PAIRS = FileSource(kind="file", path="x", text="a", text_pair="b")
SYNTHETIC = SyntheticSource(kind="synthetic-reviews", rows=2)


def data_of(*sources: Source) -> DataSection:
    return Run.open(OLD / "classifier-v1").data.model_copy(update={"parts": {"train": sources} if sources else {}})


@pytest.mark.parametrize(
    ("sources", "expected"),
    [((SINGLE,), False), ((SYNTHETIC, SINGLE), False), ((PAIRS, PAIRS), True), ((SINGLE, PAIRS), None), ((), None)],
)
def test_training_data_decides_whether_a_model_reads_pairs(sources: tuple[Source, ...], expected: bool | None) -> None:
    task, data = get_task("classification"), data_of(*sources)
    assert task.answerer.reads_pairs(data) is expected
    for pairs in (False, True):
        assert (task.answerer.pairs_problem(data, pairs=pairs) is None) is (expected in (None, pairs))
    assert get_task("embedding").answerer.reads_pairs(data) is False


def test_attributes_say_what_a_task_can_do() -> None:
    assert [task.name for task in all_tasks() if not isinstance(task, RowSource)] == ["tensors"]
    silent = [task for task in all_tasks() if not task.can_answer]
    assert [task.name for task in silent] == ["language-modeling", "tensors"]
    for task, use in zip(silent, ("generate", "profile"), strict=True):
        with pytest.raises(InputError, match=f"a {task.noun} has no labels; use edgeformer {use}"):
            assert task.answerer


def test_predict_refuses_texts_that_the_model_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    location = locate(str(OLD / "classifier-v1"), OLD)
    message = "--pair: classifier-v1: this classifier reads single texts; leave out the second"
    with pytest.raises(InputError, match=message):
        predict(location, [("a", "b")])
    bundle = location.open_bundle()
    monkeypatch.setattr(bundle, "data", data_of(PAIRS))
    monkeypatch.setattr(type(location), "open_bundle", lambda self: bundle)
    with pytest.raises(InputError, match="reads pairs of texts; add the second text of each pair"):
        predict(location, ["a"])
    assert predict(location, [("a", "b")])[1][0].text == ("a", "b")
