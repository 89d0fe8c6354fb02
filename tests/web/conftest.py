"""Fixtures: JavaScript libraries of a page, a page of a small bundle, a browser."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edgeformer.bundle import Bundle
from edgeformer.runtimes.web import ORT_WEB, TOKENIZERS
from edgeformer.web import PageOptions, publish
from tests.web.browser import CLASSIFIER, Browser, Tab, headless


@pytest.fixture(scope="session")
def libraries() -> Path:
    """``node_modules`` with the libraries of pages, installed once into the user's cache."""
    packages = [f"{package.name}@{package.version}" for package in (ORT_WEB, TOKENIZERS)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeformer-tests"
    folder = cache / "-".join(name.replace("/", "-") for name in packages)
    if not all((folder / "node_modules" / p.name / "package.json").is_file() for p in (ORT_WEB, TOKENIZERS)):
        _install(packages, folder)
    return folder / "node_modules"


def _install(packages: list[str], folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm for the libraries of a page")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        project = Path(name) / "project"
        project.mkdir()
        (project / "package.json").write_text('{"private": true}', encoding="utf-8")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0", *packages]
        try:
            process = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm install did not end within 120 s")
        if process.returncode:
            pytest.skip(f"npm install failed: {' '.join(process.stderr.split())[:200]}")
        with suppress(OSError):  # another process was faster
            project.rename(folder)


@pytest.fixture(scope="session")
def site(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a small classifier with its libraries; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("site") / "site"
    publish(Bundle.open(CLASSIFIER), folder, PageOptions(libraries))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Browser for the tests of a module, without a network."""
    with headless() as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """Empty tab with its own cache."""
    opened = browser.new_tab()
    yield opened
    opened.close()
