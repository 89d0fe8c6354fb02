"""A real bundle, as small as one can be: a classifier of a few nodes, golden inputs, a manifest."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from numpy.typing import ArrayLike
from onnx import numpy_helper

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.bundle import seal

VOCABULARY, WIDTH, POSITIONS, CLASSES = 50, 8, 24, 2


def parsed(graph: str, *, opset: int = 18, **weights: ArrayLike) -> onnx.ModelProto:
    """Parse a graph in ONNX's textual syntax, and store arrays in it by their names."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(weights[name]), name) for name in weights)
    return model


CLASSIFIER = "tiny (int64[batch, seq] input_ids, int64[batch, seq] attention_mask) => (float[batch, classes] logits)"
"""Name, inputs and outputs of a classifier's graph."""


def classifier_graph(vocabulary: int = VOCABULARY, width: int = WIDTH) -> onnx.ModelProto:
    """Table lookup, a positional table cut to the sequence (which fails when too long), mean, MatMul."""
    rng = np.random.default_rng(0)
    shapes = {"table": (vocabulary, width), "positions": (1, POSITIONS, width), "head": (width, CLASSES)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = """{
        tokens = Gather (table, input_ids)
        shape = Shape (input_ids)
        seq_length = Slice (shape, one, two)
        cut_positions = Slice (positions, zero, seq_length, one)
        placed = Add (tokens, cut_positions)
        mask = Cast <to = 1> (attention_mask)
        mask_column = Unsqueeze (mask, minus_one)
        masked = Mul (placed, mask_column)
        pooled = ReduceMean <keepdims = 0> (masked, one)
        logits = MatMul (pooled, head)
    }"""
    return parsed(CLASSIFIER + nodes, **weights, zero=[0], one=[1], two=[2], minus_one=[-1])


def greedy_graph() -> onnx.ModelProto:
    """Opens like any other graph, but its first run asks for 4 TB.

    The size is computed from the input, or the optimiser would allocate it while the graph is opened.
    """
    nodes = """{
        shape = Shape (input_ids)
        huge = Mul (shape, million)
        wall = ConstantOfShape (huge)
        highest = ReduceMax <keepdims = 0> (wall)
        mask = Cast <to = 1> (attention_mask)
        ids = Cast <to = 1> (input_ids)
        masked = Mul (mask, ids)
        logits = Add (masked, highest)
    }"""
    return parsed(CLASSIFIER + nodes, million=[1_000_000])


def write_golden(path: Path, rows: int = 5, seq: int = 12) -> None:
    """Rows of different length, padded with 0; the first token of each is 1, as [CLS] would be."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, VOCABULARY, size=(rows, seq))
    ids[:, 0] = 1
    mask = (np.arange(seq)[None, :] < np.arange(4, 4 + rows)[:, None]).astype(np.int64)
    labels, logits = np.zeros(rows, np.int64), np.zeros((rows, CLASSES), np.float32)
    np.savez(path, input_ids=(ids * mask).astype(np.int64), attention_mask=mask, labels=labels, logits=logits)


def inputs(batch: int = 2, seq: int = 6) -> dict[str, np.ndarray]:
    """Token ids that count up, without padding."""
    ids = np.arange(1, batch * seq + 1, dtype=np.int64).reshape(batch, seq) % VOCABULARY
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


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
    data = {"parts": {"train": [source]}, "split": "random-split", "labels": ["negative", "positive"]}
    manifest = BundleManifest(
        run="tiny", task="classification", created="2026-11-21T00:00:00.000+00:00", labels=("negative", "positive"),
        max_length=24, max_positions=POSITIONS, pad_id=0, parameters=VOCABULARY * WIDTH, synthetic=True,
        data=DataConfig.model_validate(data), data_fingerprints={}, artifacts=tuple(artifacts), code_version="0",
        files={"golden.npz": sha256_of(bundle / "golden.npz")},
    ).model_copy(update=changes)  # fmt: skip
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
