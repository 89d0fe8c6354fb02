"""Write docs/results.md from docs/results.md.jinja and the JSON in benchmarks/results; `make results` runs it.

python -m benchmarks.results_page
"""

from __future__ import annotations

import sys

from jinja2 import Environment, StrictUndefined

from benchmarks.results_page.bench import bench
from benchmarks.results_page.facts import facts
from benchmarks.results_page.gpu import gpu
from benchmarks.results_page.provenance import measured
from benchmarks.results_page.studies import picture, studies
from benchmarks.results_page.tables import ROOT, TABLES, printed, with_command
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_text

TEMPLATE, PAGE = ROOT / "docs" / "results.md.jinja", ROOT / "docs" / "results.md"


def page() -> str:
    """The whole document. Raises jinja2.UndefinedError where the template names a figure that there is not."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    existing = {
        "printed": printed,
        "with_command": with_command,
        "picture": picture,
        "measured": measured,
        "table": {name: built() for name, built in TABLES.items()},
        "studies": studies(),
        "gpu": gpu(),
        "bench": bench(),
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render({**existing, **facts()})


if __name__ == "__main__":
    try:
        write_text(PAGE, page())
    except EdgeformerError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
