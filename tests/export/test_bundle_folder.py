"""What a finished bundle holds beside what bundle.json lists: nothing that a client could take for an artifact."""

from __future__ import annotations

from pathlib import Path

from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.export.export import remove_rejected


def test_a_rejected_variant_leaves_neither_graph_nor_weights(tmp_path: Path) -> None:
    folder = tmp_path / "onnx"
    folder.mkdir()
    for name in ("model", "model_fp16"):
        for suffix in ("onnx", "onnx_data"):
            (folder / f"{name}.{suffix}").write_bytes(b"x")
    kept, rejected = remove_rejected(
        tmp_path,
        [
            ArtifactManifest(
                id=f"onnx-{precision}",
                file=f"onnx/{name}.onnx",
                weights_file=f"onnx/{name}.onnx_data",
                format=ONNX,
                precision=precision,
                status=status,
            )
            for name, precision, status in (("model", "fp32", "built"), ("model_fp16", "fp16", "rejected"))
        ],
    )
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx_data"]
    assert kept.weights_file == "onnx/model.onnx_data" and (rejected.file, rejected.weights_file) == (None, None)
