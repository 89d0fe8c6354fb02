"""A real bundle, as small as one can be: a classifier of a few nodes, golden inputs, a manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.bundle import seal

VOCABULARY, WIDTH, POSITIONS, CLASSES = 50, 8, 24, 2


def _constant(name: str, values: list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def classifier_graph(vocabulary: int = VOCABULARY, width: int = WIDTH) -> onnx.ModelProto:
    """Table lookup, a positional table cut to the sequence (which fails when too long), mean, MatMul."""
    rng = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["tokens"]),
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["seq_length"]),
        helper.make_node("Slice", ["positions", "zero", "seq_length", "one"], ["cut_positions"]),
        helper.make_node("Add", ["tokens", "cut_positions"], ["placed"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "minus_one"], ["mask_column"]),
        helper.make_node("Mul", ["placed", "mask_column"], ["masked"]),
        helper.make_node("ReduceMean", ["masked", "one"], ["pooled"], keepdims=0),
        helper.make_node("MatMul", ["pooled", "head"], ["logits"]),
    ]
    initializers = [
        weights("table", vocabulary, width),
        weights("positions", 1, POSITIONS, width),
        weights("head", width, CLASSES),
        *(_constant(name, [number]) for name, number in (("zero", 0), ("one", 1), ("two", 2), ("minus_one", -1))),
    ]
    return _model(nodes, initializers)


def greedy_graph() -> onnx.ModelProto:
    """Opens like any other graph, but its first run asks for 4 TB."""
    nodes = [
        helper.make_node("ConstantOfShape", ["huge"], ["wall"]),
        helper.make_node("ReduceMax", ["wall"], ["highest"], keepdims=0),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["mask", "ids"], ["masked"]),
        helper.make_node("Add", ["masked", "highest"], ["logits"]),
    ]
    # The size is computed from the input, or the optimiser would allocate it while the graph is opened.
    size = [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Mul", ["shape", "million"], ["huge"]),
    ]
    return _model([*size, *nodes], [_constant("million", [1_000_000])])


def _model(nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto]) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "classes"])]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_golden(path: Path, rows: int = 5, seq: int = 12) -> None:
    """Rows of different length, padded with 0; the first token of each is 1, as [CLS] would be."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, VOCABULARY, size=(rows, seq))
    ids[:, 0] = 1
    mask = (np.arange(seq)[None, :] < np.arange(4, 4 + rows)[:, None]).astype(np.int64)
    labels, logits = np.zeros(rows, np.int64), np.zeros((rows, CLASSES), np.float32)
    np.savez(path, input_ids=(ids * mask).astype(np.int64), attention_mask=mask, labels=labels, logits=logits)


def artifact_of(bundle: Path, path: str, /, **changes: object) -> ArtifactManifest:
    """The manifest entry of the file at ``path`` in ``bundle``."""
    entry = ArtifactManifest(
        id=Path(path).stem, file=path, format="onnx", precision="fp32", status="built",
        size_bytes=(bundle / path).stat().st_size, sha256=sha256_of(bundle / path),
    )  # fmt: skip
    return entry.model_copy(update=changes)


def write_manifest(bundle: Path, artifacts: list[ArtifactManifest], **changes: object) -> BundleManifest:
    """bundle.json for the files that are there."""
    source = {"kind": "synthetic-reviews", "rows": 10}
    manifest = BundleManifest(
        run="tiny",
        task="classification",
        created="2026-11-21T00:00:00.000+00:00",
        labels=("negative", "positive"),
        max_length=24,
        max_positions=POSITIONS,
        pad_id=0,
        parameters=VOCABULARY * WIDTH,
        synthetic=True,
        data=DataConfig.model_validate(
            {"parts": {"train": [source]}, "split": "random-split", "labels": ["negative", "positive"]}
        ),
        data_fingerprints={},
        files={"golden.npz": sha256_of(bundle / "golden.npz")},
        artifacts=tuple(artifacts),
        code_version="0",
    ).model_copy(update=changes)
    return seal(bundle, manifest)


def write_bundle(folder: Path, graphs: dict[str, onnx.ModelProto] | None = None) -> Path:
    """A bundle with one artifact per graph (default: one classifier named ``model``)."""
    (folder / "onnx").mkdir(parents=True)
    write_golden(folder / "golden.npz")
    artifacts = []
    for name, graph in (graphs or {"model": classifier_graph()}).items():
        onnx.save(graph, folder / "onnx" / f"{name}.onnx")
        artifacts.append(artifact_of(folder, f"onnx/{name}.onnx"))
    write_manifest(folder, artifacts)
    return folder
