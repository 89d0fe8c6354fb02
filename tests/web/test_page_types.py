"""The page gives a graph the token types that the tokenizer states: its logits are those of Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.data.rows import Text
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.web import ORT_WEB, TOKENIZER_LIBRARY
from edgeformer.web import PageManifest, PageOptions, publish
from tests.docs.document import ROOT
from tests.export.hf_models import make_model
from tests.web.browser import run_module

pytestmark = pytest.mark.node
_SCRIPT = """
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
    for name in ("files.js", "runtime.js", "text.js"):
        shutil.copyfile(ROOT / "edgeformer" / "web" / "site" / name, folder / name)
    texts: list[Text] = ["good [SEP] bad", "word " * 90, ("It is done.", "Nobody waits."), ("a [SEP] b", "c [SEP]")]
    graph = bundle.folder / "onnx" / "model.onnx"
    case = {
        "site": site.model_dump(mode="json"), "graph": str(graph),
        "tokenizer": json.loads((bundle.folder / "tokenizer.json").read_text(encoding="utf-8")),
        "texts": [[text, None] if isinstance(text, str) else text for text in texts],
    }  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(case), encoding="utf-8")
    library = libraries / TOKENIZER_LIBRARY.package.name / TOKENIZER_LIBRARY.path
    runtime = libraries / ORT_WEB.name / "dist" / "ort.wasm.min.mjs"
    script = _SCRIPT.replace("ORT_WEB", runtime.as_uri()).replace("LIBRARY", library.as_uri())
    answers = run_module(folder, script)
    reader = bundle.reader(bundle.artifact("onnx-fp32"))
    rows, _ = encode_texts(reader.tokenizer, texts, bundle.data.tokens_at_once)
    assert rows.types is not None and rows.types.any()
    with OnnxSession(graph) as session:
        calls = [collate(rows, np.array([place]), reader.pad) for place in range(len(texts))]
        expected = np.concatenate([session.run(call)["logits"] for call in calls])
    assert np.abs(np.array(answers) - expected).max() < 1e-4
