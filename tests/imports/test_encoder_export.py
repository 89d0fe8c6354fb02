"""Imported models export, are judged, and store every weight once, however often a layer is called."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")

from edgeformer.artifacts.progress import SILENT
from edgeformer.benchmark.gate_scores import ArtifactPair, CommonRows, common_rows, score_check
from edgeformer.bundle import Bundle, seal
from edgeformer.data.sources import imported_parts
from edgeformer.data.synthetic import SENTENCES
from edgeformer.export.export import export
from edgeformer.export.quantize import quantized_nodes
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.run import Run, locate
from tests.cli.run_cli import edgeformer, run_json
from tests.export.hf_models import make_model, sentence_transformers

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "embedding_size": 32}
LABELS = ("no", "perhaps", "yes")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ALBERT, whose one layer is called four times: every precision, and an engine if one can be built."""
    folder = tmp_path_factory.mktemp("albert")
    make_model(folder / "albert", "albert", LABELS, num_hidden_layers=4, **SIZES)
    run = import_hf(str(folder / "albert"), HfOptions(folder / "artifacts", name="albert"))
    export(run, ExportOptions(fp16=True, int8=True, keep_going=True, build=("tensorrt",), target="rtx4050"))
    return run


def test_every_precision_is_judged_and_stores_every_parameter_once(run: Path) -> None:
    artifacts = {artifact.id: artifact for artifact in Bundle.open(run / "bundle").artifacts}
    once = make_model(run.parent / "once", "albert", LABELS, num_hidden_layers=1, **SIZES)
    parameters = Run.open(run).manifest.parameters
    assert parameters == sum(parameter.numel() for parameter in once.parameters())
    for id_ in ("onnx-fp32", "onnx-fp16", "onnx-int8"):
        artifact = artifacts[id_]
        assert artifact.parity is not None and artifact.parity.n == 64 and artifact.parity.max_abs_error is not None
        assert artifact.score is not None and artifact.score.n == 64
        assert artifact.sharing is not None
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters == parameters, id_
        if id_ == "onnx-fp32":
            assert artifact.status == "built" and artifact.parity.max_abs_error < 1e-5, artifact.reason
        elif id_ == "onnx-fp16":  # its tokenizer is trained anew, with ties: the inputs, and so the error, differ
            within = artifact.parity.relative_error <= 0.01  # type: ignore[operator]
            assert (artifact.status == "built") == within and artifact.parity.relative_error < 0.05, artifact.reason  # type: ignore[operator]
        else:  # weights at random are sure of little, so that a rounded one may well be rejected
            missing = 1 - artifact.score.accuracy  # type: ignore[attr-defined]
            assert (artifact.status == "built") == (missing <= 1.5 / 64), artifact.reason


def test_bundle_verifies_and_predicts(run: Path, tmp_path: Path) -> None:
    checked = verify(Bundle.open(run / "bundle"))
    built = {artifact.id for artifact in Bundle.open(run / "bundle").built() if artifact.is_graph}
    assert {check.artifact for check in checked.artifacts if check.status == "verified"} == built
    texts: list[Any] = ["It is done.", "Nobody ever waits until it is cold.", ("Is it late?", "Both will have to pay.")]
    pair = edgeformer("predict", str(run), "Is it late?", "--pair", "Both will have to pay.", cwd=tmp_path)
    assert pair.code == 0 and "Is it late? ⁄ Both will have to pay." in pair.out
    location = locate(str(run), run.parent)
    for item, other in zip(predict(location, texts, "torch")[1], predict(location, texts, "onnx-fp32")[1], strict=True):
        assert other.probability == pytest.approx(item.probability, abs=1e-5)  # type: ignore[union-attr]
    config = json.loads((run / "bundle" / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "no", "1": "perhaps", "2": "yes"} and config["max_position_embeddings"] == 64


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence encoder with pairs to judge it by, text to trim it to, and all that export makes of it."""
    folder = tmp_path_factory.mktemp("encoder")
    make_model(folder / "model", "albert")
    sentence_transformers(folder / "model", "mean", normalize=True)
    (folder / "data").mkdir()
    pairs = [(a, " ".join(a.split()[: 2 + n % 5]), n % 5) for n, a in enumerate(SENTENCES)]
    table = "sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{score}\n" for a, b, score in pairs)
    (folder / "data" / "validation.tsv").write_text(table, encoding="utf-8")
    (folder / "data" / "train.txt").write_text("\n".join(SENTENCES[:40]), encoding="utf-8")
    options = HfOptions(folder / "artifacts", name="encoder", data=folder / "data")
    run = import_hf(str(folder / "model"), options)
    export(run, ExportOptions(int8=True, exits="all", vocab_trim=True, keep_going=True))
    return run


def test_vectors_are_judged_by_pairs_and_by_fp32(encoder: Path) -> None:
    artifacts = {artifact.id: artifact for artifact in Bundle.open(encoder / "bundle").artifacts}
    assert {"onnx-fp32", "onnx-fp32-exit1", "onnx-fp32-step", "onnx-int8", "onnx-int8-trim"} <= artifacts.keys()
    full: Any = artifacts["onnx-fp32"]
    assert full.score.compared_with == "fp32" and full.score.similarity == pytest.approx(1, abs=1e-6)
    assert full.validation.compared_with == "pairs" and full.validation.n == 67
    assert full.sharing.stored_parameters == full.sharing.unique_parameters
    trimmed: Any = artifacts["onnx-int8-trim"]
    assert trimmed.vocabulary.kept < trimmed.vocabulary.original and trimmed.vocabulary.rows == 134
    # Its golden answers are its own, its score is against the whole model's vectors.
    assert trimmed.score.similarity < artifacts["onnx-int8"].score.similarity  # type: ignore[union-attr]


def test_gate_scores_pairs_outside_the_candidates_training_data(encoder: Path, tmp_path: Path) -> None:
    """The candidate has another test set; its training texts hold the first text of pair 0, the second of pair 3."""
    baseline = Bundle.open(encoder / "bundle")
    assert baseline.task.rows.set_texts(baseline.data, "train").fingerprint() == baseline.trained_on["train"]
    test_texts = baseline.task.rows.set_texts(baseline.data, "test")
    (tmp_path / "train.txt").write_text(f"{test_texts.texts[0]}\n{test_texts.texts[7]}\n", encoding="utf-8")
    (tmp_path / "test.tsv").write_text("sentence1\tsentence2\tscore\na b\tb\t1\nc\td\t2\n", encoding="utf-8")
    document = json.loads(baseline.manifest.model_dump_json())
    document["data"]["parts"] = {
        name: [source.model_dump(mode="json") for source in sources]
        for name, sources in imported_parts(tmp_path, scored=True)[0].items()
    }
    candidate = Path(shutil.copytree(baseline.folder, tmp_path / "candidate"))
    for _ in range(2):  # with the fingerprints of its own sets
        seal(candidate, type(baseline.manifest).model_validate_json(json.dumps(document), strict=False))
        opened = Bundle.open(candidate)
        sets = opened.task.rows.available_sets(opened.data)
        document["data_fingerprints"] = {name: texts.fingerprint() for name, texts in sets.items()}
    rows = common_rows(baseline, opened, None)
    assert isinstance(rows, CommonRows), rows
    left_out = [row for row, text in enumerate(test_texts.texts) if text in (test_texts.texts[0], test_texts.texts[7])]
    pairs = [pair for pair in range(len(test_texts) // 2) if not {2 * pair, 2 * pair + 1} & {*left_out}]
    assert rows.texts.texts == [test_texts.texts[row] for pair in pairs for row in (2 * pair, 2 * pair + 1)]
    assert 0 < len(pairs) < 67
    entry = baseline.artifact("onnx-fp32")
    check = score_check((baseline, opened), ArtifactPair(entry, entry), None, rows, 0.05, SILENT)
    assert (check.status, check.rows, check.change) == ("pass", len(pairs), 0.0)
    assert f"without {67 - len(pairs)} rows that the candidate was trained on" in check.reason


def test_vectors_are_compared_on_the_command_line(encoder: Path, tmp_path: Path) -> None:
    bundle = str(encoder / "bundle")
    document = run_json("predict", bundle, "Drink enough.", "Drink enough!", cwd=tmp_path)
    vectors = np.array([prediction["vector"] for prediction in document["predictions"]])
    assert vectors.shape == (2, 32) and np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert document["cosines"][0][1] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)
    table = edgeformer("predict", bundle, "a", "b", "c", cwd=tmp_path)
    assert table.code == 0 and table.out.count("0.") + table.out.count("1.0000") >= 6
    letters = "abcdefghijk"
    table = edgeformer("predict", bundle, *letters, cwd=tmp_path)
    document = run_json("predict", bundle, *letters, cwd=tmp_path)
    similar = np.array(document["similarities"]) - 2 * np.eye(len(letters))
    nearest = [letters[index] for index in similar.argmax(axis=1)]
    rows = [line.split() for line in table.out.splitlines() if line.strip()][-len(letters) :]
    assert table.code == 0 and [(row[0], row[-1]) for row in rows] == [*zip(letters, nearest, strict=True)], table.out
    for options, message in (
        (("--confidence", "0.5"), "no single probability"),
        (("--pair", "x"), "reads single texts"),
    ):
        refused = edgeformer("predict", bundle, "a", "b", *options, cwd=tmp_path)
        assert refused.code == 2 and message in " ".join(refused.err.split()), refused.err


@pytest.mark.parametrize("kind", ["xlm-roberta", "mpnet", "deberta-v2", "modernbert"])
def test_encoders_from_source_to_estimate(tmp_path: Path, kind: str) -> None:
    """Import, fine-tune (folded where layers can be shared), export in every precision, verify, profile."""
    make_model(tmp_path / "source", kind, LABELS)
    imported = import_hf(str(tmp_path / "source"), HfOptions(tmp_path / "artifacts", name="imported"))
    document = yaml.safe_load((imported / "recipe.yaml").read_text(encoding="utf-8"))
    for key in ("architecture", "weights_sha256"):
        document["model"].pop(key)
    document["model"]["fold"] = None if kind == "modernbert" else {"layers": 1, "iterations": 2}
    document["training"] |= {"epochs": 1, "optimizer": {"kind": "adamw", "lr": 1e-3}}
    document["data"] |= {
        "split": "random-split", "labels": ["negative", "positive"],
        "parts": {"train": [{"kind": "synthetic-reviews", "rows": 600}]},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    for line in (
        "train recipe.yaml --name trained --accelerator cpu",
        "export trained --fp16 --int8 --keep-going",
        "verify trained",
        "profile trained --device raspberry-pi-5 --artifact onnx-fp32 --batch 1 --seq 16",
    ):
        outcome = edgeformer(*line.split(), cwd=tmp_path)
        assert outcome.code in (0, 3), outcome.err
    run = Run.open(tmp_path / "artifacts" / "trained")
    bundle = Bundle.open(run.folder / "bundle")
    artifacts: dict[str, Any] = {artifact.id: artifact for artifact in bundle.artifacts}
    assert {artifacts[id_].status for id_ in ("onnx-fp32", "onnx-fp16")} == {"built"}, artifacts
    for id_ in ("onnx-fp32", "onnx-fp16", "onnx-int8"):
        sharing = artifacts[id_].sharing
        assert sharing.stored_parameters == sharing.unique_parameters == run.manifest.parameters
    # DeBERTa projects its relative positions once for both iterations, because they share the weights.
    products = 2 * (4 if kind == "modernbert" else 6) + 2 + (2 if kind == "deberta-v2" else 0)
    int8 = bundle.folder / "onnx" / "model_int8.onnx"
    if artifacts["onnx-int8"].status == "built":
        assert quantized_nodes(onnx.load(str(int8)))["MatMulInteger"] == products
