"""Texts with labelled spans: files, classes of tokens, windows, and offsets in the original text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from edgeformer.artifacts.data_config import SpanData, parse_tag
from edgeformer.artifacts.errors import DataError
from edgeformer.data.column_detection import detect_spans
from edgeformer.data.rows import LabelledTexts, Span, SpanText
from edgeformer.data.sources import Columns, load_part
from edgeformer.data.spans import decode, encode_spans, encode_windows
from edgeformer.data.tokenization import tokenizer_from_file, train_tokenizer
from tests.data.conftest import write
from tests.personal_data import LABELS, sentences, write_jsonl


def data_of(path: Path | str, labels: tuple[str, ...] = ("LOC", "PER"), **changes: Any) -> SpanData:
    source = {"kind": "file", "path": str(path), **changes.pop("source", {})}
    section = {"parts": {"train": [source]}, "split": "stratified", "labels": labels, **changes}
    return SpanData.model_validate(section, strict=False)


def read(path: Path, content: str, **changes: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return every text of a file with its spans as (text of the span, label)."""
    path.write_text(content, encoding="utf-8", newline="")
    texts: list[Any] = load_part(data_of(path, **changes), "train").texts
    return [(str(text), [(text[span.start : span.end], span.label) for span in text.spans]) for text in texts]


SENTENCE = ("Ada Lovelace in Ulm", [("Ada Lovelace", "PER"), ("Ulm", "LOC")])


@pytest.mark.parametrize(
    "content",
    [
        "Ada B-PER\nLovelace I-PER\nin O\nUlm B-LOC\n\n",  # BIO
        "-DOCSTART- -X- O O\n\nAda NNP I-NP I-PER\nLovelace NNP I-NP I-PER\nin IN O O\nUlm NNP B-NP I-LOC\n",  # IOB1
        "# sent_id = 1\r\nAda\tB-PER\r\nLovelace\tE-PER\r\nin\tO\r\nUlm\tS-LOC\r\n\r\n\r\n",  # BIOES
        "Ada B-PER\nLovelace L-PER\nin O\nUlm U-LOC",  # BILOU
    ],
)
def test_conll_files(tmp_path: Path, content: str) -> None:
    assert read(tmp_path / "a.conll", content) == [SENTENCE]


def test_conll_columns_by_number(tmp_path: Path) -> None:
    """The German corpus of GermEval: number, token, outer tag, inner tag; and a token that looks like a comment."""
    rows = ["#\thttp://example.org\t[2020-01-01]", "1\tAda\tB-PER\tO", "2\t#\tO\tO", "3\tUlm\tB-LOC\tB-PER"]
    columns = {"format": "conll", "text": 2, "label": 3}
    expected = ("Ada # Ulm", [("Ada", "PER"), ("Ulm", "LOC")])
    assert read(tmp_path / "a.tsv", "\n".join(rows), source=columns) == [expected]
    columns["label"] = 1
    with pytest.raises(DataError, match=r"a\.tsv, line 2: has no token and tag .*'1', 'Ada'.*set the source's text:"):
        read(tmp_path / "a.tsv", "\n".join(rows), source=columns)


def test_json_lines(tmp_path: Path) -> None:
    spans = [{"start": 16, "end": 19, "label": "LOC", "id": 7}, {"start": 0, "end": 12, "label": "PER"}]  # in any order
    rows = {"satz": SENTENCE[0], "spans": spans}, {"satz": "nothing", "spans": []}
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert read(tmp_path / "a.jsonl", content, source={"text": "satz"}) == [SENTENCE, ("nothing", [])]
    with pytest.raises(DataError, match=r"line 1: has no list of spans under 'spans'; keys: text, label"):
        read(tmp_path / "a.jsonl", '{"text": "a", "label": "b"}')
    with pytest.raises(DataError, match=r"line 1: no column 'text'"):
        read(tmp_path / "a.jsonl", '{"spans": []}')


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 3, "PER"), (2, 5, "LOC")], r"the spans 0 to 3 \(PER\) and 2 to 5 \(LOC\) overlap; .*remove one"),
        ([(3, 3, "PER")], "the span 3 to 3 .* is empty or outside the text of 5 characters"),
        ([(2, 6, "PER")], "the span 2 to 6 .* outside"),
        ([(0, 1, "PRE")], "label 'PRE' is not in the set; did you mean 'PER'.*allowed: LOC, PER"),
        ([(0, 1, None)], r'is no span; it must be {"start": 0'),
        ([(0.0, 1, "PER")], "is no span"),
        ([(True, 2, "PER")], "is no span"),
    ],
)
def test_damaged_spans_are_refused_with_their_line(tmp_path: Path, spans: list[Any], message: str) -> None:
    damaged = [dict(zip(Span._fields, span, strict=True)) for span in spans]
    rows = [{"text": "abcde", "spans": each} for each in ([], damaged)]
    with pytest.raises(DataError, match=f"line 2: {message}" if "no span" not in message else f"line 2: .*{message}"):
        read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))


def test_detection(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", sentences(50))
    detected = detect_spans(tmp_path / "a.jsonl", Columns())
    assert detected is not None and tuple(detected.labels) == LABELS and detected.rows == 50
    assert detect_spans(write(tmp_path, "b.jsonl", '{"text": "a", "label": "b"}'), Columns()) is None
    with pytest.raises(DataError, match="none of its 1 texts has a labelled span"):
        detect_spans(write(tmp_path, "c.jsonl", '{"text": "a", "spans": []}'), Columns())


_WORDS = (
    "Ärger", "naïve", "Zoe\u0308", "Jose\u0301", "e\u0301te\u0301", "Straße", "İstanbul", "ﬁne", "ｆｕｌｌ", "北京",
    "東京都", "한국", "नमस्ते", "สวัสดี", "שלום", "👩‍💻", "❤️", "👍🏽", "🇩🇪", "1️⃣", "a", "B2B", "x_y", "O'Neil", "3.14",
    "foo@bar.de", "CAFÉ", "Z\u0335\u0322a", "ǅ", "Ⅷ", "²", "𝔘𝔫𝔦", "co\u00adop", "w\u200bx", "n\u0303", "#tag",
    "<b>", "[SEP]", "##x",
)  # fmt: skip
_BETWEEN = (
    " ", "  ", "\r\n", "\n", "\t", " \r\n ", "\u3000", ", ", ". ", "; ", "! ", " – ", " (", ") ", "\u2028", " \x0b",
)  # fmt: skip


def odd_texts(count: int, seed: int = 0, between: Sequence[str] = _BETWEEN) -> list[SpanText]:
    """Return texts of words and marks of many scripts, with spans of one to three words."""
    generator = random.Random(seed)
    choose, texts = generator.choice, []
    for _ in range(count):
        text, spans = choose(("", "", "\r\n", " ", "— ")), list[Span]()
        for _ in range(generator.randint(1, 20)):
            start, words = len(text), generator.choice((1, 1, 2, 3))
            text += "".join(choose(_WORDS) + choose((" ", "\r\n", "  ", "\t")) for _ in range(words - 1))
            text += choose(_WORDS)
            if generator.random() < 0.4:
                spans.append(Span(start, len(text), choose(("LOC", "PER"))))
            text += choose(between)
        texts.append(SpanText(text, tuple(spans)))
    return texts


@pytest.mark.data
@pytest.mark.parametrize("kind", ["uncased", "cased", "wordpiece", "wordpiece-cased"])
def test_offsets_are_exact_on_a_thousand_texts(kind: str, data_folder: Path) -> None:
    """A model that is always right finds every span where it is in the original text, whole and once."""
    texts = odd_texts(1000)
    if kind.startswith("wordpiece"):
        tokenizer = train_tokenizer(kind, 1500, map(str, odd_texts(300, seed=9)), ())
    else:
        tokenizer = tokenizer_from_file(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json")
        if kind == "cased":
            tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    for options in ({"max_length": 512}, {"max_length": 16, "scheme": "BIOES"}, {"max_length": 24, "pieces": "all"}):
        data = data_of("a.jsonl", **options)
        windows = encode_windows(tokenizer, texts, data)
        rows = encode_spans(tokenizer, LabelledTexts.unlabelled(texts), data)
        assert rows.lengths.max() <= data.max_length and rows.inexact == 0
        assert (len(rows) > 1000) == (data.max_length < 100)
        tags = [*map(parse_tag, data.classes)]
        for index, text in enumerate(texts):
            classes = rows.targets[windows.tokens(index)].tolist()
            spans = decode(windows, index, str(text), [tags[number] for number in classes])
            assert tuple(span for span, _ in spans) == text.spans, repr(text)


def test_byte_level_tokenizers_join_marks_at_a_word() -> None:
    """They do not split accents from the marks behind them, so the spans are exact between white space only."""
    tokenizer = train_tokenizer("bpe", 1500, map(str, odd_texts(300, seed=9)), ())
    for texts, is_exact in ((odd_texts(300, between=(" ", "\r\n", "\u3000")), True), (odd_texts(300), False)):
        rows = encode_spans(tokenizer, LabelledTexts.unlabelled(texts), data_of("a.jsonl", max_length=64))
        assert (rows.inexact == 0) == is_exact


def test_each_token_counts_in_one_window_and_words_are_not_cut() -> None:
    texts: list[Any] = [str(text) for text in sentences(40, each=5)]
    tokenizer = train_tokenizer("wordpiece", 400, texts, ())
    for max_length in (4, 9, 16, 33):
        windows = encode_windows(tokenizer, texts, data_of("a.jsonl", LABELS, max_length=max_length, pieces="all"))
        whole = encode_windows(tokenizer, texts, data_of("a.jsonl", LABELS, max_length=1000, pieces="all"))
        for index in range(len(texts)):
            places, expected = windows.tokens(index), whole.tokens(index)
            assert windows.rows.ids[places].tolist() == whole.rows.ids[expected].tolist()
            assert windows.starts[places].tolist() == whole.starts[expected].tolist()
        if max_length == 33:  # words fit into the overlap of 7 tokens: each is read in one window
            row_of = np.searchsorted(windows.rows.offsets, np.arange(len(windows.counted)), side="right") - 1
            for index, encoding in enumerate(tokenizer.encode_batch(texts)):
                rows = row_of[windows.tokens(index)]
                words = np.array([word for word in encoding.word_ids if word is not None])
                assert all(len({*rows[words == word].tolist()}) == 1 for word in np.unique(words))


def test_classes_of_pieces() -> None:
    """The first piece of a word, or all, are labelled; special tokens never are."""
    text = SpanText("Frau Goldbachmann, Ulm", (Span(5, 17, "PER"), Span(19, 22, "LOC")))
    tokenizer = train_tokenizer("wordpiece", 60, ["Frau, Gold bach mann Ulm"] * 9, ())
    tokens = tokenizer.encode(str(text)).tokens

    def names(**options: Any) -> list[str | None]:
        data = data_of("a.jsonl", max_length=64, **options)
        targets = encode_spans(tokenizer, LabelledTexts.unlabelled([text]), data).targets.tolist()
        return [data.classes[target] if target >= 0 else None for target in targets]

    firsts = [number for number, token in enumerate(tokens) if not token.startswith(("##", "["))]
    assert [names()[number] for number in firsts] == ["O", "B-PER", "O", "B-LOC"]
    assert sum(name is not None for name in names()) == len(firsts) < len(tokens) - 2
    count = firsts[2] - firsts[1]
    assert count > 2
    assert names(pieces="all")[firsts[1] : firsts[2]] == ["B-PER", *["I-PER"] * (count - 1)]
    assert names(pieces="all", scheme="BIOES")[firsts[1] : firsts[2]] == ["B-PER", *["I-PER"] * (count - 2), "E-PER"]
    assert names(scheme="BIOES")[firsts[1]] == "S-PER"
    assert names(tags=("I-PER", "O", "I-LOC"))[firsts[1]] == "I-PER"  # a model without B


def test_spans_inside_words_are_counted_and_in_the_fingerprint() -> None:
    text = SpanText("Berlinreise nach Ulm", (Span(0, 6, "LOC"), Span(17, 20, "LOC")))
    tokenizer = train_tokenizer("wordpiece", 60, ["Berlin reise nach Ulm"] * 9, ())
    assert encode_spans(tokenizer, LabelledTexts.unlabelled([text]), data_of("a.jsonl")).inexact == 1
    first, other = (LabelledTexts.unlabelled([SpanText("Ada", (Span(0, end, "PER"),))]) for end in (2, 3))
    assert first.fingerprint() != other.fingerprint()
