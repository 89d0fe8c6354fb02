"""Print what `edgeformer export` wrote into bundle.json as a Markdown table: size, parity, agreement, score."""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.tasks.language_modeling.scoring import LanguageScore


def row(artifact: ArtifactManifest, whole: ArtifactManifest) -> list[str]:
    """One line of the table; ratios are to the FP32 graph."""
    parity, score = artifact.parity, artifact.validation
    size, of = artifact.size_bytes or 0, whole.size_bytes or 1
    measured = parity is not None and parity.max_abs_error is not None
    figure = "–"
    if score is not None:
        figure = f"{score.perplexity:.2f}" if isinstance(score, LanguageScore) else f"{score.accuracy:.4f}"
    drift = artifact.drift.loops[-1].rms_error if artifact.drift is not None else None
    return [
        artifact.id,
        f"{size:,}",
        f"{size / of:.3f}",
        f"{parity.max_abs_error:.1e}" if measured and parity is not None else "–",
        f"{parity.top1_agreement:.1%}" if measured and parity is not None else "–",
        figure,
        f"{drift:.1e}" if drift is not None else "–",
        artifact.status,
    ]


def main() -> None:
    """Read the manifest, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle_json", type=Path, metavar="BUNDLE_JSON")
    path = parser.parse_args().bundle_json
    bundle = BundleManifest.model_validate_json(path.read_bytes(), strict=False)
    whole = next(artifact for artifact in bundle.artifacts if artifact.id == "onnx-fp32")
    score = "perplexity" if bundle.task == "language-modeling" else "accuracy"
    columns = ["artifact", "bytes", "of FP32", "max error", "top-1", score, "drift, last loop", "status"]
    rows = [row(artifact, whole) for artifact in bundle.artifacts]
    print(tabulate(rows, columns, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
