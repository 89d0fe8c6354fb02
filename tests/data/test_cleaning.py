import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import Sequence

from edgeformer.data.cleaning import RULES, VERSIONS, clean, count_words, normalizers

NORMALIZER = Sequence(normalizers())

# Characters that Unicode has not assigned may be assigned, and lowercased, in one engine's Unicode version only.
_ANY = st.characters(exclude_categories=("Cs", "Cn"))
_PIECES = st.sampled_from(
    [
        "<br />", "<B>", "</p>", "<a href='x'>", "<!-- note -->", "<!DOCTYPE html>", "<", ">", "<3", "a<b", "</", "<!",
        "http://x.org/a?b=c", "HTTPS://X.ORG.", "www.x.de)", "www.", "awww.so", "ftp://", "http://", "(https://a.b/)",
        "!!!", "?!?!", "...", "--", "``", "''", "[[", "]]", "\\\\", "^^", "~~", "{{", " ", "\n", "\r\n", "\t", "\u00a0",
        "\u2028", "\u3000", "\ufeff", "\x1c", "\x85", "ΟΔΟΣ", "Σ", "İstanbul", "ẞ", "ǅ", "é", "e\u0301", "日本",
        "🙂", "‘", "a", "Not", "……", "！！", "。。。", "——", "»»", "؟؟", "ーー", "\ufe13\ufe13", "\uff5e\uff5e",
    ]
)  # fmt: skip
AWKWARD = st.lists(_PIECES | st.text(_ANY, max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Great MOVIE", "great movie"), ("one<br /><br />two", "one two"),
        ("<a href='http://x.org'>Link</a> <!-- hidden -->text", "link text"),
        ("i <3 you, and a < b > c", "i <3 you, and a < b > c"),
        ("see http://x.org/a?b=1, (www.y.de) now", "see , ( ) now"), ("awww.so cute", "awww.so cute"),
        ("so good!!! really... yes?!?!", "so good! really. yes?!?!"),
        ("`` quoted '' -- (( twice ))", "` quoted ' - ( twice )"),
        (" \t many\u00a0\u2003 kinds\r\n of   space\ufeff ", "many kinds of space"),
        ("so…… 好！！！ はい。。。 «« ¿¿ —— ―― ・・ ؟؟ ।। ‼‼", "so… 好！ はい。 « ¿ — ― ・ ؟ । ‼"),
        ("スーーパー €€ ££ ♥♥ ¡!", "スーーパー €€ ££ ♥♥ ¡!"), ("ΟΔΟΣ", "οδοσ"), ("İ", "i\u0307"), ("", ""),
    ],
)  # fmt: skip
def test_cleaning_follows_the_paper(text, expected):
    assert clean(text) == expected == NORMALIZER.normalize_str(text)


@settings(max_examples=600, deadline=None)
@given(AWKWARD)
def test_normalizers_equal_the_function(text):
    assert NORMALIZER.normalize_str(text) == clean(text)


def test_first_version_collapses_ascii_marks_only():
    """Splits and the tokenizers of earlier models depend on it."""
    text = "so…… BAD!!! <br/>！！"
    assert clean(text, version=1) == "so…… bad! ！！" == Sequence(normalizers(VERSIONS[1])).normalize_str(text)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs regexes as Transformers.js does")
def test_javascript_cleans_alike():
    texts: list[str] = []

    @settings(max_examples=400, deadline=None, database=None)
    @given(AWKWARD)
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    program = """
      const {rules, texts} = JSON.parse(require('fs').readFileSync(0, 'utf8'));
      const step = (text, [pattern, replacement]) => pattern === null ? text.toLowerCase()
        : text.replaceAll(new RegExp(pattern, 'gu'), replacement);
      console.log(JSON.stringify(texts.map(text => rules.reduce(step, text))));
    """
    request = json.dumps({"rules": [[rule.pattern, rule.replacement] for rule in RULES], "texts": texts})
    process = subprocess.run(["node", "-e", program], input=request, capture_output=True, check=True, encoding="utf-8")
    assert json.loads(process.stdout) == [clean(text) for text in texts]


def test_words_are_counted_after_cleaning_in_both_texts_of_a_pair():
    texts = ["<p>Two   words</p>", "", "see http://x.org/y", ("one", "and <br/> two")]
    assert count_words(texts, "paper").tolist() == [2, 0, 1, 3]
    assert count_words(texts, "none").tolist() == [2, 0, 2, 4]
