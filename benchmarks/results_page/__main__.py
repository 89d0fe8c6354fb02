"""Write docs/results/ from its templates (*.md.jinja) and the JSON in benchmarks/results; `make results` runs it.

python -m benchmarks.results_page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.estimates import page as estimates
from benchmarks.frame import ROOT
from benchmarks.published.pages import device_pages, index_facts
from benchmarks.results_page.bench import machine_pages, summary, targets
from benchmarks.results_page.facts import facts
from benchmarks.results_page.gpu import gpu
from benchmarks.results_page.provenance import measured
from benchmarks.results_page.studies import picture, questions, study_pages
from benchmarks.results_page.tables import TABLES, closed, printed
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_text

FOLDER = ROOT / "docs" / "results"
TEMPLATES = tuple(sorted(FOLDER.glob("*.md.jinja")))
INDEX = "index.md"
CLOSED = (
    "cost.md", "early-exit.md", "gate.md", "int8.md", "language-models.md", "language-runtimes.md", "pretrained.md",
    "runtimes.md", "serving.md", "sst2.md",
)  # fmt: skip
"""Pages of closed questions: their scripts are in the commit that each page names, and nothing writes them again."""


def headline(text: str) -> str:
    """Return the bold text below a page's title, without the asterisks; a line may continue behind it."""
    return next(line.split("**")[1] for line in text.splitlines() if line.startswith("**"))


def title(text: str) -> str:
    """Return a page's title."""
    return text.partition("\n")[0].removeprefix("# ")


def pages() -> dict[str, str]:
    """Return every page by its path below docs/results.

    Raises:
        jinja2.UndefinedError: a template names a figure that does not exist.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    shared: dict[str, Any] = {
        "printed": printed,
        "closed": closed,
        "picture": picture,
        "measured": measured,
        "table": {name: build() for name, build in TABLES.items()},
        "study": questions,
        "points": lambda share: f"{100 * share:+.2f}",
        "gpu": gpu(),
        "published": index_facts(),
        "targets": targets(),
        "summary": summary(),
        **facts(),
    }
    by_name = {path.name.removesuffix(".jinja"): path.name for path in TEMPLATES}
    topics = {name: environment.get_template(by_name[name]).render(shared) for name in by_name if name != INDEX}
    # The index repeats the title and the headline of each page.
    listed = {name: (FOLDER / name).read_text(encoding="utf-8") for name in CLOSED}
    listed |= {**topics, estimates.PAGE.name: estimates.page()}
    entries = {name: {"title": title(text), "headline": headline(text)} for name, text in listed.items()}
    index = environment.get_template(by_name[INDEX]).render(shared, page=entries)
    return {INDEX: index, **topics, **study_pages(), **machine_pages(), **device_pages()}


def write(folder: Path = FOLDER) -> None:
    """Write every page."""
    for name, text in pages().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)


if __name__ == "__main__":
    try:
        write()
    except EdgeformerError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
