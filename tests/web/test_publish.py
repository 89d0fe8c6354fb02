"""Folder of a page: contents, errors, existing files; its JavaScript answers; its documentation."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import edgeformer.web as publishing
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle, seal
from edgeformer.runtimes.web import CDN, ORT_WEB, RUNTIMES, TOKENIZER_LIBRARY, TOKENIZERS, find_local
from edgeformer.tasks.scoring import NO_NUMBER
from edgeformer.web import SITE_FILE, PageManifest, PageOptions, publish
from tests.cli.in_process import Edgeformer
from tests.docs.document import ROOT, programs
from tests.web.browser import CLASSIFIER, LANGUAGE, run_module

FILES = [TOKENIZER_LIBRARY, *(file for runtime in RUNTIMES for file in (runtime.script, runtime.glue, runtime.binary))]


@pytest.fixture
def fake_libraries(tmp_path: Path) -> Path:
    """``node_modules`` with placeholder files; these tests do not run them."""
    for file in FILES:
        path = tmp_path / "node_modules" / file.package.name / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.path.encode())
        (tmp_path / "node_modules" / file.package.name / "package.json").write_text(
            json.dumps({"name": file.package.name, "version": "9.9.9"}), encoding="utf-8"
        )
    return tmp_path / "node_modules"


def downloads(value: object) -> Iterator[dict[str, Any]]:
    """Yield everything in site.json that the page downloads."""
    if isinstance(value, dict):
        if value.keys() == {"url", "integrity", "size_bytes"}:
            yield value
        for entry in value.values():
            yield from downloads(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from downloads(entry)


def site_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SITE_FILE).read_text(encoding="utf-8"))


def test_every_file_has_its_checksum(fake_libraries: Path, tmp_path: Path) -> None:
    site, bundle = tmp_path / "site", Bundle.open(CLASSIFIER)
    manifest = publish(bundle, site, PageOptions(fake_libraries))
    assert read_manifest(PageManifest, site / SITE_FILE) == manifest
    files = list(downloads(site_of(site)))
    assert len(files) > 15
    for file in files:
        content = (site / file["url"]).read_bytes()
        kind, _, digest = file["integrity"].partition("-")
        assert base64.b64encode(hashlib.new(kind, content).digest()).decode() == digest
        assert len(content) == file["size_bytes"]
    by_id = {artifact.id: artifact for artifact in manifest.artifacts}
    assert {"onnx-fp32", "onnx-int8", "onnx-int8-exit1", "onnx-fp16", "onnx-int8-trim"} <= by_id.keys()
    left_out = {entry.artifact for entry in manifest.left_out}
    assert left_out == {"onnx-fp32-step", "onnx-int8-step", "onnx-fp16-step", "tensorrt-fp16"}
    assert by_id["onnx-int8-trim"].reader == "trimmed" and manifest.readers.keys() == {".", "trimmed"}
    assert manifest.readers["."].suffix == 1 and manifest.readers["."].max_tokens == 48
    sha256 = sha256_of(site / by_id["onnx-int8"].graph.url)
    assert sha256 == manifest.subject.artifacts["onnx-int8"].sha256 == bundle.artifact("onnx-int8").sha256
    assert manifest.versions == {"onnxruntime-web": "9.9.9", "@huggingface/tokenizers": "9.9.9"} and manifest.offline
    # The page may connect to its own folder only.
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and "connect-src 'self' blob:;" in page and "unsafe-inline" not in page
    assert "http:" not in page and "https:" not in page
    scripts = [path.read_text(encoding="utf-8") for path in site.glob("*.js")]
    sends_or_runs = re.compile(r"innerHTML|outerHTML|eval\(|XMLHttpRequest|sendBeacon|WebSocket|method:")
    assert len(scripts) > 10 and not any(sends_or_runs.search(script) for script in scripts)
    assert "Cross-Origin-Embedder-Policy: require-corp" in (site / "_headers").read_text(encoding="utf-8")


def test_libraries_have_fixed_addresses_or_are_found_unpacked(tmp_path: Path, fake_libraries: Path) -> None:
    manifest = publish(Bundle.open(CLASSIFIER), tmp_path / "site", PageOptions())
    remote = [file for file in downloads(site_of(tmp_path / "site")) if "://" in file["url"]]
    assert len(remote) == 7 and not manifest.offline and not (tmp_path / "site" / "libraries").exists()
    for file in remote:
        assert file["url"].startswith(f"{CDN}/npm/") and "@" in file["url"].rpartition("/npm/")[2]
        assert file["integrity"].startswith("sha384-") and len(base64.b64decode(file["integrity"][7:])) == 48
    assert f"connect-src 'self' blob: {CDN};" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    file = RUNTIMES[0].binary
    for part in ("..", ".", "onnxruntime-web"):
        assert find_local(fake_libraries / part, file) == (file.path.encode(), "9.9.9")


@pytest.mark.node
def test_the_checksums_are_those_of_the_packages(libraries: Path) -> None:
    for file in FILES:
        content, version = find_local(libraries, file)
        assert version == file.package.version and len(content) == file.size_bytes
        assert base64.b64encode(hashlib.sha384(content).digest()).decode() == file.sha384


def test_a_page_is_replaced_and_nothing_else(fake_libraries, tmp_path, monkeypatch):
    site, bundle, options = tmp_path / "site", Bundle.open(CLASSIFIER), PageOptions(fake_libraries)
    publish(bundle, site, options)
    (site / "stale.txt").write_text("stale", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(publishing, "write_text", fail)
        publish(bundle, site, options)
    assert (site / "stale.txt").exists() and (site / "model/onnx/model.onnx").exists(), "the old page stays whole"
    publish(bundle, site, PageOptions(fake_libraries, ("onnx-int8",), ("wasm",)))
    assert not (site / "stale.txt").exists() and not (site / "model/onnx/model.onnx").exists()
    assert not list(tmp_path.glob(".site*"))
    for name, content in (("mine.txt", "mine"), (SITE_FILE, '{"format": "another"}')):
        other = tmp_path / f"with {name}"
        other.mkdir()
        (other / name).write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match="choose another folder"):
            publish(bundle, other, options)
        assert [path.name for path in other.iterdir()] == [name]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    publish(bundle, Path(), options)
    assert (tmp_path / "empty" / SITE_FILE).is_file()


def test_a_damaged_bundle_becomes_no_page_and_names_are_escaped(fake_libraries: Path, tmp_path: Path) -> None:
    bundle, site = Path(shutil.copytree(CLASSIFIER, tmp_path / "bundle")), tmp_path / "site"
    tokenizer = (bundle / "tokenizer.json").read_bytes()
    (bundle / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="changed since it was exported"):
        publish(Bundle.open(bundle), site, PageOptions(fake_libraries))
    assert not site.exists()
    (bundle / "tokenizer.json").write_bytes(tokenizer)
    seal(bundle, Bundle.open(bundle).manifest.model_copy(update={"run": "</title><script>x</script>\x1b"}))
    publish(Bundle.open(bundle), site, PageOptions(fake_libraries))
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "\x1b" not in page


def test_a_language_model_writes_with_decode_graphs_that_are_not_too_large(fake_libraries, tmp_path, monkeypatch):
    manifest = publish(Bundle.open(LANGUAGE), tmp_path / "site", PageOptions(fake_libraries))
    by_id = {artifact.id: artifact for artifact in manifest.artifacts}
    assert by_id.keys() == {f"onnx-{p}{e}" for p in ("fp32", "fp16", "int8") for e in ("", "-exit2", "-decode")}
    (weights,) = by_id["onnx-fp32"].weights
    assert weights.name == "model.onnx_data" and (tmp_path / "site" / weights.file.url).is_file()
    assert not by_id["onnx-fp32"].masked
    assert manifest.labels is None and manifest.silent is None and manifest.readers["."].tokenizer is not None
    assert manifest.writing is not None and manifest.writing.ends == (manifest.writing.boundary,)
    assert manifest.writing.begin == (manifest.writing.boundary,)
    caches = {cache.input: cache for cache in next(a for a in manifest.artifacts if a.role == "decode").caches}
    past, conv = caches["past_key_values.0.key"], caches["past_conv.embed"]
    assert (past.output, past.shape) == ("present.0.key", (1, 2, 0, 8))
    assert (conv.output, conv.shape) == ("present_conv.embed", (1, 10, 16))
    monkeypatch.setattr(publishing, "_MAX_WRITING_BYTES", 100_000)
    manifest = publish(Bundle.open(LANGUAGE), tmp_path / "site", PageOptions(fake_libraries))
    reasons = {entry.artifact: entry.reason for entry in manifest.left_out if entry.artifact.endswith("-decode")}
    assert {*reasons} == {"onnx-fp32-decode", "onnx-int8-decode"}  # FP16 is smaller
    measured = publish(Bundle.open(LANGUAGE), tmp_path / "site", PageOptions(fake_libraries, ("onnx-fp32",)))
    assert measured.silent and measured.writing is None and measured.tokenizers is None
    assert measured.readers["."].tokenizer is None


def test_the_command_and_invalid_requests(tmp_path: Path, edgeformer: Edgeformer, fake_libraries: Path) -> None:
    for option, value, message in (
        ("--artifact", "onnx-fp32-step", "--artifact onnx-fp32-step: step artifacts do not run in a page"),
        ("--artifact", "onnx-fp99", "has onnx-fp32"),
        ("--provider", "webgl", "--provider webgl: is unknown; give wasm or webgpu"),
        ("--seq", "65", "takes at most 64 tokens"),
        ("--libraries", "nowhere", "has no onnxruntime-web/dist/ort"),
    ):
        printed = edgeformer("page", str(CLASSIFIER), "-o", str(tmp_path / "site"), option, value, code=2)
        assert message in " ".join(printed.split()) and not (tmp_path / "site").exists()
    site = tmp_path / "site"
    command = ("page", str(CLASSIFIER), "-o", str(site), "--libraries", str(fake_libraries), "--artifact", "onnx-int8")
    assert "the page works offline" in edgeformer(*command, "--seq", "8,16")
    assert site_of(site)["shapes"] == [[1, 8], [1, 16]]
    document = json.loads(edgeformer(*command, "--provider", "wasm", "--json"))
    assert document["artifacts"] == ["onnx-int8"] and document["page"] == str(site)
    # The model's texts are cut to 48 tokens, although it takes 64; profile REPORT.json needs this shape.
    assert site_of(site)["shapes"] == [[1, 16], [1, 48]] and len(site_of(site)["providers"]) == 1


PROBABILITIES = """
import { probabilities } from "./text.js";
const batches = [[1, 3], [NaN, 1], [-Infinity, 1], [Infinity, Infinity]];
const answers = batches.map((logits) => [false, true].map((multilabel) => {
  try { return probabilities(Float32Array.from(logits), multilabel); } catch (error) { return error.message; }
}));
console.log(JSON.stringify(answers));
"""


def test_javascript_turns_logits_into_probabilities(tmp_path: Path) -> None:
    site = resources.files("edgeformer.web") / "site"
    for name in ("text.js", "files.js"):
        (tmp_path / name).write_text((site / name).read_text(encoding="utf-8"), encoding="utf-8")
    (single, multilabel), *not_finite = run_module(tmp_path, PROBABILITIES)
    assert single == pytest.approx([0.119203, 0.880797], abs=1e-6)
    assert multilabel == pytest.approx([0.731059, 0.952574], abs=1e-6)
    assert not_finite == [[NO_NUMBER, NO_NUMBER]] * 3


DOCUMENT = ROOT / "docs" / "guides" / "browser.md"


def test_documented_headers_versions_and_sizes() -> None:
    text, program = DOCUMENT.read_text(encoding="utf-8"), programs(DOCUMENT)["isolated.py"]
    compile(program, "isolated.py", "exec")
    for header in publishing._HEADERS.splitlines()[1:]:
        assert all(part.strip() in program for part in header.split(":")), header
    assert f"{ORT_WEB.name}@{ORT_WEB.version} {TOKENIZERS.name}@{TOKENIZERS.version}" in text
    sizes = [runtime.script.size_bytes + runtime.glue.size_bytes + runtime.binary.size_bytes for runtime in RUNTIMES]
    assert f"({sum(sizes) / 2**20:.0f} MiB, or {sizes[0] / 2**20:.0f} MiB with `--provider wasm`)" in text
