import gzip
import json
import lzma

import numpy as np
import pytest

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Silent
from edgeformer.data.batching import text_batch
from edgeformer.data.encoding import Prepared
from edgeformer.data.language import encode_text_file, prepare_text, prepare_text_set
from edgeformer.data.sources import local_text_parts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import recipe_type
from edgeformer.tasks.language_modeling import LanguageRecipe

TEXTS = [row.text for row in synthetic_reviews(400, seed=5)]
LONG = [text for text in TEXTS if len(text) > 50]
TRAINED = {"kind": "trained", "algorithm": "bpe"}
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}


class Recorder(Silent):
    def __init__(self):
        self.messages: list[str] = []

    def message(self, text):
        self.messages.append(text)


def recipe(parts, mode="packed", tokenizer=None, vocab_size=400, **data) -> LanguageRecipe:
    document = {
        "name": "test",
        "task": "language-modeling",
        "data": {"parts": parts, "mode": mode, "sequence_length": 32, **data},
        "tokenizer": tokenizer or TRAINED,
        "model": {"kind": "crt", "vocab_size": vocab_size},
        "training": TRAINING,
    }
    return recipe_type("language-modeling", "crt").model_validate(document)


def prepared(made, cache, progress=SILENT) -> Prepared:
    return prepare_text(made.data, made.tokenizer, made.model.vocab_size, cache, progress)


def file(path, texts, **source):
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return [{"kind": "file", "path": str(path), **source}]


def parts_of(folder, train=TEXTS[:300], validation=TEXTS[300:350], **tests):
    made = {"train": train, "validation": validation, **tests}
    return {name: file(folder / f"{name}.txt", texts) for name, texts in made.items()}


def texts_of(rows, tokenizer):
    """The paragraphs of packed rows, read from their targets."""
    batch = text_batch(rows, np.arange(len(rows)), 0)
    targets = batch["targets"][batch["targets"] >= 0]
    cuts = np.flatnonzero(targets == 0)
    return [tokenizer.decode(part.tolist()) for part in np.split(targets, cuts + 1)[:-1]]


def words_of(texts):
    return sum(len(text.split()) + 1 for text in texts)


def test_a_recipe_becomes_rows_and_a_summary(tmp_path):
    made = recipe(parts_of(tmp_path, test=TEXTS[350:], other=TEXTS[:30]))
    data = prepared(made, tmp_path / "cache")
    assert list(data.tests) == ["test", "other"]
    kept = {"train": TEXTS[:300], "validation": TEXTS[300:350], "test": TEXTS[350:], "other": TEXTS[:30]}
    kept = {name: [text for text in texts if text in LONG] for name, texts in kept.items()}
    sets = {"train": data.train, "validation": data.validation, **data.tests}
    for name, rows in sets.items():
        assert texts_of(rows, data.tokenizer) == kept[name]
        assert (rows.paragraphs, rows.words) == (len(kept[name]), words_of(kept[name]))
        tokens = [len(data.tokenizer.encode(text).ids) + 1 for text in kept[name]]
        assert rows.tokens == rows.lengths.sum() == sum(tokens)
    assert 0 < len(kept["train"]) < 300  # the filter left something out
    summary = data.summary
    assert (summary.split, summary.synthetic, summary.label_rows) == ("given", False, {})
    assert summary.rows == {name: len(rows) for name, rows in sets.items()}
    assert summary.tokens == {name: rows.tokens for name, rows in sets.items()}
    assert summary.words == {name: rows.words for name, rows in sets.items()}
    assert summary.truncated_rows == dict.fromkeys(sets, 0)
    assert [counted.test_set for counted in summary.overlap] == ["validation", "test", "other"]
    assert summary.overlap[2].duplicates == summary.overlap[2].test_rows == len(kept["other"])
    assert DataSummary.model_validate(json.loads(summary.model_dump_json())) == summary


def test_paragraphs_are_stripped_and_filtered_before_first_n(tmp_path):
    exactly, more = "x" * 50, "y " * 25 + "zz"
    lines = [f"  {exactly}  ", f"  {more}\t", "", LONG[0], LONG[1]]
    parts = parts_of(tmp_path, train=lines, validation=lines)
    data = prepared(recipe(parts, first_n=2, vocab_size=257), tmp_path / "cache")
    assert texts_of(data.train, data.tokenizer) == [more, LONG[0]]
    assert texts_of(data.validation, data.tokenizer) == [more, *LONG[:2]]
    every = prepared(recipe(parts, min_characters=49, vocab_size=257), tmp_path / "cache")
    assert texts_of(every.train, every.tokenizer) == [exactly, more, *LONG[:2]]


def test_sources_of_a_part_follow_each_other_and_labels_do_not_matter(tmp_path):
    jsonl = tmp_path / "more.jsonl"
    jsonl.write_text("".join(json.dumps({"body": text, "label": None}) + "\n" for text in LONG[:3]))
    parts = parts_of(tmp_path, train=LONG[3:6])
    parts["train"].append({"kind": "file", "path": str(jsonl), "text": "body"})
    parts["made"] = [{"kind": "synthetic-reviews", "rows": 100}]
    data = prepared(recipe(parts, vocab_size=300), tmp_path / "cache")
    assert texts_of(data.train, data.tokenizer) == [*LONG[3:6], *LONG[:3]]
    assert data.summary.synthetic


def test_a_cut_paragraph_counts_the_words_that_are_predicted_in_full(tmp_path):
    texts = [" ".join(["kitchen"] * 60), "supercalifragilistic" * 10, *LONG[:20]]
    parts = parts_of(tmp_path, validation=texts)
    made = recipe(parts, "paragraphs", min_characters=10, vocab_size=300)
    data = prepared(made, tmp_path / "cache")
    rows = data.validation
    assert rows.starts is None
    total = truncated = 0
    for index, text in enumerate(texts):
        row = rows.ids[rows.offsets[index] : rows.offsets[index + 1]].tolist()
        written = data.tokenizer.decode(row[1:], skip_special_tokens=False)
        whole = text + "<|endoftext|>"
        assert whole.startswith(written)
        truncated += written != whole
        # By characters: a word counts where the next character, white space or the text's end, is no part of it.
        ends = [place for place in range(1, len(text) + 1) if place == len(text) or text[place].isspace()]
        total += sum(end <= len(written) and not text[end - 1].isspace() for end in ends) + (written == whole)
    assert rows.words == total
    assert rows.truncated == truncated == data.summary.truncated_rows["validation"] >= 2
    assert rows.words < words_of(texts)


def test_preparing_again_reads_the_cache_and_gives_the_same(tmp_path):
    made, cache = recipe(parts_of(tmp_path, test=TEXTS[350:])), tmp_path / "cache"
    one = prepared(made, cache)
    stamps = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    again = prepared(made, cache)
    assert len(stamps) == 3
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == stamps
    assert again.summary == one.summary
    for name in ("ids", "offsets", "starts"):
        assert np.array_equal(getattr(one.train, name), getattr(again.train, name))
    victim = min(stamps)
    victim.write_bytes(victim.read_bytes()[:-40])
    progress = Recorder()
    repaired = prepared(made, cache, progress)
    assert [message.split("(")[0] for message in progress.messages] == [f"{victim}: damaged token cache "]
    assert np.array_equal(repaired.train.ids, one.train.ids)
    changed = prepared(recipe(parts_of(tmp_path, test=TEXTS[349:])), cache)
    assert changed.summary.fingerprint != one.summary.fingerprint
    assert changed.summary.fingerprints["train"] == one.summary.fingerprints["train"]


def test_evaluation_finds_the_sets_of_training_again(tmp_path):
    made = recipe(parts_of(tmp_path, other=TEXTS[:80], test=TEXTS[350:]))
    data = prepared(made, tmp_path / "cache")
    recorded = data.summary.fingerprints
    (tmp_path / "train.txt").unlink()  # not needed
    for name, expected in {"validation": data.validation, **data.tests}.items():
        found = prepare_text_set(made.data, data.tokenizer, None, name, recorded)
        assert np.array_equal(found.ids, expected.ids)
    for name in ("train", "nonsense"):
        message = f"--split '{name}': no such set; allowed: test, validation, other"
        with pytest.raises(InputError, match=message):
            prepare_text_set(made.data, data.tokenizer, None, name)
    file(tmp_path / "test.txt", TEXTS[340:])
    with pytest.raises(DataError, match=r"data\.parts\.test: the text is not the one of this model's training"):
        prepare_text_set(made.data, data.tokenizer, None, "test", recorded)
    assert prepare_text_set(made.data, data.tokenizer, None, "test").paragraphs > data.tests["test"].paragraphs


@pytest.mark.parametrize(("tests", "meant"), [(("b", "test"), "test"), (("b", "a"), "b"), ((), "validation")])
def test_what_the_test_split_is(tmp_path, tests, meant):
    own = {name: LONG[10 * number : 10 * number + 10] for number, name in enumerate(tests)}
    made = recipe(parts_of(tmp_path, **own))
    data = prepared(made, tmp_path / "cache")
    found = prepare_text_set(made.data, data.tokenizer, None, "test", data.summary.fingerprints)
    assert np.array_equal(found.ids, {"validation": data.validation, **data.tests}[meant].ids)


def test_a_set_without_long_paragraphs_is_refused(tmp_path):
    for part in ("train", "validation", "test"):
        parts = parts_of(tmp_path, **{"test": TEXTS, part: ["short", "", "lines"]})
        with pytest.raises(
            DataError,
            match=rf"data\.parts\.{part}: none of its 2 paragraphs has more than 50 .*data\.min_characters",
        ):
            prepared(recipe(parts), tmp_path / "cache")
    (tmp_path / "test.txt").write_text("\n\n")
    with pytest.raises(DataError, match=r"test\.txt: no rows in it"):
        prepared(recipe(parts), tmp_path / "cache")
    (tmp_path / "test.txt").unlink()
    with pytest.raises(DataError, match=r"test\.txt: no such file"):
        prepared(recipe(parts), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_of_ones_own(tmp_path):
    made = recipe(parts_of(tmp_path))
    tokenizer = prepared(made, tmp_path / "cache").tokenizer
    plain = "\n".join(TEXTS[:40]) + "\n"
    table = "".join(json.dumps({"id": 1, "content": text}) + "\n" for text in TEXTS[:40])
    contents = {
        "a.txt": plain.encode(),
        "a.txt.xz": lzma.compress(plain.encode()),
        "a.txt.gz": gzip.compress(plain.encode()),
        "a.jsonl": table.encode(),
        "a.tsv": ("id\ttext\n" + "".join(f"1\t{text}\n" for text in TEXTS[:40])).encode(),
    }
    kept = [text for text in TEXTS[:40] if text in LONG]
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        rows = encode_text_file(tmp_path / name, made.data, tokenizer)
        assert texts_of(rows, tokenizer) == kept
        assert rows.words == words_of(kept)
    (tmp_path / "b.csv").write_text("id,phrase\n1,a\n")
    with pytest.raises(DataError, match=r"b\.csv: no text column; columns: id, phrase"):
        encode_text_file(tmp_path / "b.csv", made.data, tokenizer)
    (tmp_path / "b.txt").write_text("too short\n")
    with pytest.raises(DataError, match=r"b\.txt: none of its 1 paragraphs has more than 50 characters"):
        encode_text_file(tmp_path / "b.txt", made.data, tokenizer)


def config(**parts) -> TextConfig:
    hub = {"kind": "hub", "name": "Salesforce/wikitext"}
    given = {part: [source or hub] for part, source in parts.items()}
    return TextConfig.model_validate({"parts": given, "mode": "packed", "sequence_length": 32})


def test_local_text_parts_finds_files_by_name(tmp_path):
    (tmp_path / "train.txt.xz").write_bytes(lzma.compress(b"a text\n"))
    (tmp_path / "valid.txt").write_text("a text\n")
    (tmp_path / "test.jsonl").write_text('{"text": "a text"}\n')
    (tmp_path / "test.tsv").write_text("content\na text\n")
    synthetic = {"kind": "synthetic-reviews", "rows": 5}
    wanted = config(train=None, validation=synthetic, test=None, extra=None)
    local, notes = local_text_parts(wanted, tmp_path)
    found = {part: sources[0] for part, sources in local.parts.items()}
    assert {part: (s.path, s.text, s.label) for part, s in found.items()} == {
        "train": (str(tmp_path / "train.txt.xz"), "text", None),
        "validation": (str(tmp_path / "valid.txt"), "text", None),
        "test": (str(tmp_path / "test.tsv"), "content", None),
    }
    assert (local.mode, local.sequence_length) == ("packed", 32)
    assert [note.split(":")[0] for note in notes] == ["part test", "part extra"]


def test_local_text_parts_names_what_is_missing(tmp_path):
    wanted = config(train=None, validation=None)
    with pytest.raises(DataError, match="no such folder"):
        local_text_parts(wanted, tmp_path / "gone")
    (tmp_path / "train.txt").write_text("a text\n")
    message = r"no file for part 'validation', which a language model uses; looked for validation\.txt.*train\.txt"
    with pytest.raises(DataError, match=message):
        local_text_parts(wanted, tmp_path)


@pytest.mark.data
def test_wikitext_2_by_its_published_size(data_folder, tmp_path):
    source = data_folder / "wikitext-2" / "test.txt"
    tokenizer = {"kind": "file", "path": str(data_folder / "tokenizers" / "gpt2" / "tokenizer.json")}
    shorter = [{"kind": "file", "path": str(data_folder / "wikitext-2" / "valid.txt")}]
    parts = {"train": shorter, "validation": shorter, "test": [{"kind": "file", "path": str(source)}]}
    made = recipe(parts, "packed", tokenizer, 50_257, min_characters=0, first_n=20)
    data = prepared(made, tmp_path)
    assert data.train.paragraphs == 20
    # The data set's authors count 245,569: one more for each line, those without a word included.
    lines = source.read_text(encoding="utf-8").split("\n")
    blank = sum(not line.strip() for line in lines[:-1])
    assert data.tests["test"].words + blank == 245_569
    long = [line.strip() for line in lines if len(line.strip()) > 50]
    filtered = made.data.model_copy(update={"min_characters": 50, "mode": "paragraphs", "sequence_length": 1024})
    rows = prepare_text_set(filtered, data.tokenizer, tmp_path, "test")
    assert (rows.paragraphs, rows.words, rows.truncated) == (len(long), words_of(long), 0)
    assert data.tokenizer.decode(rows.ids[1 : rows.offsets[1] - 1].tolist()) == long[0]
