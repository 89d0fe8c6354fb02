"""The page's spans and token types are those of Python: its JavaScript modules run in Node.js."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.data_config import parse_tag
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.spans import decode, encode_spans, encode_windows
from edgeformer.data.tokenization import train_tokenizer
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.web import ORT_WEB, TOKENIZER_LIBRARY
from edgeformer.web import PageManifest, PageOptions, publish
from tests.data.test_spans import data_of, odd_texts
from tests.docs.document import ROOT
from tests.export.hf_models import make_model
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


def _page_answers(folder: Path, libraries: Path, script: str, case: dict[str, Any], *modules: str) -> Any:
    """Return what a script says of the cases with modules of the page."""
    library = libraries / TOKENIZER_LIBRARY.package.name / TOKENIZER_LIBRARY.path
    for name in modules:
        shutil.copyfile(ROOT / "edgeformer" / "web" / "site" / name, folder / name)
    (folder / "cases.json").write_text(json.dumps(case), encoding="utf-8")
    return run_module(folder, script.replace("LIBRARY", library.as_uri()))


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
    case = {"tokenizer": document, "cases": cases, **settings}
    answers = _page_answers(tmp_path, libraries, _SCRIPT, case, "spans.js")
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


_TYPES = """
import { readFileSync } from "node:fs";
import * as ort from "ORT_WEB";
import { Tokenizer } from "LIBRARY";
import { feeds } from "./runtime.js";
import { encode } from "./text.js";

const { site, tokenizer, graph, texts } = JSON.parse(readFileSync("cases.json", "utf-8"));
const [artifact] = site.artifacts;
const { max_tokens: most, suffix, types } = site.readers[artifact.reader];
const reader = { tokenizer: new Tokenizer(tokenizer, {}), most, suffix, types };
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(graph));
const answers = [];
for (const [text, pair] of texts) {
  const read = encode(reader, text, pair);
  const { logits } = await session.run(feeds(ort, artifact, [read.ids], read.types));
  answers.push(Array.from(logits.data));
}
process.stdout.write(JSON.stringify(answers));
"""


@pytest.mark.slow
def test_the_page_computes_pairs_as_python(tmp_path: Path, libraries: Path) -> None:
    make_model(tmp_path / "bert", "bert", ("no", "yes"))
    run = import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts"))
    export(run, ExportOptions(keep_going=True))
    bundle = Bundle.open(run / "bundle")
    page, folder = tmp_path / "page", tmp_path / "node"
    publish(bundle, page, PageOptions(libraries))
    site = read_manifest(PageManifest, page / "site.json")
    assert [artifact.typed for artifact in site.artifacts] == [True]
    folder.mkdir()
    texts: list[Text] = ["good [SEP] bad", "word " * 90, ("It is done.", "Nobody waits."), ("a [SEP] b", "c [SEP]")]
    graph = bundle.folder / "onnx" / "model.onnx"
    case = {
        "site": site.model_dump(mode="json"), "graph": str(graph),
        "tokenizer": json.loads((bundle.folder / "tokenizer.json").read_text(encoding="utf-8")),
        "texts": [[text, None] if isinstance(text, str) else text for text in texts],
    }  # fmt: skip
    script = _TYPES.replace("ORT_WEB", (libraries / ORT_WEB.name / "dist" / "ort.wasm.min.mjs").as_uri())
    answers = _page_answers(folder, libraries, script, case, "files.js", "runtime.js", "text.js")
    reader = bundle.reader(bundle.artifact("onnx-fp32"))
    rows, _ = encode_texts(reader.tokenizer, texts, bundle.data.tokens_at_once)
    assert rows.types is not None and rows.types.any()
    with OnnxSession(graph) as session:
        calls = [collate(rows, np.array([place]), reader.pad) for place in range(len(texts))]
        expected = np.concatenate([session.run(call)["logits"] for call in calls])
    assert np.abs(np.array(answers) - expected).max() < 1e-4
