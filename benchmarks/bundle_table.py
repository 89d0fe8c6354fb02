"""Print what `edgeformer export` wrote into bundle.json as a Markdown table: size, parity, agreement, score."""

from __future__ import annotations

from pathlib import Path

from benchmarks.frame import markdown, run_script
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.tasks import Metric, all_tasks, get_task


def row(artifact: ArtifactManifest, complete: ArtifactManifest, metric: Metric) -> list[str]:
    """One line of the table; ratios are to the FP32 graph."""
    parity, score = artifact.parity, metric.of(artifact.validation)
    size, of = artifact.size_bytes or 0, complete.size_bytes or 1
    measured = parity is not None and parity.max_abs_error is not None
    drift = artifact.drift.loops[-1].rms_error if artifact.drift is not None else None
    return [
        artifact.id,
        f"{size:,}",
        f"{size / of:.3f}",
        f"{parity.max_abs_error:.1e}" if measured and parity is not None else "–",
        f"{parity.top1_agreement:.1%}" if measured and parity is not None else "–",
        f"{score:.{metric.places}f}" if score is not None else "–",
        f"{drift:.1e}" if drift is not None else "–",
        artifact.status,
    ]


def main(bundle_json: Path) -> None:
    """Read the manifest, print the table."""
    all_tasks()  # scores are recognised by the tasks that are loaded
    bundle = read_manifest(BundleManifest, bundle_json)
    complete = next(artifact for artifact in bundle.artifacts if artifact.id == "onnx-fp32")
    metric = get_task(bundle.task).metric
    columns = ["artifact", "bytes", "of FP32", "max error", "top-1", metric.name, "drift, last loop", "status"]
    rows = [row(artifact, complete, metric) for artifact in bundle.artifacts]
    print(markdown(columns, rows))


if __name__ == "__main__":
    run_script(main)
