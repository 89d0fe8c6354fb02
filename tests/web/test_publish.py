"""What the folder of a page holds, what it refuses, and that nobody's files are in its way."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeformer.web.publish as publishing
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.page import SITE_FILE, PageManifest
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.bundle import Bundle, seal
from edgeformer.runtimes import provider_facts
from edgeformer.runtimes.web.libraries import CDN, RUNTIMES, TOKENIZER_LIBRARY, LibraryFile, find_local, integrity_of
from edgeformer.web.publish import PageOptions, publish
from tests.cli.in_process import Edgeformer
from tests.web.old_bundles import CLASSIFIER, LANGUAGE

FILES = [TOKENIZER_LIBRARY, *(file for runtime in RUNTIMES for file in runtime.files)]


@pytest.fixture
def fake_libraries(tmp_path: Path) -> Path:
    """``node_modules`` with files of the right names: nothing here runs them."""
    for file in FILES:
        path = tmp_path / "node_modules" / file.package.name / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.path.encode())
        (tmp_path / "node_modules" / file.package.name / "package.json").write_text(
            json.dumps({"name": file.package.name, "version": "9.9.9"}), encoding="utf-8"
        )
    return tmp_path / "node_modules"


def downloads(value: object) -> Iterator[dict[str, Any]]:
    """Everything in site.json that the page downloads."""
    if isinstance(value, dict):
        if value.keys() == {"url", "integrity", "size_bytes"}:
            yield value
        for entry in value.values():
            yield from downloads(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from downloads(entry)


def site_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / SITE_FILE).read_text(encoding="utf-8"))
    return found


def test_every_file_is_there_with_its_checksum(fake_libraries: Path, tmp_path: Path) -> None:
    made = publish(Bundle.open(CLASSIFIER), tmp_path / "site", PageOptions(fake_libraries))
    assert read_manifest(PageManifest, tmp_path / "site" / SITE_FILE) == made
    files = list(downloads(site_of(tmp_path / "site")))
    assert len(files) > 15
    for file in files:
        content = (tmp_path / "site" / file["url"]).read_bytes()
        kind, _, digest = file["integrity"].partition("-")
        assert base64.b64encode(hashlib.new(kind, content).digest()).decode() == digest
        assert len(content) == file["size_bytes"]
    by_id = {one.id: one for one in made.artifacts}
    assert {"onnx-fp32", "onnx-int8", "onnx-int8-exit1", "onnx-fp16", "onnx-int8-trim"} <= by_id.keys()
    assert {one.artifact for one in made.left_out} == {
        "onnx-fp32-step", "onnx-int8-step", "onnx-fp16-step", "tensorrt-fp16",
    }  # fmt: skip
    assert by_id["onnx-int8-trim"].reader == "trimmed" and made.readers.keys() == {".", "trimmed"}
    assert made.readers["."].suffix == 1 and made.readers["."].max_tokens == 48
    sha256 = sha256_of(tmp_path / "site" / by_id["onnx-int8"].graph.url)
    assert sha256 == made.subject.artifacts["onnx-int8"].sha256 == Bundle.open(CLASSIFIER).artifact("onnx-int8").sha256
    assert made.versions == {"onnxruntime-web": "9.9.9", "@huggingface/tokenizers": "9.9.9"} and made.offline


def test_the_page_may_connect_to_its_own_folder_only(fake_libraries: Path, tmp_path: Path) -> None:
    publish(Bundle.open(CLASSIFIER), tmp_path / "site", PageOptions(fake_libraries))
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and "connect-src 'self' blob:;" in page and "unsafe-inline" not in page
    assert "http:" not in page and "https:" not in page
    scripts = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("*.js")]
    sends_or_runs = re.compile(r"innerHTML|outerHTML|eval\(|XMLHttpRequest|sendBeacon|WebSocket|method:")
    assert len(scripts) > 10 and [found for script in scripts for found in sends_or_runs.findall(script)] == []
    assert "Cross-Origin-Embedder-Policy: require-corp" in (tmp_path / "site" / "_headers").read_text(encoding="utf-8")


def test_without_a_folder_libraries_have_fixed_addresses_and_checksums(tmp_path: Path) -> None:
    made = publish(Bundle.open(CLASSIFIER), tmp_path / "site", PageOptions())
    remote = [file for file in downloads(site_of(tmp_path / "site")) if "://" in file["url"]]
    assert len(remote) == 7 and not made.offline and not (tmp_path / "site" / "libraries").exists()
    for file in remote:
        assert file["url"].startswith(f"{CDN}/npm/") and "@" in file["url"].rpartition("/npm/")[2]
        assert file["integrity"].startswith("sha384-") and len(base64.b64decode(file["integrity"][7:])) == 48
    assert f"connect-src 'self' blob: {CDN};" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


@pytest.mark.node
def test_the_checksums_are_those_of_the_packages(libraries: Path) -> None:
    for file in FILES:
        found = find_local(libraries, file)
        assert (found.version, found.integrity) == (file.package.version, file.integrity)
        assert len(found.content) == file.size_bytes


@pytest.mark.parametrize("part", ["..", ".", "onnxruntime-web"])
def test_libraries_are_found_where_they_are_unpacked(part: str, fake_libraries: Path) -> None:
    wanted = RUNTIMES[0].binary
    found = find_local(fake_libraries / part, wanted)
    assert found.content == wanted.path.encode() and found.integrity == integrity_of(found.content)


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--libraries .*has no onnxruntime-web/dist/ort.*npm install"):
        publish(Bundle.open(CLASSIFIER), tmp_path / "site", PageOptions(tmp_path))
    assert not (tmp_path / "site").exists()


def test_a_page_is_replaced_and_nothing_else(
    fake_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    publish(Bundle.open(CLASSIFIER), site, PageOptions(fake_libraries))
    (site / "left.txt").write_text("of before", encoding="utf-8")
    publish(Bundle.open(CLASSIFIER), site, PageOptions(fake_libraries, ("onnx-int8",), ("wasm",)))
    assert not (site / "left.txt").exists() and not (site / "model/onnx/model.onnx").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".site")] == []
    for name, content in (("mine.txt", "mine"), (SITE_FILE, '{"format": "another"}')):
        other = tmp_path / f"with {name}"
        other.mkdir()
        (other / name).write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match="choose another folder"):
            publish(Bundle.open(CLASSIFIER), other, PageOptions(fake_libraries))
        assert [path.name for path in other.iterdir()] == [name]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    publish(Bundle.open(CLASSIFIER), Path(), PageOptions(fake_libraries))
    assert (tmp_path / "empty" / SITE_FILE).is_file()


def test_a_page_that_fails_leaves_the_old_one(
    fake_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    publish(Bundle.open(CLASSIFIER), site, PageOptions(fake_libraries))
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "_write_site", full)
    with pytest.raises(OSError, match="No space"):
        publish(Bundle.open(CLASSIFIER), site, PageOptions(fake_libraries))
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".site")] == []


def test_a_damaged_bundle_becomes_no_page(fake_libraries: Path, tmp_path: Path) -> None:
    shutil.copytree(CLASSIFIER, tmp_path / "bundle")
    (tmp_path / "bundle" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="changed since it was exported"):
        publish(Bundle.open(tmp_path / "bundle"), tmp_path / "site", PageOptions(fake_libraries))
    assert not (tmp_path / "site").exists()


def test_names_are_escaped(fake_libraries: Path, tmp_path: Path) -> None:
    shutil.copytree(CLASSIFIER, tmp_path / "bundle")
    manifest = Bundle.open(tmp_path / "bundle").manifest
    seal(tmp_path / "bundle", manifest.model_copy(update={"run": "</title><script>x</script>\x1b"}))
    publish(Bundle.open(tmp_path / "bundle"), tmp_path / "site", PageOptions(fake_libraries))
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "\x1b" not in page


def test_weights_beside_a_graph_come_along(fake_libraries: Path, tmp_path: Path) -> None:
    made = publish(Bundle.open(LANGUAGE), tmp_path / "site", PageOptions(fake_libraries))
    assert made.labels is None and made.silent and made.readers["."].tokenizer is None and made.tokenizers is None
    by_id = {one.id: one for one in made.artifacts}
    assert by_id.keys() == {f"onnx-{p}{e}" for p in ("fp32", "fp16", "int8") for e in ("", "-exit2")}
    (weights,) = by_id["onnx-fp32"].weights
    assert weights.name == "model.onnx_data" and (tmp_path / "site" / weights.file.url).is_file()
    assert not by_id["onnx-fp32"].masked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--artifact", "onnx-fp32-step"), "--artifact onnx-fp32-step: cannot be in a page"),
        (("--artifact", "onnx-fp99"), "has onnx-fp32"),
        (("--provider", "webgl"), "--provider webgl: browsers have wasm and webgpu"),
        (("--seq", "65"), "takes at most 64 tokens"),
        (("--libraries", "nowhere"), "--libraries nowhere"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, edgeformer: Edgeformer
) -> None:
    said = edgeformer("page", str(CLASSIFIER), "-o", str(tmp_path / "site"), *arguments, code=2)
    assert message in " ".join(said.split()) and not (tmp_path / "site").exists()


def test_the_command(fake_libraries: Path, tmp_path: Path, edgeformer: Edgeformer) -> None:
    site = tmp_path / "site"
    command = ("page", str(CLASSIFIER), "-o", str(site), "--libraries", str(fake_libraries), "--artifact", "onnx-int8")
    assert "it works offline" in edgeformer(*command, "--seq", "8,16")
    assert site_of(site)["shapes"] == [[1, 8], [1, 16]]
    told = json.loads(edgeformer(*command, "--provider", "wasm", "--json"))
    assert told["artifacts"] == ["onnx-int8"] and told["page"] == str(site)
    # 48: where the model's texts are cut, though it could take 64; profile REPORT.json looks for that shape
    assert site_of(site)["shapes"] == [[1, 16], [1, 48]] and len(site_of(site)["providers"]) == 1


def test_what_computes_in_a_browser_is_known() -> None:
    assert [provider_facts(runtime.provider).label for runtime in RUNTIMES] == ["WASM", "WebGPU"]
    assert provider_facts("wasm").kind == "cpu" and provider_facts("webgpu").kind is None


def test_addresses_name_their_version() -> None:
    file: LibraryFile = TOKENIZER_LIBRARY
    assert file.address == f"{CDN}/npm/@huggingface/tokenizers@{file.package.version}/dist/tokenizers.min.mjs"
