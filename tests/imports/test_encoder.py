"""A Hugging Face model becomes a run that computes what transformers computes; a difference refuses or marks it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import UNPROVEN, cautions
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.data.probes import PROBE_PAIRS, PROBE_TEXTS
from edgeformer.data.synthetic import SENTENCES
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.imports.proof import Compared, prove, prove_encoder, unproven
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.models.pretrained.source import open_source
from edgeformer.run import Location, Run, locate, read_run
from tests.cli.run_cli import edgeformer, run_json
from tests.export.hf_models import OWN, TAGS, answer, make_cross_encoder, make_model, sentence_transformers
from tests.measurement.measuring_child import Recorder

TEXTS: list[str | tuple[str, str]] = [
    "The first bridge of the town was made of wood.",
    "Drink enough.",
    ("Can you wait until it is cold?", "Nobody ever does, although it is worth the time that it takes."),
]
LABELS = ("no", "perhaps", "yes")
CLOSE = 1e-5
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


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


@pytest.mark.parametrize("kind", OWN)
def test_a_token_classifier_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / kind, kind, TAGS, per_token=True)
    run = import_hf(str(tmp_path / kind), HfOptions(tmp_path / "artifacts"))
    tokenizer = Tokenizer.from_file(str(tmp_path / kind / "tokenizer.json"))
    single: list[Any] = [text for text in TEXTS if isinstance(text, str)]
    for text, computed in zip(single, answers(run, single), strict=True):
        expected = answer(model, tokenizer, text)
        assert np.abs(computed[: len(expected)] - expected).max() < CLOSE
    manifest, data = Run.open(run).manifest, Run.open(run).data
    assert manifest.task == "token-classification" and (data.labels, data.classes) == (("PER", "LOC"), TAGS)  # type: ignore[attr-defined]


def test_spans_are_those_of_the_pipeline_of_transformers(tmp_path: Path) -> None:
    """With the first token of a word deciding for it; and a labelled file is scored."""
    from transformers import PreTrainedTokenizerFast, pipeline

    model = make_model(tmp_path / "bert", "bert", TAGS, per_token=True)
    (tmp_path / "own.jsonl").write_text(
        '{"text": "Ada in Ulm", "spans": [{"start": 0, "end": 3, "label": "PER"}]}\n', encoding="utf-8"
    )
    run = import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts", data=tmp_path / "own.jsonl"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "bert" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    tagger = pipeline("token-classification", model=model, tokenizer=fast, aggregation_strategy="first")
    texts = [text for text in SENTENCES if len(tokenizer.encode(text).ids) <= 64][:20]
    texts.append("Zoë’s friend, (7) is in Köln.")
    _, predictions = predict(Location(run, None), texts, "torch")
    for text, prediction in zip(texts, predictions, strict=True):
        expected = [(span["start"], span["end"], span["entity_group"]) for span in tagger(text)]
        assert [(span.start, span.end, span.label) for span in prediction.spans] == expected  # type: ignore[attr-defined]
    assert evaluate(Location(run, None), EvaluateOptions("torch")).rows[0].n == 1


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
    assert (opened.manifest.task, opened.data.tokens_at_once, opened.exits) == ("embedding", 48, (1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("a", "b", "c")}, "--labels a,b,c: the model has 2 classes \\(no, yes\\)"),
        ({"labels": ("", "b")}, "--labels ,b: the model has 2 classes \\(no, yes\\); give 2 different names"),
        ({"labels": ("a", "a")}, "--labels a,a: the model has 2 classes"),
        ({"pooling": "mean"}, "--pooling: .* is a classifier"),
        ({"max_length": 100}, "--max-length 100: .* reads 4 to 64 tokens"),
        ({"target": "toaster"}, "toaster"),
        ({"name": "a/b"}, "--name"),
        ({"data": Path("none.tsv")}, "none.tsv"),
    ],
)
def test_options_that_do_not_fit_the_model(shared_model, tmp_path, changes, message):
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


def test_other_kinds_of_models_and_heads_are_refused(shared_model: Path, tmp_path: Path) -> None:
    options = HfOptions(tmp_path / "artifacts")
    heads: dict[str, dict[str, Any]] = {
        r"classifier\.bias, classifier\.weight of a head.*add the class, such as": {"architectures": None},
        "id2label has another number of classes than the weights": {"id2label": {"0": "no", "1": "yes", "2": "both"}},
    }
    for expected, changes in heads.items():
        with pytest.raises(ArtifactError, match=expected):
            import_hf(str(changed(shared_model, tmp_path / expected[:8], **changes)), options)
    for number, (config, message) in enumerate(
        (
            ({"problem_type": "regression"}, "is a model for regression of 2 outputs"),
            ({"problem_type": "ranking"}, "is a model for ranking"),
            ({"model_type": "xlnet"}, r"'xlnet' is not supported.*torch\.onnx\.export.*edgeformer import onnx"),
            (
                {"architectures": ["BertForQuestionAnswering"]},
                r"is a BertForQuestionAnswering, and only embedding models.*edgeformer import onnx OUT/model\.onnx",
            ),
            (
                {"architectures": ["BertForTokenClassification"], "id2label": {"0": "B-PER", "1": "I-PER"}},
                "has the classes B-PER, I-PER, and none is O, that of a token in no span; name them in order",
            ),
            (
                {"id2label": {"0": "x", "1": "x"}},
                "id2label: the model has 2 classes \\(x, x\\); give 2 different names with --labels",
            ),
            ({"id2label": {"0": "x", "1": " "}}, "id2label: the model has 2 classes"),
        )
    ):
        with pytest.raises(InputError, match=message):
            import_hf(str(changed(shared_model, tmp_path / str(number), **config)), options)
    assert not options.artifacts.exists()


def test_multi_label_model_answers_per_label(shared_model: Path, tmp_path: Path) -> None:
    source = changed(shared_model, tmp_path / "several", problem_type="multi_label_classification")
    data, progress = tmp_path / "own.jsonl", Recorder()
    run = Run.open(import_hf(str(source), HfOptions(tmp_path / "artifacts"), progress))
    labels = run.recipe.data.labels  # type: ignore[attr-defined]
    assert run.task.name == "multi-label-classification" and "0.5" in " ".join(progress.messages)
    data.write_text(f'{{"text": "a", "label": ["{labels[0]}"]}}\n{{"text": "b", "label": []}}\n')
    other = Run.open(import_hf(str(source), HfOptions(tmp_path / "artifacts", "other", data)))
    assert other.manifest.data.rows["test"] == 2
    (result,) = predict(locate(str(run.folder), tmp_path), ["a warm film"], "torch")[1]
    logits = answers(run.folder, ["a warm film"])[0]
    assert [*result.probabilities.values()] == pytest.approx((1 / (1 + np.exp(-logits))).tolist(), abs=1e-5)  # type: ignore[union-attr]
    assert set(result.labels) == {name for name, value in zip(labels, logits, strict=True) if value >= 0}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kind", [kind if kind in ("bert", "modernbert") else pytest.param(kind, marks=pytest.mark.slow) for kind in OWN]
)
def test_a_model_with_one_output_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / kind, kind, ("LABEL_0",))
    run = import_hf(str(tmp_path / kind), HfOptions(tmp_path / "artifacts"))
    tokenizer = Tokenizer.from_file(str(tmp_path / kind / "tokenizer.json"))
    expected = np.stack([answer(model, tokenizer, *([text] if isinstance(text, str) else text)) for text in TEXTS])
    assert np.abs(answers(run, TEXTS) - expected).max() < CLOSE < np.ptp(expected) / 100
    opened = Run.open(run)
    assert (opened.manifest.task, opened.data.activation) == ("regression", "identity")  # type: ignore[attr-defined]
    _, scored = predict(Location(run, None), TEXTS, "torch")
    assert [answer.score for answer in scored] == pytest.approx(expected[:, 0].tolist(), abs=CLOSE)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"--labels: .* is a regression model and has no labels; leave it out"):
        import_hf(str(tmp_path / kind), HfOptions(tmp_path / "artifacts", labels=("a", "b")))


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random cross-encoder. Copy it before changing anything."""
    folder = tmp_path_factory.mktemp("rerankers") / "model"
    make_cross_encoder(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "settings", "activation"),
    [
        ({}, None, "identity"),  # transformers computes no function
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0"}}, None, "identity"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, None, "sigmoid"),
        ({"sbert_ce_default_activation_function": SIGMOID}, None, "sigmoid"),
        ({}, {"model_type": "CrossEncoder"}, "sigmoid"),
        ({}, {"model_type": "CrossEncoder", "activation_fn": IDENTITY}, "identity"),
    ],
)
def test_the_activation_of_a_cross_encoder(cross_encoder, tmp_path, config, settings, activation):
    folder = changed(cross_encoder, tmp_path / "model", **config)
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
        module = "sentence_transformers.base.modules.transformer.Transformer"
        modules = [{"idx": 0, "name": "0", "path": "", "type": module}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        task = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
        task["modality_config"] = {"text": {"method": "forward", "method_output_name": "logits"}}  # type: ignore[assignment]
        (folder / "sentence_bert_config.json").write_text(json.dumps(task), encoding="utf-8")
    run = import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    data: Any = Run.open(run).data
    assert data.activation == activation
    reranker = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    expected = reranker.CrossEncoder(str(folder)).predict([TEXTS[2]]) if config or settings else None
    (scored,) = predict(Location(run, None), [TEXTS[2]], "torch")[1]
    if expected is not None:
        assert scored.score == pytest.approx(float(expected[0]), abs=CLOSE)  # type: ignore[union-attr]


def test_another_activation_is_refused(cross_encoder: Path, tmp_path: Path) -> None:
    folder = changed(cross_encoder, tmp_path / "m", sentence_transformers={"activation_fn": "torch.nn.modules.x.ReLU"})
    with pytest.raises(InputError, match=r"does not compute the activation function 'torch\.nn\.modules\.x\.ReLU'"):
        import_hf(str(folder), HfOptions(tmp_path / "artifacts"))


def test_an_imported_reranker_is_scored_on_judged_documents(cross_encoder: Path, tmp_path: Path) -> None:
    lists = [(query, SENTENCES[place + 1 : place + 7]) for place, query in enumerate(SENTENCES[:40])]
    lines = [json.dumps({"query": q, "document": d, "relevance": n % 3}) for q, ds in lists for n, d in enumerate(ds)]
    (tmp_path / "judged.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run = import_hf(str(cross_encoder), HfOptions(tmp_path / "artifacts", data=tmp_path / "judged.jsonl"))
    (row, *_) = evaluate(locate(str(run), tmp_path), EvaluateOptions(artifact="torch")).rows
    assert row.n == 240 and row.ndcg is not None and row.mrr is not None


def test_weights_and_code_that_could_run_are_not_used(shared_model: Path, tmp_path: Path) -> None:
    pickled = changed(shared_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no model\.safetensors; other formats are not read"):
        import_hf(str(pickled), HfOptions(tmp_path / "artifacts"))
    bare = changed(shared_model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json or vocab\.txt; write it with transformers"):
        import_hf(str(bare), HfOptions(tmp_path / "artifacts"))
    code = {"auto_map": {"AutoModelForSequenceClassification": "modeling.Mine"}}
    folder = changed(shared_model, tmp_path / "code", **code)
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    progress = Recorder()
    import_hf(str(folder), HfOptions(tmp_path / "artifacts"), progress)
    assert any("auto_map" in message and "not run" in message for message in progress.messages)
    assert not (tmp_path / "ran").exists()


def test_classifier_without_a_trained_head_is_refused(shared_model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "encoder", "bert")
    config = json.loads((shared_model / "config.json").read_text(encoding="utf-8"))
    keys = {key: config[key] for key in ("architectures", "id2label")}
    headless = changed(tmp_path / "encoder", tmp_path / "headless", **keys)
    with pytest.raises(ArtifactError, match=r"the weights lack .*never trained for classification"):
        import_hf(str(headless), HfOptions(tmp_path / "artifacts"))


def test_a_folder_of_an_adapter_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    outcome = edgeformer("import", "hf", str(tmp_path), cwd=tmp_path)
    assert outcome.code == 2
    assert re.search(r"adapter_config\.json: the model has an adapter.*merge_and_unload", outcome.err, re.DOTALL)


def test_the_command(shared_model: Path, tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("text\tlabel\nIt is done\tyes\nNobody came\tno\nMaybe\tno\n", encoding="utf-8")
    line = ("import", "hf", str(shared_model), "--name", "mine", "--data", "test.tsv", "--labels", "no,yes")
    document = run_json(*line, cwd=tmp_path)
    assert document["run"] == "mine" and document["task"] == "classification" and document["status"] == "finished"
    assert "golden inputs from the validation set" in document["reason"]
    location = locate("mine", tmp_path / "artifacts")
    (last, *_) = evaluate(location, EvaluateOptions(artifact="torch", data=tmp_path / "test.tsv")).rows
    assert (last.split, last.n) == ("test.tsv", 3)


def test_the_text_with_the_largest_difference_is_named() -> None:
    same, far, near = np.zeros(3), np.array([0.0, 0.2, 0.0]), np.array([0.0, 1e-3, 0.0])
    answers = [Compared("equal", same, same), Compared("far", same, far), Compared("near", same, near)]
    with pytest.raises(InputError, match=r"the answer to 'far' differs by 2\.0e-01 from that of lib 1.*--unproven"):
        prove("lib 1", answers, allow=False)
    proof = prove("lib 1", answers, allow=True)
    assert (proof.texts, proof.largest_difference) == (3, pytest.approx(0.2))
    assert proof.reason is not None and "'far'" in proof.reason
    assert prove("lib", [], allow=False).reason is not None, "nothing was compared"


def test_what_cannot_be_compared_differs_and_differences_are_relative_to_large_numbers() -> None:
    for actual in (np.array([np.nan]), np.zeros(2), np.array([np.inf])):
        with pytest.raises(InputError, match="the answer to 'x' differs"):
            prove("lib", [Compared("x", np.zeros(1), actual)], allow=False)
    large = np.array([1000.0])
    assert prove("lib", [Compared("x", large, large + 0.05)], allow=False).reason is None
    with pytest.raises(InputError):
        prove("lib", [Compared("x", large / 1000, large / 1000 + 0.05)], allow=False)


@pytest.mark.slow
def test_the_proof_or_its_lack_is_stated_everywhere(tmp_path: Path) -> None:
    make_model(tmp_path / "bert", "bert", LABELS)
    run = import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts"))
    proof = read_run(run).proof
    assert proof is not None and proof.reason is None and str(proof.library).startswith("transformers ")
    assert proof.texts >= len(PROBE_TEXTS) + len(PROBE_PAIRS) - 3  # those without a text have no answer
    assert proof.largest_difference is not None and proof.largest_difference < 1e-5
    export(run, ExportOptions())
    manifest = Bundle.open(run / "bundle").manifest
    assert manifest.proof == proof and UNPROVEN not in cautions(manifest)
    assert "probe texts as transformers" in (run / "bundle" / "README.md").read_text(encoding="utf-8")
    write_json(run / "run.json", read_run(run).model_copy(update={"proof": unproven("no library was there")}))
    assert UNPROVEN in cautions(read_run(run))
    export(run, ExportOptions(replace=True))
    assert UNPROVEN in cautions(Bundle.open(run / "bundle").manifest)
    outcome = edgeformer("profile", str(run), "--device", "host", "--batch", "1", "--seq", "16", cwd=tmp_path)
    assert outcome.code in (0, 3, 4) and "the import is not proven: no library was there" in outcome.out
    report = (run / "reports" / "host.md").read_text(encoding="utf-8")
    assert UNPROVEN in report and "no library was there" in report


def test_another_tokenizer_is_a_difference(tmp_path: Path) -> None:
    """The run reads capitals as another tokenizer does than the library's."""
    make_model(tmp_path / "bert", "bert", LABELS)
    run = Run.open(import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts")))
    file = tmp_path / "artifacts" / "bert-001" / "model" / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["normalizer"] = None
    file.write_text(json.dumps(document), encoding="utf-8")
    source, progress = open_source(str(tmp_path / "bert")), Recorder()
    with run.session() as session, pytest.raises(InputError, match=r"answer to '.*' differs by .* of transformers"):
        prove_encoder(source, run.recipe, run.reader(), session.run, progress, max_length=None, allow=False)
