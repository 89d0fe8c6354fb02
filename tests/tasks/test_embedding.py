"""The embedding task: pairs with scores, their rank correlation, closeness to FP32, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgeformer.artifacts.data_config import PairsConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.scores import Score, merge_rows, read_evaluation
from edgeformer.data.prepare import pair_part, read_pairs, read_texts
from edgeformer.data.sources import file_source
from edgeformer.data.trimming import ALL_USED
from edgeformer.models import load_recipe
from edgeformer.tasks import TextReader, task_named
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.embedding import (
    EmbeddingScore,
    TextVector,
    cosines,
    nearest,
    pairs_score,
    reference_score,
    row_cosines,
    spearman,
    vector_parity,
)
from edgeformer.tasks.task import Origin

TASK = task_named("embedding")
PAIRS = "sentence1\tsentence2\tscore\na b\ta c\t4.25\nb\tc\t1\nc d\td c a\t2.5\n"


def tiny_tokenizer() -> Tokenizer:
    """Four words, and BERT's template."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def data(folder: Path, **files: str) -> PairsConfig:
    """A data section of files."""
    parts = {}
    for part, content in files.items():
        path = folder / f"{part}.tsv"
        path.write_text(content, encoding="utf-8")
        parts[part] = (file_source(path, labels=("score",), labelled="score" in content),)
    return PairsConfig(parts=parts, max_length=16)


def test_rank_correlation_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy, which scikit-learn brings, is the oracle")
    random = np.random.default_rng(3)
    for ties in (3, 50, 10**6):
        first, second = random.integers(0, ties, 200), random.normal(size=200)
        assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert np.isnan(spearman(np.ones(5), random.normal(size=5)))


def test_pairs_are_put_together_however_their_rows_were_batched(tmp_path: Path) -> None:
    config = data(tmp_path, test=PAIRS)
    reader = TextReader(tiny_tokenizer(), 0, 8)
    rows = TASK.read_set(config, reader, "test", Origin())
    assert rows.labels.tolist() == [4_250_000] * 2 + [1_000_000] * 2 + [2_500_000] * 2
    random = np.random.default_rng(0)
    vectors = random.normal(size=(6, 3)).astype(np.float32)
    meter = TASK.meter()
    batches = TASK.call_batches(rows, 2, 8)
    assert [len(numbers) for numbers in batches] == [2, 2, 2] and batches[0].tolist() != [0, 1]
    for numbers in batches:
        batch = TASK.batch(rows, numbers, 0)
        meter.add({"logits": vectors[batch["rows"]]}, batch)
    score = meter.score()
    assert isinstance(score, EmbeddingScore)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = (unit[::2] * unit[1::2]).sum(axis=1)
    assert score.similarity == pytest.approx(spearman(found, np.array([4.25, 1, 2.5])))
    assert (score.n, score.compared_with, score.loss) == (3, "pairs", pytest.approx(1 - score.similarity))


def test_every_exit_has_a_score_of_its_own() -> None:
    meter = TASK.meter((1, 2))
    random = np.random.default_rng(0)
    batch = {"rows": np.arange(8), "labels": np.repeat([1, 5, 3, 9], 2)}
    vectors = {exit_logits(loop): random.normal(size=(8, 4)) for loop in (1, 2)}
    meter.add(vectors, batch)
    assert meter.earlier()[1] != meter.score()
    with pytest.raises(ValueError, match="empty"):
        TASK.meter().score()


def test_closeness_to_fp32_knows_direction_and_neighbours() -> None:
    random = np.random.default_rng(1)
    reference = random.normal(size=(20, 8)).astype(np.float32)
    close = (reference + random.normal(scale=1e-4, size=reference.shape)).astype(np.float32)
    parity = vector_parity(close, reference, "fp32", "here")
    assert parity.top1_agreement == 1.0 and parity.max_abs_error == pytest.approx(4e-4, rel=0.6)
    assert vector_parity(reference[::-1].copy(), reference, "fp32", "here").top1_agreement < 0.5
    assert reference_score(3 * reference, reference).similarity == pytest.approx(1)
    assert reference_score(-reference, reference).similarity == pytest.approx(-1)
    broken = close.copy()
    broken[0, 0] = np.nan
    assert vector_parity(broken, reference, "fp32", "here").max_abs_error is None


@pytest.mark.parametrize(
    ("compared_with", "precision", "trimmed", "allowed", "too_much"),
    [
        ("fp32", "fp16", False, 0.0004, 0.0006),
        ("fp32", "int8", False, 0.019, 0.021),
        ("fp32", "int8", True, 0.029, 0.031),
        ("pairs", "fp16", False, 0.0009, 0.0011),
        ("pairs", "int8", False, 0.009, 0.011),
        ("pairs", "int8", True, 0.014, 0.016),
    ],
)
def test_each_precision_has_its_bar(
    compared_with: str, precision: str, trimmed: bool, allowed: float, too_much: float
) -> None:
    def score(similarity: float) -> EmbeddingScore:
        return EmbeddingScore.model_validate(
            {"n": 10_000, "similarity": similarity, "loss": 1 - similarity, "compared_with": compared_with}
        )

    whole = score(0.999)
    assert TASK.lost(score(0.999 - allowed), whole, precision, trimmed=trimmed) is None  # type: ignore[arg-type]
    reason = TASK.lost(score(0.999 - too_much), whole, precision, trimmed=trimmed)  # type: ignore[arg-type]
    assert reason is not None and "10,000" in reason
    few = whole.model_copy(update={"n": 20})
    by_chance = TASK.lost(score(0.96), few, "fp16", trimmed=False)
    assert (by_chance is None) == (compared_with == "pairs")  # one of 20 pairs has changed its rank


@pytest.mark.parametrize("spoilt", ["equal", "one is NaN", "all are NaN"])
def test_vectors_that_rank_nothing_are_lost_and_their_score_can_be_read_back(tmp_path: Path, spoilt: str) -> None:
    vectors = np.random.default_rng(4).normal(size=(40, 4)).astype(np.float32)
    scores = np.repeat(np.arange(20), 2)
    whole = pairs_score(vectors, np.repeat(row_cosines(vectors[::2], vectors[1::2]).argsort().argsort(), 2))
    assert whole.similarity == pytest.approx(1)
    if spoilt == "equal":
        vectors[:] = 1
    vectors[: {"equal": 0, "one is NaN": 1, "all are NaN": 40}[spoilt]] = np.nan
    found = pairs_score(vectors, scores)
    assert (found.similarity, found.loss) == (0.0, 1.0)
    for reference in (whole, found):
        assert "cosines are not finite, all equal" in str(TASK.lost(found, reference, "int8", trimmed=False))
    write_json(tmp_path / "score.json", found)
    assert Score.recognise(json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))) == found
    merge_rows(tmp_path, TASK.rows("torch", "test", found))
    assert read_evaluation(tmp_path).rows[0].similarity == 0.0
    nan = found.model_copy(update={"similarity": float("nan")})
    assert TASK.lost(nan, whole, "int8", trimmed=False) and TASK.lost(whole, nan, "int8", trimmed=False)
    if spoilt != "equal":
        assert reference_score(vectors, np.ones_like(vectors)).similarity == 0.0


def test_a_trimmed_model_is_held_to_the_whole_ones_vectors() -> None:
    random = np.random.default_rng(2)
    whole, trimmed = random.normal(size=(2, 5, 4))
    answers = TASK.right_answers({}, {1: trimmed, 2: whole})
    assert TASK.right_answers(answers, {1: trimmed, 2: trimmed}) is answers
    assert TASK.golden_score(2, whole, answers).similarity == pytest.approx(1)  # type: ignore[attr-defined]
    assert TASK.golden_score(2, trimmed, answers).similarity < 0.9  # type: ignore[attr-defined]


def test_sets_stand_in_for_each_other_and_training_text_never_does(tmp_path: Path) -> None:
    config = data(tmp_path, train="text\na b\nc\n", test=PAIRS)
    assert [pair_part(config, name) for name in ("train", "validation", "test")] == ["train", "test", "test"]
    with pytest.raises(InputError, match="--split 'sts': no such set; allowed: test, validation"):
        pair_part(config, "sts")
    with pytest.raises(DataError, match=r"nothing is known of a validation set; .* or give evaluate a file of its own"):
        pair_part(data(tmp_path, train="text\na b\nc\n"), "validation")
    with pytest.raises(DataError, match=r"nothing is known of its training text; .* --data DIR$"):
        pair_part(data(tmp_path, test=PAIRS), "train")
    assert [*read_texts(config.parts["train"]).texts] == ["a b", "c"]
    assert len(read_texts(config.parts["test"])) == 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("sentence1\tsentence2\tscore\na\tb\tmuch\nb\tc\t1\n", "line 2: the score 'much' is no number"),
        ("sentence1\tsentence2\tscore\na\tb\tnan\nb\tc\t1\n", "line 2: the score 'nan' is no number"),
        ("sentence1\tsentence2\tscore\na\tb\t1\nb\tc\t1\n", "all 2 pairs have the same score"),
        ("sentence1\tsentence2\tscore\na\tb\t\nb\tc\t1\n", "has no label in column 'score'"),
    ],
)
def test_pairs_that_cannot_be_ranked_are_refused(tmp_path: Path, content: str, said: str) -> None:
    config = data(tmp_path, test=content)
    with pytest.raises(DataError, match=said):
        read_pairs(config.parts["test"], "test.tsv")


def test_single_texts_are_no_pairs(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("text,score\na,1\nb,2\n", encoding="utf-8")
    with pytest.raises(DataError, match="has single texts, no pairs; name two columns sentence1 and sentence2"):
        TASK.read_file(PairsConfig(parts={}, max_length=16), TextReader(tiny_tokenizer(), 0, 8), path)


def test_a_file_may_call_pairs_what_the_models_own_data_does(tmp_path: Path) -> None:
    path = tmp_path / "own.tsv"
    path.write_text(PAIRS.replace("sentence1\tsentence2\tscore", "left\tright\tclose"), encoding="utf-8")
    reader, source = TextReader(tiny_tokenizer(), 0, 8), {"kind": "file", "path": "gone.tsv", "text": "left"}
    own = {"parts": {"test": [{**source, "text_pair": "right", "label": "close"}]}, "max_length": 16}
    assert TASK.read_file(PairsConfig.model_validate(own), reader, path).labels[0] == 4_250_000
    with pytest.raises(DataError, match="no text column"):
        TASK.read_file(PairsConfig(parts={}, max_length=16), reader, path)


def test_a_trimmed_vocabulary_is_measured_on_other_text(tmp_path: Path) -> None:
    words = tiny_tokenizer()
    word_piece = json.loads(words.to_str())
    word_piece["model"] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": words.get_vocab(),
    }
    tokenizer = Tokenizer.from_str(json.dumps(word_piece))
    config = data(tmp_path, train="text\na b\nb c\n", test=PAIRS)
    trimmed, vocabulary = TASK.trim(config, tokenizer, {}, ALL_USED)
    assert trimmed.tokenizer.token_to_id("d") is None and trimmed.tokenizer.token_to_id("c") is not None
    assert (vocabulary.kept, vocabulary.original, vocabulary.rows, vocabulary.changed_rows) == (7, 8, 6, 2)
    with pytest.raises(DataError, match="not the text that this model was imported with"):
        TASK.trim(config, tokenizer, {"train": "0" * 64}, ALL_USED)


def test_vectors_tell_which_texts_are_near() -> None:
    made = [TextVector(text, False, np.array(v, dtype=np.float32)) for text, v in (("x", [2, 0]), ("y", [1, 1]))]
    assert cosines(made, made) == pytest.approx(np.array([[1, 0.5**0.5], [0.5**0.5, 1]]))
    among = [TextVector("z", False, np.array(v, dtype=np.float32)) for v in ([0, 1], [1, 0.1], [-1, 0])]
    assert [[number for number, _ in row] for row in nearest(made, among, 2)] == [[1, 0], [1, 0]]
    assert made[0].as_dict() == {"text": "x", "truncated": False, "vector": [2.0, 0.0]}


def test_an_embedding_recipe_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="embedding models are not trained here; import one"):
        TASK.prepare(load_recipe("quickstart"), tmp_path, SILENT)
