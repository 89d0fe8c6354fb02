"""Token types and positions are those of the source: transformers, with its own tokenizer, is the reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from edgeformer import Run
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.data.probes import PROBE_PAIRS, PROBE_TEXTS
from edgeformer.data.rows import Text
from edgeformer.export.export import export
from edgeformer.export.run_source import open_exportable
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.models import load_recipe
from edgeformer.models.pretrained import MODEL
from edgeformer.run import Location
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.export import hf_models
from tests.export.hf_models import make_model

pytestmark = pytest.mark.slow

LABELS = ("no", "perhaps", "yes")
CLOSE = 1e-5
WITH_TYPES: dict[str, dict[str, Any]] = {"bert": {}, "electra": {}, "albert": {}, "deberta-v2": {"type_vocab_size": 2}}
TEXTS: list[Text] = [
    *(text for text in PROBE_TEXTS if text.strip()),
    *PROBE_PAIRS,
    ("It [SEP] is done.", "Nobody [SEP] ever waits. [SEP]"),
    ("[SEP]", "[PAD] [SEP]"),
]
COUNTED: dict[str, tuple[str, dict[str, Any], list[str] | None]] = {
    "roberta": ("roberta", {}, None),
    "roberta with another padding id": ("roberta", {"pad_token_id": 5, "max_position_embeddings": 70}, None),
    "xlm-roberta with another padding id": ("xlm-roberta", {"pad_token_id": 3, "max_position_embeddings": 68}, None),
    "mpnet": ("mpnet", {}, None),
    "mpnet with another padding token": ("mpnet", {"pad_token_id": 2}, ["<s>", "</s>", "<pad>", "[UNK]", "<mask>"]),
}
PADDED: list[Text] = [
    *TEXTS, "<pad>", "good <pad> bad", "<pad> <pad> It is done.", ("a <pad> b", "<pad>"), "one </s> two <unk> three é"
]  # fmt: skip


def make_source(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a random classifier of ``kind`` with a tokenizer that transformers opens, and return the model."""
    from transformers import PreTrainedTokenizerFast

    model = make_model(folder, kind, LABELS, **changes)
    if kind not in ("bert", "roberta"):  # other classes of transformers rebuild the tokenizer in their own way
        names = ["input_ids", *(["token_type_ids"] if kind in WITH_TYPES else []), "attention_mask"]
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), model_input_names=names,
            pad_token="[PAD]" if kind in WITH_TYPES else "<pad>",
        ).save_pretrained(folder)  # fmt: skip
    return model


def expected_inputs(folder: Path, texts: list[Text], max_length: int | None) -> list[dict[str, Any]]:
    """Return what the source's own tokenizer passes to the model, one text per call."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    options = {"truncation": True, "max_length": max_length, "return_tensors": "pt"}
    return [tokenizer(*([text] if isinstance(text, str) else text), **options) for text in texts]


def expected_logits(model: Any, inputs: list[dict[str, Any]]) -> Any:
    with torch.inference_mode():
        return np.concatenate([model(**call).logits.numpy() for call in inputs])


def computed_logits(run: Path, texts: list[Text], artifact: Path | None = None) -> Any:
    """Return the logits of all texts, alone and in one padded batch: [2, n, C]. None: of the run's own weights."""
    opened = Run.open(run)
    reader = opened.reader()
    rows, _ = encode_texts(reader.tokenizer, texts, opened.data.tokens_at_once)
    numbers = np.arange(len(texts))
    with opened.session() if artifact is None else OnnxSession(artifact) as session:
        calls = [collate(rows, numbers[place : place + 1], reader.pad) for place in numbers]
        alone = np.concatenate([session.run(call)["logits"] for call in calls])
        return np.stack([alone, session.run(collate(rows, numbers, reader.pad))["logits"]])


@pytest.mark.parametrize("kind", WITH_TYPES)
def test_token_types_follow_the_sequences(tmp_path: Path, kind: str) -> None:
    """Also where a text contains separators: in torch, in every graph, in predictions of the bundle."""
    source = tmp_path / kind
    model = make_source(source, kind, **WITH_TYPES[kind])
    run = import_hf(str(source), HfOptions(tmp_path / "artifacts"))
    length = Run.open(run).data.tokens_at_once
    inputs = expected_inputs(source, TEXTS, length)
    expected = expected_logits(model, inputs)
    assert any(call["token_type_ids"].any() for call in inputs)
    without_types = expected_logits(model, [{**call, "token_type_ids": 0 * call["token_type_ids"]} for call in inputs])
    assert np.abs(expected - without_types).max() > 100 * CLOSE
    assert np.abs(computed_logits(run, TEXTS) - expected).max() < CLOSE

    document = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["model"]
    assert document["pairs"] is True and document["separator"] is None
    new: dict[str, Any] = {"model": {"kind": "pretrained", "source": str(source), "pairs": True}}
    MODEL.complete(new)
    assert "separator" not in new["model"] and new["model"]["position_padding"] is None
    with np.load(run / "model" / "golden_inputs.npz") as arrays:
        assert arrays["token_type_ids"].shape == arrays["input_ids"].shape and arrays["token_type_ids"].any()
    export(run, ExportOptions(fp16=True, int8=True, exits="all", keep_going=True))
    bundle = Bundle.open(run / "bundle")
    artifacts = {artifact.id: artifact for artifact in bundle.artifacts}
    assert {artifacts[name].status for name in ("onnx-fp32", "onnx-fp16")} == {"built"}
    assert [*artifacts["onnx-fp32"].inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    config = json.loads((bundle.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["model_input_names"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert np.abs(computed_logits(run, TEXTS, bundle.folder / "onnx" / "model.onnx") - expected).max() < CLOSE
    half = computed_logits(run, TEXTS, bundle.folder / "onnx" / "model_fp16.onnx")
    assert np.abs(half - expected).max() < 0.02 * np.abs(expected).max()
    int8 = bundle.folder / "onnx" / "model_int8.onnx"
    if int8.is_file():  # rounded weights at random may be rejected
        with OnnxSession(int8) as session:
            calls = [{name: call[name].numpy() for name in session.inputs} for call in inputs]
            explicit = np.concatenate([session.run(call)["logits"] for call in calls])
        assert np.abs(computed_logits(run, TEXTS, int8)[0] - explicit).max() < CLOSE
    probabilities = torch.tensor(expected).softmax(-1).numpy()
    ids = ["torch", *(entry.id for entry in bundle.built("full", "exit", "step") if entry.precision == "fp32")]
    for artifact in (name for name in ids if "exit" not in name):
        _, answers = predict(Location(run, run / "bundle"), TEXTS, artifact)
        computed = [answer.probability for answer in answers]  # type: ignore[union-attr]
        assert computed == pytest.approx(probabilities.max(-1).tolist(), abs=CLOSE), artifact
    checked = verify(bundle).artifacts
    assert {check.status for check in checked if check.artifact in ids} <= {"verified"}


@pytest.mark.parametrize(("kind", "changes", "special"), COUNTED.values(), ids=COUNTED)
def test_positions_count_tokens_other_than_padding(tmp_path, monkeypatch, kind, changes, special):
    if special is not None:
        monkeypatch.setitem(hf_models._SPECIAL_TOKENS, kind, special)
    source = tmp_path / "source"
    model = make_source(source, kind, **changes)
    run = import_hf(str(source), HfOptions(tmp_path / "artifacts"))
    opened = Run.open(run)
    padding = model.base_model.embeddings.padding_idx
    inputs = expected_inputs(source, PADDED, opened.data.tokens_at_once)
    assert any((call["input_ids"] == padding).any() for call in inputs)
    expected = expected_logits(model, inputs)
    assert np.abs(computed_logits(run, PADDED) - expected).max() < CLOSE
    recipe: Any = opened.recipe
    assert recipe.model.position_padding == padding
    export(run, ExportOptions(keep_going=True))
    assert np.abs(computed_logits(run, PADDED, run / "bundle" / "onnx" / "model.onnx") - expected).max() < CLOSE


def test_trimmed_positions_count_the_same_tokens(tmp_path: Path) -> None:
    """Trimming renumbers the token that counts no position."""
    texts: list[Text] = [*hf_models.SENTENCES[:12]]
    rows = [json.dumps({"text": text, "label": LABELS[place % 3]}) for place, text in enumerate(texts)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    hf_models.save_tokenizer(tmp_path, "xlm-roberta")
    used = encode_texts(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), texts, 12)[0].ids
    padding = int(used.max())
    source, sizes = tmp_path / "source", {"pad_token_id": padding, "max_position_embeddings": padding + 65}
    make_source(source, "xlm-roberta", **sizes)
    run = import_hf(str(source), HfOptions(tmp_path / "artifacts", data=tmp_path))
    export(run, ExportOptions(vocab_trim=True, keep_going=True))
    bundle = Bundle.open(run / "bundle")
    (trimmed,) = [artifact for artifact in bundle.artifacts if artifact.trimmed]
    assert trimmed.vocabulary is not None and trimmed.vocabulary.kept < padding  # so it has another number
    reader = bundle.reader(trimmed)
    encoded = encode_texts(reader.tokenizer, texts, 64)[0]
    with OnnxSession(bundle.folder / str(trimmed.file)) as session:
        logits = session.run(collate(encoded, np.arange(len(texts)), reader.pad))["logits"]
    assert np.abs(logits - computed_logits(run, texts)[0]).max() < CLOSE


def earlier_run(folder: Path, kind: str) -> Path:
    """Import a model, and rewrite the run as earlier versions wrote it."""
    make_source(folder / "source", kind)
    run = import_hf(str(folder / "source"), HfOptions(folder / "artifacts"))
    path = run / "recipe.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    tokenizer = Run.open(run).reader().tokenizer
    document["model"]["separator"] = tokenizer.token_to_id("[SEP]") if document["model"]["pairs"] else None
    del document["model"]["position_padding"]
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with np.load(run / "model" / "golden_inputs.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "token_type_ids"}
    np.savez(run / "model" / "golden_inputs.npz", **kept)  # type: ignore[arg-type]
    if kind == "roberta":
        from safetensors.torch import load_file, save_file

        weights = load_file(run / "model" / "model.safetensors")
        weights["embeddings.positions"] = weights["embeddings.positions"][1:].clone()
        save_file(weights, run / "model" / "model.safetensors", metadata={"format": "pt"})
        manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
        manifest["parameters"] -= weights["embeddings.positions"].shape[1]
        (run / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run


def test_runs_with_a_separator_compute_as_before(tmp_path: Path) -> None:
    """Types of earlier runs follow the separators of the tokens, whatever the tokenizer states."""
    run = earlier_run(tmp_path, "bert")
    model = open_exportable(Run.open(run)).model
    texts: list[Text] = ["good [SEP] bad", ("It is", "done."), ("a [SEP] b", "c")]
    opened = Run.open(run)
    rows, _ = encode_texts(opened.reader().tokenizer, texts, 64)
    call = collate(rows, np.arange(3), opened.reader().pad)
    ids = torch.from_numpy(call["input_ids"])
    is_separator = (ids == opened.recipe.model.separator).long()  # type: ignore[attr-defined]
    types = (is_separator.cumsum(1) - is_separator).clamp(max=1)
    from transformers import AutoModelForSequenceClassification

    source = AutoModelForSequenceClassification.from_pretrained(tmp_path / "source").eval()
    mask = torch.from_numpy(call["attention_mask"])
    with torch.inference_mode():
        expected = source(input_ids=ids, attention_mask=mask, token_type_ids=types).logits.numpy()
        assert np.abs(model(ids, mask).numpy() - expected).max() < CLOSE
    assert np.abs(computed_logits(run, texts) - expected).max() < CLOSE
    export(run, ExportOptions(keep_going=True))
    bundle = Bundle.open(run / "bundle")
    assert [*bundle.artifact("onnx-fp32").inputs] == ["input_ids", "attention_mask"]
    assert np.abs(computed_logits(run, texts, bundle.folder / "onnx" / "model.onnx") - expected).max() < CLOSE


def test_runs_without_a_padding_position_compute_as_before(tmp_path: Path) -> None:
    """In earlier runs every token counts a position."""
    run = earlier_run(tmp_path, "roberta")
    opened = Run.open(run)
    recipe: Any = opened.recipe
    assert recipe.model.position_padding is None
    texts: list[Text] = ["It is done.", "a <pad> b"]
    from transformers import AutoModelForSequenceClassification

    source = AutoModelForSequenceClassification.from_pretrained(tmp_path / "source").eval()
    calls = []
    for call in expected_inputs(tmp_path / "source", texts, 64):
        calls.append({**call, "position_ids": 2 + torch.arange(call["input_ids"].shape[1])[None]})
    assert np.abs(computed_logits(run, texts) - expected_logits(source, calls)).max() < CLOSE


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_training_on_pairs_has_the_loss_of_transformers(tmp_path: Path, kind: str) -> None:
    """Through the cache of encoded rows, the first time and from the disk; a pair's types are stored."""
    from edgeformer.artifacts.progress import SILENT
    from edgeformer.training.loop.frozen import CPU
    from edgeformer.training.loop.objective import Objective

    model = make_source(tmp_path / "source", kind)
    pairs = [("a [SEP] b", "c <pad> d"), ("good", "bad [SEP]"), ("It is done.", "Nobody ever waits until it is cold.")]
    rows = [{"text": a, "other": b, "label": LABELS[place % 3]} for place, (a, b) in enumerate(pairs * 12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    part = {"kind": "file", "path": str(tmp_path / "pairs.jsonl"), "text_pair": "other"}
    parts = {name: [part] for name in ("train", "validation", "test")}
    document = {
        "name": "pairs", "task": "classification",
        "data": {"split": "given", "labels": [*LABELS], "parts": parts, "max_length": 32,
                  "cleaning": "none"},
        "model": {"kind": "pretrained", "source": str(tmp_path / "source"), "pairs": True, "dropout": 0.0,
                  "attention_dropout": 0.0},
        "training": {"epochs": 1, "batch_size": 36, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    inputs = expected_inputs(tmp_path / "source", [*map(tuple, pairs)], 32)  # type: ignore[arg-type]
    logits = torch.tensor(expected_logits(model, inputs))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(3)).item()
    for _ in range(2):
        objective = Objective(recipe, tmp_path / "cache", SILENT)
        (numbers,) = objective.steps(0)
        batch, weight = objective.batch(numbers, CPU)
        assert ("token_type_ids" in batch) == (kind == "bert")
        losses = objective.losses(objective.model.eval(), batch)
        assert losses.total.item() / weight == pytest.approx(expected, abs=CLOSE)
    (stored,) = (tmp_path / "cache").glob("stream-*")
    assert (stored / "types.bin").is_file() == (kind == "bert")
