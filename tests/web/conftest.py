"""The JavaScript libraries of a page, a page of a small bundle, and a browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edgeformer.bundle import Bundle
from edgeformer.runtimes.web.libraries import RUNTIME, TOKENIZERS, Package
from edgeformer.web.publish import PageOptions, publish
from tests.cli.in_process import Edgeformer, in_process
from tests.web.browser import Browser, Tab, headless
from tests.web.old_bundles import CLASSIFIER


@pytest.fixture(scope="session")
def libraries() -> Path:
    """``node_modules`` with what pages need; installed once, into the user's cache."""
    named = [f"{package.name}@{package.version}" for package in (RUNTIME, TOKENIZERS)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeformer-tests"
    folder = cache / "-".join(name.replace("/", "-") for name in named)
    if not _complete(folder, RUNTIME) or not _complete(folder, TOKENIZERS):
        _install(named, folder)
    return folder / "node_modules"


def _complete(folder: Path, package: Package) -> bool:
    return (folder / "node_modules" / package.name / "package.json").is_file()


def _install(named: list[str], folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, which brings the libraries of a page")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        (made / "package.json").write_text('{"private": true}', encoding="utf-8")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0", *named]
        try:
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm install did not end within 120 s")
        if done.returncode:
            pytest.skip(f"npm install failed: {' '.join(done.stderr.split())[:200]}")
        with suppress(OSError):  # another process was faster
            made.rename(folder)


@pytest.fixture(scope="session")
def site(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small classifier, with its libraries. Read it; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("site") / "site"
    publish(Bundle.open(CLASSIFIER), folder, PageOptions(libraries))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the tests of a file; it reaches nothing but this machine."""
    with headless() as running:
        yield running


@pytest.fixture
def edgeformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgeformer:
    """The command line in this process."""
    return in_process(monkeypatch, capsys)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """An empty one, with a cache of its own."""
    opened = browser.new_tab()
    yield opened
    opened.close()
