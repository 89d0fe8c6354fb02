"""Documents are ranked for queries with embedding models and rerankers, and vectors are written in several formats."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")

from edgeformer import api
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.row_files import NpyRows
from edgeformer.bundle import Bundle, seal
from edgeformer.data.synthetic import SENTENCES
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.models.pretrained.source import SentenceSettings
from edgeformer.run import Run
from edgeformer.tasks.embedding import VectorStore, quantize_vectors, row_cosines, stored_units, unit_rows
from edgeformer.tasks.scoring import EMPTY
from tests.cli.run_cli import Outcome, edgeformer
from tests.export.hf_models import make_cross_encoder, make_model, sentence_transformers
from tests.fakes.install import installed
from tests.serve.test_server import request, serving

DOCUMENTS = [*SENTENCES[:30], "", *SENTENCES[30:40]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles ``encoder`` (with prompts) and ``reranker``, their sources, and documents."""
    folder = tmp_path_factory.mktemp("rank")
    make_cross_encoder(folder / "hub" / "encoder-model")
    make_model(folder / "hub" / "encoder-model", "bert")
    sentence_transformers(folder / "hub" / "encoder-model", "mean", normalize=False)
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": None}
    (folder / "hub" / "encoder-model" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    make_cross_encoder(folder / "hub" / "reranker-model")
    for name in ("encoder", "reranker"):
        run = import_hf(str(folder / "hub" / f"{name}-model"), HfOptions(folder / "artifacts", name=name))
        export(run, ExportOptions())
    with (folder / "documents.csv").open("w", encoding="utf-8", newline="") as file:
        rows = ([f"d{number}", text] for number, text in enumerate(DOCUMENTS))
        csv.writer(file).writerows([["id", "document"], *rows])
    return folder


def predict(folder: Path, *arguments: str, code: int = 3) -> Outcome:
    """Run ``predict``; the default exit code is that of a text without an answer."""
    outcome = edgeformer("predict", *arguments, cwd=folder)
    assert outcome.code == code, outcome.err
    return outcome


def bundle(folder: Path, name: str) -> api.Bundle:
    return api.Bundle.open(folder / "artifacts" / name / "bundle")


def vectors_of(folder: Path, texts: list[str]) -> Any:
    return np.stack([answer.vector for answer in bundle(folder, "encoder").predict(texts)])


@pytest.mark.slow
def test_an_embedding_model_ranks_by_cosine(folder: Path) -> None:
    queries = ["A bridge of wood", "Drink enough."]
    options = ("--file", "documents.csv", "--json")
    out = predict(folder, "encoder", "--query", queries[0], "--query", queries[1], "--top", "4", *options)
    document = json.loads(out.out)
    assert (document["rows"], document["errors"]) == (41, 1) and "1 without a score" in out.err
    texts = [text for text in DOCUMENTS if text]
    prompted = [f"query: {query}" for query in queries], [f"passage: {text}" for text in texts]
    asked, answers = (unit_rows(vectors_of(folder, each)) for each in prompted)
    cosine = asked @ answers.T
    for ranking, query, row in zip(document["rankings"], queries, cosine, strict=True):
        best = np.argsort(-row)[:4]
        assert ranking["query"] == query and [d["rank"] for d in ranking["documents"]] == [1, 2, 3, 4]
        assert [d["text"] for d in ranking["documents"]] == [texts[place] for place in best]
        assert [d["score"] for d in ranking["documents"]] == pytest.approx(row[best].tolist(), abs=1e-5)
        first = ranking["documents"][0]
        assert first["values"] == {"id": f"d{first['row'] - 1}", "document": first["text"]}
        assert DOCUMENTS[first["row"] - 1] == first["text"]
    table = predict(folder, "encoder", "--query", queries[0], "--file", "documents.csv", "--top", "2").out
    assert "rank" in table and "query" not in table.split("text")[0]
    ranked = bundle(folder, "encoder").rank(queries[0], texts, 4)
    assert [d.text for d in ranked] == [d["text"] for d in document["rankings"][0]["documents"]]


@pytest.mark.slow
def test_a_task_of_another_package_that_extends_embeddings_ranks(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "artifacts" / "encoder" / "bundle", tmp_path / "passages")
    copied = Bundle.open(tmp_path / "passages")
    with installed("reference_task"):
        seal(copied.folder, copied.manifest.model_copy(update={"task": "passages"}))
        passages, texts = api.open(copied.folder), [text for text in DOCUMENTS if text]
        assert isinstance(passages, api.Bundle) and passages.task.noun == "passage model"
        ranked, expected = (opened.rank("A bridge", texts, 4) for opened in (passages, bundle(folder, "encoder")))
        assert ranked == expected
        out = predict(tmp_path, "--run", "passages", "A bridge.", "Some wood.", "--json", code=0)
        assert np.shape(json.loads(out.out)["cosines"]) == (2, 2)
        options = ("--query", "A bridge", "--file", str(folder / "documents.csv"), "--vectors", "int8", "--json")
        assert len(json.loads(predict(tmp_path, "passages", *options).out)["rankings"][0]["documents"]) == 10


def test_a_reranker_ranks_by_its_score(folder: Path) -> None:
    options = ("--query", "A bridge of wood", "--query", "Drink enough.", "--file", "documents.csv", "--json")
    document = json.loads(predict(folder, "reranker", *options).out)
    texts = [text for text in DOCUMENTS if text]
    assert (document["rows"], document["errors"]) == (41, 1)
    for ranking in document["rankings"]:
        scores = [answer.score for answer in bundle(folder, "reranker").predict([(ranking["query"], t) for t in texts])]
        best = np.argsort(-np.array(scores))[:10]
        assert [d["text"] for d in ranking["documents"]] == [texts[place] for place in best]
    ranked = bundle(folder, "reranker").rank("Drink enough.", texts, 10)
    assert [d.text for d in ranked] == [d["text"] for d in document["rankings"][1]["documents"]]
    with pytest.raises(InputError, match=f"'Drink enough. ': {EMPTY}; leave out or replace this text"):
        bundle(folder, "reranker").rank("Drink enough.", ["a", ""], 10)


def test_documents_are_ranked_over_http(folder: Path) -> None:
    body = {"query": "A bridge of wood", "documents": SENTENCES[:20], "top": 3}
    for name in ("encoder", "reranker"):
        with serving(bundle=folder / "artifacts" / name / "bundle") as (_, port):
            status, _, document = request(port, "/rank", body)
            expected = bundle(folder, name).rank(body["query"], SENTENCES[:20], 3)  # type: ignore[arg-type]
            assert status == 200 and document["query"] == body["query"]
            ranked = [(d["rank"], d["row"], d["text"]) for d in document["documents"]]
            assert ranked == [(d.rank, d.row, d.text) for d in expected]
            for wrong, message in (({**body, "documents": ["a", ""]}, EMPTY), ({"query": "a"}, "documents: Field")):
                status, _, document = request(port, "/rank", wrong)
                assert (status, message in document["error"]) == (422, True), document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("encoder", "--query", " ", "--file", "documents.csv"), "--query: the query is empty"),
        (("encoder", "--query", "a"), "--query: is for a file of texts"),
        (("encoder", "--query", "a", "--file", "documents.csv", "--output", "x.csv"), "--output: does not apply"),
        (("encoder", "--query", "a", "--file", "documents.csv", "--text", "x"), "no column 'x'"),
        (
            ("reranker", "--query", "a", "--file", "documents.csv", "--vectors", "int8"),
            "--vectors: reranker is a reranker and computes no vectors",
        ),
        (("reranker", "--query", "a", "--query", "b", "--file", "-"), "standard input can be read only once"),
        (("reranker", "--file", "documents.csv", "--output", "x.npy"), "npy: is for vectors, and reranker makes none"),
        (("encoder", "--file", "documents.csv", "--format", "npy"), "--format npy: cannot go to standard output"),
        (("encoder", "--file", "documents.csv", "--output", "x.npy", "--columns", "id"), "has the vectors only"),
        (("reranker", "--file", "documents.csv", "--prompt", "query"), "--prompt: is for vectors"),
    ],
)
def test_wrong_options(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(predict(folder, *arguments, code=2).err.split())
    assert not [path for path in folder.iterdir() if path.name.startswith("x.")]


@pytest.mark.parametrize(
    ("kind", "dtype", "width"), [("float32", "float32", 32), ("int8", "int8", 32), ("binary", "uint8", 4)]
)
def test_vectors_in_files(folder: Path, tmp_path: Path, kind: Any, dtype: str, width: int) -> None:
    expected = quantize_vectors(vectors_of(folder, [f"passage: {text}" for text in DOCUMENTS if text]), kind)
    place = DOCUMENTS.index("")
    for suffix in ("npy", "parquet", "jsonl"):
        options = ("--output", str(tmp_path / f"v.{suffix}"), "--vectors", kind, "--prompt", "document", "--json")
        outcome = predict(folder, "encoder", "--file", "documents.csv", *options)
        facts = json.loads(outcome.out)
        if kind != "float32":
            loss = facts["vectors"]
            assert (loss["kind"], loss["texts"]) == (kind, 40) and 0 < loss["rank_correlation"] < 1
            assert f"{kind} vectors against float32 on 40 texts: rank correlation of cosines 0." in outcome.err
            assert 0 < loss["recall_at_10"] <= 1
    array = np.load(tmp_path / "v.npy")
    assert array.dtype == dtype and array.shape == (41, width) and not array[place].any()
    table = parquet.read_table(tmp_path / "v.parquet")
    types = {"float32": "list<element: float>", "int8": "list<element: int8>", "binary": "list<element: uint8>"}
    assert str(table.schema.field("vector").type) == types[kind]
    assert table.column("id").to_pylist()[place] == f"d{place}" and table.column("error").to_pylist()[place] == EMPTY
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text(encoding="utf-8").splitlines()]
    for vectors in (np.delete(array, place, 0), [v for v in table.column("vector").to_pylist() if v is not None],
                    [row["vector"] for row in rows if "vector" in row]):  # fmt: skip
        assert np.allclose(np.array(vectors), expected, atol=1e-5 if kind == "float32" else 1)
    assert rows[0]["text"] == DOCUMENTS[0]  # without the prompt


def test_quantised_vectors_rank(folder: Path) -> None:
    options = ("--query", SENTENCES[3], "--file", "documents.csv", "--top", "41", "--json", "--vectors")
    for kind in ("int8", "binary"):
        document = json.loads(predict(folder, "encoder", *options, kind).out)
        assert document["vectors"]["kind"] == kind and document["vectors"]["texts"] == 40
        both: Any = [vectors_of(folder, [f"{prompt}: {SENTENCES[3]}"]) for prompt in ("query", "passage")]
        (cosine,) = row_cosines(*(stored_units(vectors, kind) for vectors in both))  # type: ignore[arg-type]
        (ranked,) = [d for d in document["rankings"][0]["documents"] if d["row"] == 4]
        assert ranked["score"] == pytest.approx(cosine, abs=0.01 if kind == "int8" else 1 / 8)


def test_stored_vectors_keep_cosines() -> None:
    generator = np.random.default_rng(2)
    vectors = generator.normal(size=(300, 256)).astype(np.float32) + generator.normal(size=256).astype(np.float32)
    vectors[7] = 0
    stored = quantize_vectors(vectors, "int8")
    assert stored.dtype == np.int8 and np.abs(stored[0]).max() == 127 and not stored[7].any()
    assert row_cosines(stored[:7], vectors[:7]).min() > 0.9995
    bits = quantize_vectors(vectors, "binary")
    hamming = np.unpackbits(bits[0] ^ bits[1]).sum()
    units = stored_units(vectors[:2], "binary")
    assert bits.shape == (300, 32) and units[0] @ units[1] == pytest.approx(1 - 2 * hamming / 256)

    def loss(kind: Any, count: int) -> Any:
        store = VectorStore(kind)
        store.add([type("Answer", (), {"vector": vector}) for vector in vectors[8 : 8 + count]])
        return store.loss()

    int8, binary = loss("int8", 200), loss("binary", 200)
    assert int8.rank_correlation > 0.999 > binary.rank_correlation > 0.4
    assert int8.recall_at_10 > 0.95 > binary.recall_at_10 > 10 / 199
    assert loss("float32", 20) is None and loss("int8", 2).rank_correlation is None
    assert loss("int8", 11).recall_at_10 is None and "recall" not in loss("int8", 11).sentence()
    # All other texts are compared, not the text itself.
    cosine = unit_rows(vectors[8:30]) @ unit_rows(vectors[8:30]).T
    quantized = stored_units(vectors[8:30], "binary") @ stored_units(vectors[8:30], "binary").T
    nearest = (np.argsort(9 * np.eye(22) - side, kind="stable")[:, :10] for side in (cosine, quantized))
    shares = [len({*first} & {*second}) / 10 for first, second in zip(*nearest, strict=True)]
    assert loss("binary", 22).recall_at_10 == pytest.approx(np.mean(shares), abs=0.02)  # ties in another order


def test_an_array_file_of_any_number_of_rows() -> None:
    stream = io.BytesIO()
    writer = NpyRows(stream, {"vector": [0.5, 1.5]})
    for start in range(0, 12_000, 1000):
        writer.write([{"vector": [float(start + n), -1.0]} for n in range(1000)])
    writer.close()
    stream.seek(0)
    array = np.load(stream, allow_pickle=False)
    assert array.shape == (12_000, 2) and array.dtype == np.float32 and array[11_999].tolist() == [11_999, -1]


@pytest.mark.slow
def test_prompts_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    source = str(folder / "hub" / "encoder-model")
    options = ("--query-prompt", "q ", "--document-prompt", "d ", "--name", "other")
    assert edgeformer("import", "hf", source, *options, cwd=tmp_path).code == 0
    data: Any = Run.open(tmp_path / "artifacts" / "other").data
    assert data.prompts == {"query": "q ", "document": "d "}
    # encode_document of sentence-transformers finds its own empty prompt of the name "document" before "passage"
    prompts = SentenceSettings(prompts={"passage": "p: ", "query": "", "other": "o: "}, default_prompt_name="other")
    assert prompts.used_prompts == {"default": "o: "}
    refused = edgeformer("import", "hf", str(folder / "hub" / "reranker-model"), *options[:2], cwd=tmp_path)
    assert refused.code == 2 and "prompts are for embedding models" in refused.err
