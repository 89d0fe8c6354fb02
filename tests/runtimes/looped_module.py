"""A looped classifier in torch, and the job that builds it, for runtimes that convert torch modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT
from edgeformer.runtimes.runtime import BuildJob

INPUTS, LENGTH, VOCABULARY, WIDTH = ("input_ids", "attention_mask"), 12, 50, 64


class Looped(torch.nn.Module):
    """A classifier whose only layer runs ``loops`` times, with a table of constants.

    ``stacked``: a copy of the layer for each loop.
    """

    def __init__(self, loops: int = 3, width: int = WIDTH, *, stacked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loops = loops
        self.table = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(loops if stacked else 1))
        self.head = torch.nn.Linear(width, 3)
        self.register_buffer("angles", torch.rand(LENGTH, width), persistent=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        angles: Any = self.angles
        state = self.table(input_ids) * attention_mask[..., None].float() + angles[: input_ids.shape[1]]
        for loop in range(self.loops):
            state = state + torch.sigmoid(self.layers[loop % len(self.layers)](state))
        return self.head(state[:, 0]).float()

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Branching(Looped):
    """Its result depends on a branch in Python, which torch.export refuses."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, attention_mask if attention_mask.sum() > 3 else input_ids)


def graph(precision: Any = "fp32", **changes: Any) -> ArtifactManifest:
    """An ONNX graph of the classifier, as a manifest lists it."""
    facts = {
        "id": f"onnx-{precision}", "file": "model.onnx", "format": "onnx", "precision": precision, "status": "built",
        "inputs": dict.fromkeys(INPUTS, "int64[batch, sequence]"), "outputs": {"scores": "float32[batch, 3]"},
    }  # fmt: skip
    return ArtifactManifest.model_validate({**facts, **changes})


def job_for(bundle: Path, *precisions: Any, **changes: Any) -> BuildJob:
    """A job with graphs of these precisions."""
    (bundle / "engines").mkdir(exist_ok=True)
    (bundle / "model.onnx").write_bytes(b"graph")
    job = BuildJob(
        bundle=bundle, graphs=tuple(map(graph, precisions)), precision="fp32", max_length=LENGTH,
        max_positions=2 * LENGTH, progress=SILENT, note=print, module=lambda graph: Looped().eval(),
    )  # fmt: skip
    return replace(job, **changes)
