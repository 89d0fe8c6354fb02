import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT
from edgeformer.data.batching import text_batch
from edgeformer.data.encoding import Prepared
from edgeformer.data.language import prepare_text
from edgeformer.data.sources import local_parts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import recipe_type
from edgeformer.tasks import get_task
from edgeformer.tasks.language_modeling import LanguageRecipe
from tests.data.conftest import file_sources, read_file, read_set, write

TEXTS = [row.text for row in synthetic_reviews(400, seed=5)]
LONG = [text for text in TEXTS if len(text) > 50]
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}


def recipe(parts, mode="packed", tokenizer=None, vocab_size=400, **data) -> LanguageRecipe:
    model = {"kind": "crt", "vocab_size": vocab_size}
    document = {"name": "test", "task": "language-modeling", "training": TRAINING, "model": model}
    document["data"] = {"parts": parts, "mode": mode, "sequence_length": 32, **data}
    document["tokenizer"] = tokenizer or {"kind": "trained", "algorithm": "bpe"}
    return recipe_type("language-modeling", "crt").model_validate(document)


def prepared(recipe, cache, progress=SILENT) -> Prepared:
    return prepare_text(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)


def write_texts(path, texts):
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file_sources(path)


def parts_of(folder, train=TEXTS[:300], validation=TEXTS[300:350], **tests):
    texts = {"train": train, "validation": validation, **tests}
    return {name: write_texts(folder / f"{name}.txt", lines) for name, lines in texts.items()}


def texts_of(rows, tokenizer):
    """Decode the paragraphs of packed rows from their targets."""
    batch = text_batch(rows, np.arange(len(rows)), 0)
    targets = batch["targets"][batch["targets"] >= 0]
    return [tokenizer.decode(part.tolist()) for part in np.split(targets, np.flatnonzero(targets == 0) + 1)[:-1]]


def words_of(texts):
    return sum(len(text.split()) + 1 for text in texts)


def test_recipe_becomes_rows_and_a_summary(tmp_path):
    texts = {"train": TEXTS[:300], "validation": TEXTS[300:350], "test": TEXTS[350:], "other": TEXTS[:30]}
    data = prepared(recipe(parts_of(tmp_path, **texts)), tmp_path / "cache")
    assert list(data.tests) == ["test", "other"]
    long = {name: [text for text in lines if text in LONG] for name, lines in texts.items()}
    assert 0 < len(long["train"]) < 300
    sets = {"train": data.train, "validation": data.validation, **data.tests}
    for name, rows in sets.items():
        assert texts_of(rows, data.tokenizer) == long[name] and rows.words == words_of(long[name])
        tokens = [len(data.tokenizer.encode(text).ids) + 1 for text in long[name]]
        assert rows.tokens == rows.lengths.sum() == sum(tokens)
    summary = data.summary
    assert (summary.split, summary.synthetic, summary.label_rows) == ("given", False, {})
    assert summary.rows == {name: len(rows) for name, rows in sets.items()}
    assert summary.tokens == {name: rows.tokens for name, rows in sets.items()}
    assert summary.words == {name: rows.words for name, rows in sets.items()}
    assert summary.truncated_rows == dict.fromkeys(sets, 0)
    assert [count.test_set for count in summary.overlap] == ["validation", "test", "other"]
    assert summary.overlap[2].duplicates == summary.overlap[2].test_rows == len(long["other"])
    assert DataSummary.model_validate_json(summary.model_dump_json()) == summary


def test_paragraphs_are_stripped_and_filtered_before_first_n(tmp_path):
    short, longer = "x" * 50, "y " * 25 + "zz"
    lines = [f"  {short}  ", f"  {longer}\t", "", LONG[0], LONG[1]]
    parts = parts_of(tmp_path, train=lines, validation=lines)
    data = prepared(recipe(parts, first_n=2, vocab_size=257), tmp_path / "cache")
    assert texts_of(data.train, data.tokenizer) == [longer, LONG[0]]
    assert texts_of(data.validation, data.tokenizer) == [longer, *LONG[:2]]
    data = prepared(recipe(parts, min_characters=49, vocab_size=257), tmp_path / "cache")
    assert texts_of(data.train, data.tokenizer) == [short, longer, *LONG[:2]]


def test_truncated_paragraph_counts_complete_words(tmp_path):
    texts = [" ".join(["kitchen"] * 60), "supercalifragilistic" * 10, *LONG[:20]]
    parts = parts_of(tmp_path, validation=texts)
    data = prepared(recipe(parts, "paragraphs", min_characters=10, vocab_size=300), tmp_path / "cache")
    rows = data.validation
    assert rows.starts is None
    words = truncated = 0
    for index, text in enumerate(texts):
        row = rows.ids[rows.offsets[index] : rows.offsets[index + 1]].tolist()
        decoded, paragraph = data.tokenizer.decode(row[1:], skip_special_tokens=False), text + "<|endoftext|>"
        assert paragraph.startswith(decoded)
        truncated += decoded != paragraph
        # A word is complete if white space or the end of the text follows.
        ends = [place for place in range(1, len(text) + 1) if place == len(text) or text[place].isspace()]
        words += sum(end <= len(decoded) and not text[end - 1].isspace() for end in ends) + (decoded == paragraph)
    assert rows.words == words < words_of(texts)
    assert rows.truncated == truncated == data.summary.truncated_rows["validation"] >= 2


def test_evaluation_reads_the_sets_of_training(tmp_path):
    language = recipe(parts_of(tmp_path, other=TEXTS[:80], test=TEXTS[350:]))
    data = prepared(language, tmp_path / "cache")
    fingerprints = data.summary.fingerprints
    (tmp_path / "train.txt").unlink()  # not needed
    for name, expected in {"validation": data.validation, **data.tests}.items():
        assert np.array_equal(read_set(language.data, data.tokenizer, name, fingerprints).ids, expected.ids)
    with pytest.raises(InputError, match="--split 'nonsense': no such set; allowed: test, validation, other"):
        read_set(language.data, data.tokenizer, "nonsense")
    write_texts(tmp_path / "test.txt", TEXTS[340:])
    with pytest.raises(DataError, match="the test set differs from the one of this model's training"):
        read_set(language.data, data.tokenizer, "test", fingerprints)
    assert read_set(language.data, data.tokenizer, "test").words > data.tests["test"].words
    for tests, expected in ((("b", "test"), "test"), (("b", "a"), "b"), ((), "validation")):
        parts = {name: [{"kind": "synthetic-reviews", "rows": 5}] for name in ("train", "validation", *tests)}
        assert get_task("language-modeling").rows.set_name(recipe(parts).data, "test") == expected


def test_sets_without_long_paragraphs_are_refused(tmp_path):
    for part in ("train", "validation", "test"):
        parts = parts_of(tmp_path, **{"test": TEXTS, part: ["short", "", "lines"]})
        message = rf"data\.parts\.{part}: none of its 2 paragraphs has more than 50 .*data\.min_characters"
        with pytest.raises(DataError, match=message):
            prepared(recipe(parts), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_other_file_is_read_in_every_format(tmp_path):
    language = recipe(parts_of(tmp_path))
    tokenizer = prepared(language, tmp_path / "cache").tokenizer
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(("\n".join(TEXTS[:40]) + "\n").encode()))
    lines = (json.dumps({"id": 1, "content": text}) + "\n" for text in TEXTS[:40])
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    long = [text for text in TEXTS[:40] if text in LONG]
    for name in ("a.txt.xz", "a.jsonl"):
        rows = read_file(language.data, tokenizer, tmp_path / name)
        assert texts_of(rows, tokenizer) == long and rows.words == words_of(long)
    failures = {"b.csv": ("id,phrase\n1,a\n", "no text column; columns: id, phrase"), "b.txt": ("a\n", "none of its 1")}
    for name, (content, message) in failures.items():
        with pytest.raises(DataError, match=rf"{name}: {message}"):
            read_file(language.data, tokenizer, write(tmp_path, name, content))


def test_files_of_a_folder_are_found_by_name(tmp_path):
    hub = [{"kind": "hub", "name": "Salesforce/wikitext"}]
    config = TextConfig.model_validate(
        {"parts": dict.fromkeys(("train", "validation", "test", "extra"), hub), "mode": "packed", "sequence_length": 32}
    )
    (tmp_path / "train.txt.xz").write_bytes(lzma.compress(b"a text\n"))
    message = r"no file for the part 'validation' of a language model; expected validation\.txt.*train\.txt"
    with pytest.raises(DataError, match=message):
        local_parts(config, tmp_path)
    (tmp_path / "valid.txt").write_text("a text\n")
    (tmp_path / "test.tsv").write_text("content\na text\n")
    local, notes = local_parts(config, tmp_path)
    assert [(Path(sources[0].path).name, sources[0].text) for sources in local.parts.values()] == [
        ("train.txt.xz", "text"), ("valid.txt", "text"), ("test.tsv", "content"),
    ]  # fmt: skip
    assert [note.split(":")[0] for note in notes] == ["part extra"]


@pytest.mark.data
@pytest.mark.slow
def test_wikitext_2_has_its_published_size(data_folder, tmp_path):
    path = data_folder / "wikitext-2" / "test.txt"
    tokenizer = {"kind": "file", "path": str(data_folder / "tokenizers" / "gpt2" / "tokenizer.json")}
    shorter_path = path.with_name("valid.txt")
    shorter = file_sources(shorter_path)
    parts = {"train": shorter, "validation": shorter, "test": file_sources(path)}
    language = recipe(parts, "packed", tokenizer, 50_257, min_characters=0, first_n=20)
    data = prepared(language, tmp_path)
    training_lines = shorter_path.read_text(encoding="utf-8").split("\n")
    assert data.train.words == words_of([line.strip() for line in training_lines if line.strip()][:20])
    # The authors of the data set count 245,569 words: one more for each line, also for blank lines.
    lines = path.read_text(encoding="utf-8").split("\n")
    assert data.tests["test"].words + sum(not line.strip() for line in lines[:-1]) == 245_569
    long = [line.strip() for line in lines if len(line.strip()) > 50]
    filtered = language.data.model_copy(update={"min_characters": 50, "mode": "paragraphs", "sequence_length": 1024})
    rows = read_set(filtered, data.tokenizer, "test")
    assert (len(rows), rows.words, rows.truncated) == (len(long), words_of(long), 0)
    assert data.tokenizer.decode(rows.ids[1 : rows.offsets[1] - 1].tolist()) == long[0]
