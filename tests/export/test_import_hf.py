"""A Hugging Face model becomes a run that computes what transformers computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.progress import Silent
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.export.import_run import HfOptions, import_hf
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.run import Location, Run, locate
from tests.cli.run_cli import edgeformer
from tests.export.hf_models import LAYERS, OWN, answer, make_model

TEXTS: list[str | tuple[str, str]] = [
    "The first bridge of the town was made of wood.",
    "Drink enough.",
    ("Can you wait until it is cold?", "Nobody ever does, although it is worth the time that it takes."),
]
LABELS = ("no", "perhaps", "yes")
CLOSE = 1e-5


class RecordedProgress(Silent):
    """Records messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def answers(run: Path, texts: list[Any]) -> Any:
    """What the run's own weights compute for texts of different lengths in one batch, [n, C]."""
    opened = Run.open(run)
    reader = opened.reader()
    encoded, _ = encode_texts(reader.tokenizer, texts, opened.data.tokens_at_once)
    with opened.session() as session:
        return session.run(collate(encoded, np.arange(len(texts)), reader.pad))["logits"]


@pytest.mark.parametrize("kind", OWN)
def test_a_classifier_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / kind, kind, LABELS)
    run = import_hf(str(tmp_path / kind), HfOptions(tmp_path / "artifacts"))
    tokenizer = Tokenizer.from_file(str(tmp_path / kind / "tokenizer.json"))
    expected = np.stack([answer(model, tokenizer, *([text] if isinstance(text, str) else text)) for text in TEXTS])
    assert np.abs(answers(run, TEXTS) - expected).max() < CLOSE
    assert np.ptp(expected, axis=0).min() > 100 * CLOSE  # the rows do differ
    manifest, recipe = Run.open(run).manifest, Run.open(run).recipe
    assert (run.name, manifest.status, manifest.task) == (f"{kind}-001", "finished", "classification")
    assert not manifest.leaks
    assert manifest.causality is None and "imported from" in str(manifest.reason) and manifest.steps == 0
    assert manifest.parameters <= sum(parameter.numel() for parameter in model.parameters())
    assert recipe.data.labels == LABELS and recipe.data.tokens_at_once == 64  # type: ignore[attr-defined]
    chosen, result = predict(Location(run, None), TEXTS, "torch")
    assert chosen == "torch" and [p.label for p in result] == [LABELS[row.argmax()] for row in expected]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False), ("max", False)])
def test_pooling_and_normalisation_follow_the_folder(tmp_path: Path, pooling: str, normalize: bool) -> None:
    model = make_model(tmp_path / "encoder", "bert")
    sentence_transformers(tmp_path / "encoder", pooling, normalize=normalize)
    run = import_hf(str(tmp_path / "encoder"), HfOptions(tmp_path / "artifacts", name="mine"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "encoder" / "tokenizer.json"))
    single = [text for text in TEXTS if isinstance(text, str)]
    states = [answer(model, tokenizer, text) for text in single]
    pools = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "max": lambda h: h.max(0)}
    expected = np.stack([pools[pooling](state) for state in states])
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(answers(run, single) - expected).max() < CLOSE
    opened = Run.open(run)
    assert (opened.manifest.task, opened.data.tokens_at_once, len(opened.exits)) == ("embedding", 48, LAYERS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", ["a"], r"modules\.json: 0: input should be a valid dictionary"),
        ("modules.json", [{"type": "x.Pooling", "path": ".."}], r"path '\.\.' must be the name of a folder"),
        ("modules.json", [{"type": "x.Dense", "path": "2_Dense"}], "has a module 'Dense', which is not known here"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_sqrt_len_tokens": True},
            "pooling must be one of cls, mean, max, not cls, mean_sqrt_len_tokens",
        ),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length: input should be a valid integer"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length: input should be greater than"),
    ],
)
def test_damaged_sentence_transformers_files(
    shared_encoder: Path, tmp_path: Path, file: str, content: Any, message: str
) -> None:
    folder = shutil.copytree(shared_encoder, tmp_path / "encoder")
    (tmp_path / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")  # of no concern here
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        import_hf(str(folder), HfOptions(tmp_path / "artifacts"))


@pytest.fixture(scope="module")
def shared_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder. Copy it before changing anything."""
    folder = tmp_path_factory.mktemp("encoders") / "encoder"
    make_model(folder, "bert")
    sentence_transformers(folder, "mean", normalize=False)
    return folder


def sentence_transformers(folder: Path, pooling: str, *, normalize: bool) -> None:
    """Make a folder one of sentence-transformers."""
    mode = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}[pooling]
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 32, **{f"pooling_mode_{mode}": True}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 48}', encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("a", "b", "c")}, "--labels a,b,c: 2 different names are needed for no, yes"),
        ({"labels": ("", "b")}, "--labels ,b: 2 different names are needed for no, yes, none of them empty"),
        ({"labels": ("a", "a")}, "--labels a,a: 2 different names are needed"),
        ({"pooling": "mean"}, "--pooling: .* is a classifier"),
        ({"max_length": 100}, "--max-length 100: .* takes 4 to 64 tokens"),
        ({"target": "toaster"}, "toaster"),
        ({"name": "a/b"}, "--name"),
        ({"data": Path("none.tsv")}, "none.tsv"),
    ],
)
def test_options_that_do_not_fit_the_model(
    shared_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        import_hf(str(shared_model), HfOptions(tmp_path / "artifacts", **changes))
    assert not (tmp_path / "artifacts").exists()


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of two labels. Read it; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    make_model(folder, "bert", ("no", "yes"))
    return folder


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a model with other keys in its config.json."""
    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    return to


def test_other_kinds_of_models_are_refused(shared_model: Path, tmp_path: Path) -> None:
    options = HfOptions(tmp_path / "artifacts")
    for number, (config, message) in enumerate(
        (
            ({"id2label": {"0": "LABEL_0"}}, "is a model for regression"),
            ({"model_type": "xlnet"}, r"'xlnet' is not known here.*torch\.onnx\.export.*edgeformer import onnx"),
            (
                {"architectures": ["BertForTokenClassification"]},
                r"is a BertForTokenClassification, whose head.*edgeformer import onnx OUT/model\.onnx",
            ),
            (
                {"id2label": {"0": "x", "1": "x"}},
                "id2label: 2 different names are needed for x, x, none of them empty; name them with --labels",
            ),
            ({"id2label": {"0": "x", "1": " "}}, "id2label: 2 different names are needed"),
        )
    ):
        with pytest.raises(InputError, match=message):
            import_hf(str(changed(shared_model, tmp_path / str(number), **config)), options)
    assert not options.artifacts.exists()


def test_multi_label_model_answers_per_label(shared_model: Path, tmp_path: Path) -> None:
    source = changed(shared_model, tmp_path / "several", problem_type="multi_label_classification")
    data = tmp_path / "own.jsonl"
    progress = RecordedProgress()
    run = Run.open(import_hf(str(source), HfOptions(tmp_path / "artifacts"), progress))
    labels = run.recipe.data.labels  # type: ignore[attr-defined]
    assert run.task.name == "multi-label-classification" and "0.5" in " ".join(progress.messages)
    data.write_text(
        json.dumps({"text": "a", "label": [labels[0]]}) + "\n" + json.dumps({"text": "b", "label": []}) + "\n"
    )
    other = Run.open(import_hf(str(source), HfOptions(tmp_path / "artifacts", "other", data)))
    assert other.manifest.data.rows["test"] == 2
    (result,) = predict(locate(str(run.folder), tmp_path), ["a warm film"], "torch")[1]
    logits = answers(run.folder, ["a warm film"])[0]
    assert [*result.probabilities.values()] == pytest.approx((1 / (1 + np.exp(-logits))).tolist(), abs=1e-5)  # type: ignore[union-attr]
    assert set(result.labels) == {name for name, value in zip(labels, logits, strict=True) if value >= 0}  # type: ignore[union-attr]


def test_weights_that_could_run_code_are_not_read(shared_model: Path, tmp_path: Path) -> None:
    pickled = changed(shared_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no model\.safetensors; other formats could run code"):
        import_hf(str(pickled), HfOptions(tmp_path / "artifacts"))
    bare = changed(shared_model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json; write one with transformers"):
        import_hf(str(bare), HfOptions(tmp_path / "artifacts"))


def test_custom_code_is_reported_and_not_run(shared_model: Path, tmp_path: Path) -> None:
    code = {"auto_map": {"AutoModelForSequenceClassification": "modeling.Mine"}}
    folder = changed(shared_model, tmp_path / "code", **code)
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    progress = RecordedProgress()
    import_hf(str(folder), HfOptions(tmp_path / "artifacts"), progress)
    assert any("auto_map" in message and "not run" in message for message in progress.messages)
    assert not (tmp_path / "ran").exists()


def test_classifier_without_a_trained_head_is_refused(shared_model: Path, shared_encoder: Path, tmp_path: Path) -> None:
    config = json.loads((shared_model / "config.json").read_text(encoding="utf-8"))
    keys = {key: config[key] for key in ("architectures", "id2label")}
    headless = changed(shared_encoder, tmp_path / "headless", **keys)
    (headless / "modules.json").unlink()
    with pytest.raises(ArtifactError, match=r"the weights lack .*never trained for classification"):
        import_hf(str(headless), HfOptions(tmp_path / "artifacts"))


def test_the_command(shared_model: Path, tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text(
        "text\tlabel\nIt is done\tyes\nNobody came\tno\nWho knows\tno\n", encoding="utf-8"
    )
    line = ("import", "hf", str(shared_model), "--name", "mine", "--data", "test.tsv", "--labels", "no,yes", "--json")
    outcome = edgeformer(*line, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["run"] == "mine" and document["task"] == "classification" and document["status"] == "finished"
    assert "golden inputs from the validation set" in document["reason"]
    location = locate("mine", tmp_path / "artifacts")
    (last, *_) = evaluate(location, EvaluateOptions(artifact="torch", data=tmp_path / "test.tsv")).rows
    assert (last.split, last.n) == ("test.tsv", 3)
