"""Embedding: pairs with scores, rank correlation, parity with FP32, trimming, and refused data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgeformer.artifacts.data_config import PairsConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.scores import Score, merge_rows, read_evaluation
from edgeformer.data.prepare import read_pairs, read_texts
from edgeformer.data.sources import file_source
from edgeformer.data.trimming import ALL_USED
from edgeformer.models import load_recipe
from edgeformer.tasks import TextReader, get_task
from edgeformer.tasks.embedding import EmbeddingScore, pairs_score, row_cosines, spearman, vector_parity
from edgeformer.tasks.task import Origin

TASK = get_task("embedding")
PAIRS = "sentence1\tsentence2\tscore\na b\ta c\t4.25\nb\tc\t1\nc d\td c a\t2.5\n"


def tiny_tokenizer() -> Tokenizer:
    """Tokenizer of four words with the template of BERT."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def pairs_data(folder: Path, **files: str) -> PairsConfig:
    """Data section with one file per part."""
    parts = {}
    for part, content in files.items():
        path = folder / f"{part}.tsv"
        path.write_text(content, encoding="utf-8")
        parts[part] = (file_source(path, labels=("score",), labelled="score" in content),)
    return PairsConfig(parts=parts, max_length=16)


def test_rank_correlation_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy, which scikit-learn brings, is the oracle")
    generator = np.random.default_rng(3)
    for distinct in (3, 50, 10**6):
        first, second = generator.integers(0, distinct, 200), generator.normal(size=200)
        assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert np.isnan(spearman(np.ones(5), generator.normal(size=5)))


def test_pairs_are_joined_across_batches(tmp_path: Path) -> None:
    rows = TASK.read_set(pairs_data(tmp_path, test=PAIRS), TextReader(tiny_tokenizer(), 0, 8), "test", Origin())
    assert rows.labels.tolist() == [4_250_000] * 2 + [1_000_000] * 2 + [2_500_000] * 2
    vectors = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    meter, batches = TASK.meter(), TASK.call_batches(rows, 2, 8)
    assert [len(numbers) for numbers in batches] == [2, 2, 2] and batches[0].tolist() != [0, 1]
    for numbers in batches:
        batch = TASK.batch(rows, numbers, 0)
        meter.add({"logits": vectors[batch["rows"]]}, batch)
    score = meter.score()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = spearman((unit[::2] * unit[1::2]).sum(axis=1), np.array([4.25, 1, 2.5]))
    assert (score.n, score.compared_with) == (3, "pairs")
    assert (score.similarity, score.loss) == (pytest.approx(expected), pytest.approx(1 - expected))


def test_parity_compares_direction_and_neighbours() -> None:
    generator = np.random.default_rng(1)
    reference = generator.normal(size=(20, 8)).astype(np.float32)
    close = (reference + generator.normal(scale=1e-4, size=reference.shape)).astype(np.float32)
    parity = vector_parity(close, reference, "fp32", "CPU")
    assert parity.top1_agreement == 1.0 and parity.max_abs_error == pytest.approx(4e-4, rel=0.6)
    assert vector_parity(reference[::-1].copy(), reference, "fp32", "CPU").top1_agreement < 0.5
    assert TASK.golden_score(1, 3 * reference, {"reference_exit1": reference}).similarity == pytest.approx(1)
    assert TASK.golden_score(1, -reference, {"reference_exit1": reference}).similarity == pytest.approx(-1)
    answers = TASK.right_answers({}, {1: close, 2: reference})
    assert TASK.right_answers(answers, {1: close, 2: close}) is answers, "trimmed models are compared with the whole"
    close[0, 0] = np.nan
    assert vector_parity(close, reference, "fp32", "CPU").max_abs_error is None


@pytest.mark.parametrize(
    ("compared_with", "precision", "trimmed", "limit"),
    [("fp32", "fp16", False, 0.0005), ("fp32", "int8", True, 0.03), ("pairs", "int8", False, 0.01)],
)
def test_score_drop_has_a_limit(compared_with: Any, precision: Any, trimmed: bool, limit: float) -> None:
    full, passing, failing, near = (
        EmbeddingScore(n=10_000, similarity=value, loss=1 - value, compared_with=compared_with)
        for value in (0.999, 0.999 - 0.9 * limit, 0.999 - 1.1 * limit, 0.96)
    )
    assert TASK.lost(passing, full, precision, trimmed=trimmed) is None
    assert "10,000" in str(TASK.lost(failing, full, precision, trimmed=trimmed))
    reason = TASK.lost(near, full.model_copy(update={"n": 20}), "fp16", trimmed=False)
    assert (reason is None) == (compared_with == "pairs")  # one of 20 pairs has changed its rank


@pytest.mark.parametrize("nan_rows", [0, 1, 40])
def test_vectors_that_rank_nothing_are_refused(tmp_path: Path, nan_rows: int) -> None:
    vectors = np.random.default_rng(4).normal(size=(40, 4)).astype(np.float32)
    full = pairs_score(vectors, np.repeat(row_cosines(vectors[::2], vectors[1::2]).argsort().argsort(), 2))
    assert full.similarity == pytest.approx(1)
    vectors[:] = 1 if nan_rows == 0 else vectors
    vectors[:nan_rows] = np.nan
    score = pairs_score(vectors, np.repeat(np.arange(20), 2))
    assert (score.similarity, score.loss) == (0.0, 1.0)
    for reference in (full, score):
        assert "cosines are not finite, all equal" in str(TASK.lost(score, reference, "int8", trimmed=False))
    write_json(tmp_path / "score.json", score)
    assert Score.recognise(json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))) == score
    merge_rows(tmp_path, TASK.evaluation_rows("torch", "test", score, leaks=False))
    assert read_evaluation(tmp_path).rows[0].similarity == 0.0
    nan = score.model_copy(update={"similarity": float("nan")})
    assert TASK.lost(nan, full, "int8", trimmed=False) and TASK.lost(full, nan, "int8", trimmed=False)
    if nan_rows:
        assert TASK.golden_score(1, vectors, {"reference_exit1": np.ones_like(vectors)}).similarity == 0.0


def test_sets_replace_each_other_but_never_the_training_text_and_nothing_is_trained(tmp_path: Path) -> None:
    data = pairs_data(tmp_path, train="text\na b\nc\n", test=PAIRS)
    assert [len(TASK.set_texts(data, name)) for name in ("train", "validation", "test")] == [2, 6, 6]
    with pytest.raises(InputError, match="--split 'sts': no such set; allowed: test, validation"):
        TASK.set_texts(data, "sts")
    message = r"this imported model has no validation set; .* or score a file: evaluate --data FILE"
    with pytest.raises(DataError, match=message):
        TASK.set_texts(pairs_data(tmp_path, train="text\na b\nc\n"), "validation")
    with pytest.raises(DataError, match=r"this imported model has no training text; .* --data DIR$"):
        TASK.set_texts(pairs_data(tmp_path, test=PAIRS), "train")
    assert [*TASK.set_texts(data, "train").texts] == ["a b", "c"]
    assert len(read_texts(data.parts["test"])) == 6
    with pytest.raises(InputError, match="embedding models are not trained here; import one"):
        TASK.prepare(load_recipe("quickstart"), tmp_path, SILENT)


@pytest.mark.parametrize(
    ("first_row", "message"),
    [
        ("a\tb\tmuch", "line 2: the score 'much' is not a number"),
        ("a\tb\tnan", "line 2: the score 'nan' is not a number"),
        ("a\tb\t1", "all 2 pairs have the same score"),
        ("a\tb\t", "has no label in column 'score'"),
    ],
)
def test_pairs_that_cannot_be_ranked_are_refused(tmp_path: Path, first_row: str, message: str) -> None:
    data = pairs_data(tmp_path, test=f"sentence1\tsentence2\tscore\n{first_row}\nb\tc\t1\n")
    with pytest.raises(DataError, match=message):
        read_pairs(data.parts["test"], "test.tsv")


def test_files_need_pairs_with_detectable_columns(tmp_path: Path) -> None:
    path, no_sources = tmp_path / "pairs.tsv", PairsConfig(parts={}, max_length=16)
    path.write_text("text\tscore\na\t1\nb\t2\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no pairs; it needs the columns sentence1, sentence2 and score"):
        TASK.file_texts(no_sources, path)
    path.write_text(PAIRS.replace("sentence1\tsentence2\tscore", "left\tright\tclose"), encoding="utf-8")
    source = {"kind": "file", "path": "gone.tsv", "text": "left", "text_pair": "right", "label": "close"}
    data = PairsConfig.model_validate({"parts": {"test": [source]}, "max_length": 16})
    assert TASK.file_texts(data, path).labels[0] == 4_250_000
    with pytest.raises(DataError, match="no text column"):
        TASK.file_texts(no_sources, path)


def test_trimming_is_measured_on_other_text(tmp_path: Path) -> None:
    document = json.loads(tiny_tokenizer().to_str())
    vocabulary = document["model"]["vocab"]
    pieces = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    document["model"] = {"type": "WordPiece", "vocab": vocabulary, **pieces}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    data = pairs_data(tmp_path, train="text\na b\nb c\n", test=PAIRS)
    trimmed, vocabulary = TASK.trim(data, tokenizer, {}, ALL_USED)
    assert trimmed.tokenizer.token_to_id("d") is None and trimmed.tokenizer.token_to_id("c") is not None
    assert (vocabulary.kept, vocabulary.original, vocabulary.rows, vocabulary.changed_rows) == (7, 8, 6, 2)
    with pytest.raises(DataError, match="the train set differs from the one of this model's training"):
        TASK.trim(data, tokenizer, {"train": "0" * 64}, ALL_USED)
