"""What row 7 measured of a card becomes verified facts of its profile: bandwidth and rates of products.

python -m benchmarks.gpu.facts benchmarks/results/CARD/DATE-number-formats.json profiles/h100.yaml
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import write_text

FACTS = {
    "bandwidth_bytes_per_s": ("copied_bytes_per_s", "copying a gibibyte on the card, bytes read and written"),
    "peaks.fp32": ("fp32_operations_per_s", "torch's product of float32 matrices of 8192×8192, TF32 off"),
    "peaks.fp16_fp32_accumulate": ("fp16_operations_per_s", "torch's product of float16 matrices of 8192×8192"),
}
"""Fact of a profile → the figure of row 7's case `floor`, and how it was had.

Its ``launch_us`` is no fact of the card: most of it is torch's own.
"""


def verified(document: Mapping[str, Any], text: str) -> str:
    """The text of a profile with the facts that were measured; all else of it, comments too, stays as it is.

    Args:
        document: what row 7 wrote.
        text: of the profile.

    Raises:
        InputError: a dry run's figures, no floor among them, or a fact that the profile has no place for.
    """
    floor = document["cases"].get("floor", {}).get("figures")
    if document["dry_run"] or floor is None:
        raise InputError("no figures of a card: a dry run, or its case `floor` is missing")
    when = f"measured by benchmarks/gpu/number_formats.py on {document['began'][:10]} on {document['gpu']} "
    when += f"(torch {document['versions']['torch']}, commit {document['commit']})"
    for key, (figure, how) in FACTS.items():
        name, depth = key.rpartition(".")[2], 2 * key.count(".")
        indent = " " * depth
        block = re.compile(rf"^{indent}{name}:\n(?:{indent}  .*\n)+", re.MULTILINE)
        rounded = float(f"{floor[figure]:.4g}")
        value = f"{rounded / 1e9:.1f}e+9" if rounded > 1e9 else f"{rounded}"
        messages = [
            f"{indent}{name}:",
            f"  value: {value}",
            f"  source: >-\n{indent}    {when}: {how}",
            "  verified: true",
        ]
        text, results = block.subn(f"\n{indent}".join(messages) + "\n", text)
        if results != 1:
            raise InputError(f"the profile has no place for {key}")
    return text


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0: written; 2: not the figures of this card."""
    if len(paths := [Path(word) for word in (sys.argv[1:] if words is None else words)]) != 2:
        print("needs two files: row 7's figures and a profile", file=sys.stderr)
        return 2
    document = json.loads(paths[0].read_text(encoding="utf-8"))
    device = load_profile(str(paths[1]))
    try:
        if (device.match or device.title) not in document["gpu"]:
            raise InputError(f"{paths[0]}: is of {document['gpu']}, not of {device.title}")
        write_text(paths[1], verified(document, paths[1].read_text(encoding="utf-8")))
    except EdgeformerError as error:
        print(error, file=sys.stderr)
        return 2
    load_profile(str(paths[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
