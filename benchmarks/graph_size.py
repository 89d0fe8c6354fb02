"""Export the light recurrent encoder by the code of today and write how many bytes its graphs have.

Sizes do not depend on weights: the model is trained for one step on generated text. The committed tables of other days
hold sizes of older graphs; docs/results/bundles.md shows this one too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.estimates.models import trained_one_step
from benchmarks.frame import run_script, stamp
from edgeformer.artifacts.files import as_json, write_json
from edgeformer.bundle import Bundle

RECIPE = "recurrent_sst2_fast"
_DATA = (
    "data.parts={train: [{kind: synthetic-reviews, rows: 300, seed: 1}]}",
    "data.split=random-split",
    "training.batch_size=4",
)


def main(work: Path | None = None, json: Path | None = None) -> None:
    """Export, print and write the sizes; ``work`` keeps the run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (work or Path(temporary)) / RECIPE
        trained_one_step(RECIPE, _DATA, folder)
        manifest = Bundle.open(folder / "bundle").manifest
        report: dict[str, Any] = {
            "recipe": RECIPE,
            "parameters": manifest.parameters,
            "size_bytes": {artifact.id: artifact.size_bytes for artifact in manifest.artifacts},
            **stamp(),
        }
    if json is not None:
        write_json(json, report)
    print(as_json(report), end="")


if __name__ == "__main__":
    run_script(main)
