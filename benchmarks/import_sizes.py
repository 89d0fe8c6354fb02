"""What imported models weigh in every format, and how often their weights are stored.

ALBERT calls one layer twelve times: here of the size of its base model, with random weights, on which sizes do not
depend. MiniLM, the real one, has a layer for every call. Both are imported, and exported in FP32, FP16, INT8 and as a
TensorRT engine for an RTX 4050 (built without a card).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.frame import markdown, read_record, run_script
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.runtimes import library_versions
from edgeformer.system.host import cpu_name, now

ALBERT_BASE = {
    "vocab_size": 30_000,
    "embedding_size": 128,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}


def make_albert(folder: Path, tokenizer: Path) -> None:
    """An encoder with random weights; its tokenizer is another's, for sizes do not depend on it."""
    import torch
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    rows = len(json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"])
    sizes: dict[str, Any] = {**ALBERT_BASE, "vocab_size": rows}
    model = AlbertModel(AlbertConfig(**sizes), add_pooling_layer=False)
    for parameter in model.parameters():  # fresh biases and norms are all alike, and would be stored once
        parameter.data += torch.randn_like(parameter) * 0.01
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def artifact_row(artifact: ArtifactManifest) -> dict[str, Any]:
    """What is kept of an artifact."""
    sharing, engine = artifact.sharing, artifact.engine
    return {
        "id": artifact.id,
        "status": artifact.status,
        "reason": artifact.reason,
        "bytes": artifact.size_bytes,
        "stored_parameters": sharing.stored_parameters if sharing is not None else None,
        "weight_bytes": engine.weight_bytes if engine is not None else sharing.weight_bytes if sharing else None,
    }


def measure(folder: Path, artifacts: Path) -> dict[str, Any]:
    """Import and export one model."""
    from edgeformer.export.export import export
    from edgeformer.export.variants import ExportOptions
    from edgeformer.imports.encoder import HfOptions, import_hf
    from edgeformer.models.weights import load_model

    run = import_hf(str(folder), HfOptions(artifacts))
    export(run, ExportOptions(fp16=True, int8=True, build=("tensorrt",), target="rtx4050", keep_going=True))
    bundle, model = Bundle.open(run / "bundle"), load_model(run)
    layers: Any = model.layers
    layer_sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    parameters = bundle.manifest.parameters
    calls: Any = model.order
    return {
        "parameters": parameters,
        "calls": len(calls),
        "layers": len(layer_sizes),
        "one_layer_per_call": parameters - sum(layer_sizes) + sum(layer_sizes[number] for number in calls),
        "artifacts": [artifact_row(artifact) for artifact in bundle.artifacts],
    }


def table(file: Path) -> None:
    """Print the table of docs/results/bundles.md."""
    rows = [
        [
            name, artifact["id"], f"{artifact['bytes']:,}" if artifact["bytes"] else artifact["status"],
            f"{artifact['weight_bytes']:,}" if artifact["weight_bytes"] else "–", f"{model['parameters']:,}",
            f"{artifact['stored_parameters']:,}" if artifact["stored_parameters"] else "–",
            f"{model['one_layer_per_call']:,}",
        ]
        for name, model in read_record(file)["models"].items()
        for artifact in model["artifacts"]
    ]  # fmt: skip
    columns = ["model", "artifact", "bytes", "of weights", "parameters", "stored", "parameters, one layer per call"]
    print(markdown(columns, rows))


def run(minilm: Path, file: Path) -> None:
    """Import and export ALBERT and the folder of MiniLM, and write their sizes into a JSON file."""
    with tempfile.TemporaryDirectory() as work:
        albert = Path(work, "albert-base")
        make_albert(albert, minilm / "tokenizer.json")
        models = {folder.name: measure(folder, Path(work, "artifacts")) for folder in (albert, minilm)}
    write_json(file, {"host": cpu_name(), "when": now(), "versions": library_versions(), "models": models})
    table(file)


if __name__ == "__main__":
    run_script(run, table)
