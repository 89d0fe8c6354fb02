"""Scores of a classifier that is computed in FP16, beside FP32, in torch.

All weights, and the inputs and results of all operations but norms, are FP16; norms compute in FP32. How a product sums
within is torch's choice. It is not the exported FP16 graph, which ONNX Runtime computes in FP32 on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeformer.artifacts.progress import SILENT
from edgeformer.inference.evaluate import EvaluateOptions, Evaluator
from edgeformer.inference.predict import select_candidates
from edgeformer.models.weights import load_model
from edgeformer.run import TORCH, Location, read_run
from edgeformer.runtimes.torch import RUNTIME
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.tasks.classification import score


def score_run(folder: Path, split: str) -> dict[str, Any]:
    """Return the scores of a run on one of its sets in both formats, and how far they differ."""
    (candidate,) = select_candidates(Location(folder, None), TORCH)
    rows = Evaluator(EvaluateOptions(TORCH, split), SILENT).labelled_rows(candidate)
    reader, task = candidate.reader(), candidate.owner.task
    data: Any = candidate.owner.data
    logits = {name: np.empty((len(rows), len(data.labels))) for name in ("fp32", "fp16")}
    device = RUNTIME.device(None)
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        session = TorchSession(load_model(folder).to(device, dtype))
        for numbers in task.rows.call_batches(rows, EvaluateOptions.batch, reader.vocabulary):
            logits[name][numbers] = session.run(task.rows.batch(rows, numbers, reader.pad))["logits"]
    differing = int((logits["fp32"].argmax(axis=1) != logits["fp16"].argmax(axis=1)).sum())
    largest = float(np.abs(logits["fp32"] - logits["fp16"]).max())
    scores = {name: score(values, rows.labels).model_dump() for name, values in logits.items()}
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    facts = {"host": describe_host(), "gpu": gpu, "code_version": code_version(), "measured": now()}
    compared = {"differing": differing, "largest_logit_difference": largest}
    return {"recipe": read_run(folder).recipe, **scores, **compared, **facts}
