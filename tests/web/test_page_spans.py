"""The page's spans are those of Python: offsets, windows and decoding in JavaScript, on texts of many scripts."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.data_config import parse_tag
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.spans import decode, encode_spans, encode_windows
from edgeformer.data.tokenization import train_tokenizer
from edgeformer.runtimes.web import TOKENIZER_LIBRARY
from tests.data.test_spans import data_of, odd_texts
from tests.docs.document import ROOT
from tests.web.browser import run_module

pytestmark = pytest.mark.node

_SCRIPT = """
import { readFileSync } from "node:fs";
import { locate, spansOf, windowsOf } from "./spans.js";
import { Tokenizer } from "LIBRARY";

const { tokenizer, cases, capacity, pieces, classes } = JSON.parse(readFileSync("cases.json", "utf-8"));
const opened = new Tokenizer(tokenizer, {});
const answers = cases.map(({ text, best }) => {
  const tokens = locate(opened, text);
  const windows = windowsOf(tokens, capacity);
  const probabilities = tokens.map((_, index) => classes.map((_, place) => Number(place === best[index])));
  const points = (offset) => Array.from(text.slice(0, offset)).length;
  return {
    windows: windows.map(({ begin, end, from, to }) => [begin, end, from, to]),
    spans: spansOf(text, tokens, probabilities, classes, pieces)
      .map(({ start, end, label }) => [points(start), points(end), label]),
  };
});
process.stdout.write(JSON.stringify(answers));
"""


def _page_answers(folder: Path, libraries: Path, case: dict[str, Any]) -> Any:
    library = libraries / TOKENIZER_LIBRARY.package.name / TOKENIZER_LIBRARY.path
    shutil.copyfile(ROOT / "edgeformer" / "web" / "site" / "spans.js", folder / "spans.js")
    (folder / "cases.json").write_text(json.dumps(case), encoding="utf-8")
    return run_module(folder, _SCRIPT.replace("LIBRARY", library.as_uri()))


@pytest.mark.parametrize("algorithm", ["wordpiece-cased", "wordpiece", "bpe"])
@pytest.mark.parametrize("pieces", ["first", "all"])
def test_offsets_windows_and_spans(algorithm: str, pieces: str, tmp_path: Path, libraries: Path) -> None:
    texts = odd_texts(150, seed=4)
    tokenizer = train_tokenizer(algorithm, 1500, map(str, odd_texts(300, seed=9)), ())
    data, whole_data = (data_of("a.jsonl", max_length=length, pieces=pieces) for length in (20, 10_000))
    windows, whole = (encode_windows(tokenizer, texts, each) for each in (data, whole_data))
    rows = encode_spans(tokenizer, LabelledTexts.unlabelled(texts), whole_data)
    # Without [CLS] and [SEP].
    contents = [slice(begin + 1, end - 1) for begin, end in itertools.pairwise(rows.offsets.tolist())]
    cases = [
        {"text": str(text), "best": np.maximum(rows.targets[content], 0).tolist()}
        for text, content in zip(texts, contents, strict=True)
    ]
    document = json.loads(tokenizer.to_str())
    settings = {"capacity": 18, "pieces": pieces, "classes": data.classes}
    answers = _page_answers(tmp_path, libraries, {"tokenizer": document, "cases": cases, **settings})
    tags = [*map(parse_tag, data.classes)]
    for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        classes = rows.targets[whole.tokens(index)].tolist()
        spans = decode(whole, index, str(text), [tags[number] for number in classes])
        assert answer["spans"] == [[*span] for span, _ in spans], repr(text)
        sizes = np.diff(windows.rows.offsets)[windows.texts == index] - 2
        assert [end - begin for begin, end, _, _ in answer["windows"]] == sizes.tolist()
        counted = whole.counted[contents[index]]
        numbers = np.flatnonzero(windows.texts == index)
        bounds = windows.rows.offsets
        expected = [int(windows.counted[bounds[number] : bounds[number + 1]].sum()) for number in numbers]
        assert [int(counted[start:stop].sum()) for _, _, start, stop in answer["windows"]] == expected
