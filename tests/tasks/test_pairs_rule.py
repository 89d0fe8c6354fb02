"""Single texts or pairs: one rule for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.artifacts.data_config import DataSection, FileSource, Source, SyntheticSource
from edgeformer.artifacts.errors import InputError
from edgeformer.data.rows import Text
from edgeformer.inference.predict import predict
from edgeformer.run import Run, locate
from edgeformer.tasks import task_named
from edgeformer.tasks.text_answers import pairs_problem, reads_pairs

OLD = Path(__file__).parents[1] / "old_format"
SINGLE = FileSource(kind="file", path="x")
PAIRS = FileSource(kind="file", path="x", text="a", text_pair="b")
MADE = SyntheticSource(kind="synthetic-reviews", rows=2)


def data(*sources: Source) -> DataSection:
    section: DataSection = Run.open(OLD / "classifier-v1").data
    parts = {"train": sources} if sources else {}
    return section.model_copy(update={"parts": parts})


@pytest.mark.parametrize(
    ("sources", "reads"),
    [((SINGLE,), False), ((MADE, SINGLE), False), ((PAIRS, PAIRS), True), ((SINGLE, PAIRS), None), ((), None)],
)
def test_the_rule(sources: tuple[Source, ...], reads: bool | None) -> None:
    task = task_named("classification")
    assert reads_pairs(task, data(*sources)) is reads
    for pairs in (False, True):
        assert (pairs_problem(task, data(*sources), pairs=pairs) is None) is (reads in (None, pairs))
    assert reads_pairs(task_named("embedding"), data(*sources)) is False


def test_a_model_of_single_texts_refuses_a_pair_and_one_of_pairs_single_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    location = locate(str(OLD / "classifier-v1"), OLD)

    def refused(texts: list[Text], said: str) -> None:
        with pytest.raises(InputError, match=said):
            predict(location, texts)

    refused([("a", "b")], "--pair: classifier-v1: this classifier was trained on single texts; leave out the second")
    bundle = location.open_bundle()
    manifest = bundle.manifest.model_copy(update={"data": data(PAIRS)})
    monkeypatch.setattr(bundle, "manifest", manifest)
    monkeypatch.setattr(type(location), "open_bundle", lambda self: bundle)
    refused(["a"], "was trained on pairs of texts; give each text its second one")
    assert predict(location, [("a", "b")])[1][0].text == ("a", "b")
