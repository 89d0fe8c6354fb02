"""Fixtures: JavaScript libraries of a page, a page of a small bundle, a browser."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edgeformer.bundle import Bundle
from edgeformer.runtimes.web import ORT_WEB, TOKENIZERS
from edgeformer.web import PageOptions, publish
from tests.web.browser import CLASSIFIER, Browser, Tab, headless, npm_install


@pytest.fixture(scope="session")
def libraries() -> Path:
    """``node_modules`` with the libraries of pages, installed once into the user's cache."""
    packages = [f"{package.name}@{package.version}" for package in (ORT_WEB, TOKENIZERS)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeformer-tests"
    folder = cache / "-".join(name.replace("/", "-") for name in packages)
    if not all((folder / "node_modules" / p.name / "package.json").is_file() for p in (ORT_WEB, TOKENIZERS)):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            project = Path(name) / "project"
            project.mkdir()
            npm_install(project, "--ignore-scripts", *packages)
            with suppress(OSError):  # another process was faster
                project.rename(folder)
    return folder / "node_modules"


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
