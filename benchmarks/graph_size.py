"""Export the light recurrent encoder by the code of today and write how many bytes its graphs have.

Sizes do not depend on weights: the model is trained for one step on generated text. The committed tables of other days
hold sizes of older graphs; docs/results/bundles.md shows this one too.

Usage: python -m benchmarks.graph_size [--work DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.estimates.models import trained_one_step
from edgeformer.bundle import Bundle
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, cpu_name, now

RECIPE = "recurrent_sst2_fast"
_DATA = (
    "data.parts={train: [{kind: synthetic-reviews, rows: 300, seed: 1}]}",
    "data.split=random-split",
    "training.batch_size=4",
)


def main() -> None:
    """Export, print and write the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the run here")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work or Path(temporary)) / RECIPE
        trained_one_step(RECIPE, _DATA, folder)
        manifest = Bundle.open(folder / "bundle").manifest
        report: dict[str, Any] = {
            "recipe": RECIPE,
            "parameters": manifest.parameters,
            "size_bytes": {artifact.id: artifact.size_bytes for artifact in manifest.artifacts},
            "host": {"cpu": cpu_name()},
            "measured": now(),
            "code_version": code_version(),
            "versions": library_versions(),
        }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
