"""The ``datasets`` library on local files; nothing here goes to the network."""

import pytest

from edgeformer.artifacts.data_config import FileSource, HubSource
from edgeformer.artifacts.errors import DataError
from edgeformer.data.sources import read

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def make(labels, names=("negative", "positive")):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))})
    texts = [f"text {number}" for number in range(len(labels))]
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def labels_of(source, labels=("negative", "positive")):
    return [row.label for row in read(source, labels)]


def test_parquet_is_read_with_its_class_names(tmp_path):
    path = tmp_path / "train.parquet"
    make([1, 0, 1]).to_parquet(path)
    source = FileSource(kind="file", path=str(path))
    found = list(read(source, ("negative", "positive")))
    assert [row.text for row in found] == ["text 0", "text 1", "text 2"]
    assert found[1].where == f"{path}, row 2"
    # The names of the recipe in another order: names decide, not numbers.
    assert labels_of(source, ("positive", "negative")) == ["positive", "negative", "positive"]
    # Other names altogether: numbers are all there is.
    assert labels_of(source, ("bad", "good")) == [1, 0, 1]


def test_a_broken_parquet_file(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"train\.parquet: cannot be read as Parquet"):
        list(read(FileSource(kind="file", path=str(path))))


def test_a_local_data_set_folder_is_a_hub_source(tmp_path):
    folder = tmp_path / "reviews"
    folder.mkdir()
    make([1, 0, -1]).to_parquet(folder / "train.parquet")
    make([0]).to_parquet(folder / "test.parquet")
    source = HubSource(kind="hub", name=str(folder), split="train", skip_unlabelled=True)
    assert labels_of(source) == ["positive", "negative"]
    assert labels_of(source.model_copy(update={"split": "test"})) == ["negative"]
    # -1 is how class labels say "unlabelled".
    with pytest.raises(DataError, match=r"row 3: has no label.*skip_unlabelled"):
        labels_of(source.model_copy(update={"skip_unlabelled": False}))
    with pytest.raises(DataError, match="'nonsense': cannot be loaded"):
        labels_of(source.model_copy(update={"split": "nonsense"}))
    with pytest.raises(DataError, match=r"no column 'texts'; did you mean 'text'"):
        labels_of(source.model_copy(update={"text": "texts"}))


def test_csv_folder(tmp_path):
    folder = tmp_path / "reviews"
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\nfine,1\nbad,0\n")
    assert labels_of(HubSource(kind="hub", name=str(folder))) == [1, 0]


def test_offline_says_what_to_do():
    with pytest.raises(DataError, match=r"hub data set nobody/nothing.*--data DIR"):
        labels_of(HubSource(kind="hub", name="nobody/nothing"))
