"""Child of peers.py: one way of computing a model, timed on request. Only edgeformer's own ways import edgeformer.

Each request, ``[BATCH, SEQ, CALLS]``, is answered by the milliseconds of so many calls.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ways import serve

Call = Callable[[], object]
Prepare = Callable[[int, int], Call]
"""(batch, seq) → one call at that shape."""


def token_ids(batch: int, seq: int) -> Any:
    """The same for all ways: no padding, ids that every BERT vocabulary has."""
    return np.random.default_rng(0).integers(1000, 20_000, (batch, seq)).astype(np.int64)


def torch_inputs(batch: int, seq: int) -> dict[str, Any]:
    """What a Hugging Face model is called with."""
    import torch

    ids = torch.from_numpy(token_ids(batch, seq))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def edgeformer(model: Path, threads: int, provider: str) -> Prepare:
    """A bundle's FP32 graph as ``predict`` opens it."""
    from edgeformer.bundle import Bundle
    from edgeformer.measurement.artifact import check_artifact, golden_calls
    from edgeformer.runtimes import OpenOptions

    bundle = Bundle.open(model)
    artifact = bundle.artifact("onnx-fp32")
    session = bundle.session(artifact, OpenOptions(provider, threads))
    checked = check_artifact(bundle, artifact)

    def prepare(batch: int, seq: int) -> Call:
        (call,) = golden_calls(checked, (batch, seq), 1)
        ids = token_ids(batch, seq)
        inputs = {name: ids.astype(value.dtype) if name == "input_ids" else value for name, value in call.items()}
        return lambda: session.run(inputs)

    return prepare


def torch_model(model: Path, threads: int, *, compiled: bool) -> Prepare:
    """transformers' own module without gradients, its attention by SDPA; ``compiled``: by torch.compile."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    adapter = AutoModel.from_pretrained(model, attn_implementation="sdpa").eval()
    called: Any = torch.compile(adapter, mode="max-autotune-no-cudagraphs", dynamic=False) if compiled else adapter

    def prepare(batch: int, seq: int) -> Call:
        inputs = torch_inputs(batch, seq)

        def call() -> object:
            with torch.inference_mode():
                return called(**inputs)

        return call

    return prepare


def sentence_transformers(model: Path, threads: int, backend: str) -> Prepare:
    """SentenceTransformer with that backend, called with tokens, pooling and normalisation included."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    subset: dict[str, Any] = {} if backend == "openvino" else {"session_options": ort_options(threads)}
    subset |= {"ov_config": openvino_config(threads)} if backend == "openvino" else {}
    adapter = SentenceTransformer(str(model), backend=backend, device="cpu", model_kwargs=subset)

    def prepare(batch: int, seq: int) -> Call:
        inputs = torch_inputs(batch, seq)

        def call() -> object:
            with torch.inference_mode():
                return adapter(dict(inputs))

        return call

    return prepare


def openvino_config(threads: int) -> dict[str, str]:
    """FP32 with so many threads: left to itself OpenVINO computes in bfloat16 wherever it can."""
    return {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": "f32"}


def ort_options(threads: int) -> Any:
    """Session options with so many threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def optimum_onnxruntime(model: Path, threads: int, level: int) -> Prepare:
    """Optimum's export, optimised by ONNX Runtime's transformers optimiser at that level."""
    from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTOptimizer
    from optimum.onnxruntime.configuration import OptimizationConfig

    folder = tempfile.mkdtemp(prefix="peer-")
    exported = ORTModelForFeatureExtraction.from_pretrained(model, export=True)
    ORTOptimizer.from_pretrained(exported).optimize(
        save_dir=folder, optimization_config=OptimizationConfig(optimization_level=level)
    )
    adapter = ORTModelForFeatureExtraction.from_pretrained(
        folder, file_name="model_optimized.onnx", session_options=ort_options(threads)
    )
    return lambda batch, seq: (lambda inputs: lambda: adapter(**inputs))(torch_inputs(batch, seq))


def optimum_openvino(model: Path, threads: int) -> Prepare:
    """Optimum Intel's export in OpenVINO, FP32."""
    from optimum.intel import OVModelForFeatureExtraction

    adapter = OVModelForFeatureExtraction.from_pretrained(model, export=True, ov_config=openvino_config(threads))
    return lambda batch, seq: (lambda inputs: lambda: adapter(**inputs))(torch_inputs(batch, seq))


def way_named(name: str, model: Path, threads: int) -> Prepare:
    """The way of that name. Raises whatever its libraries raise."""
    kind, _, more = name.partition(":")
    built: dict[str, Callable[[], Prepare]] = {
        "edgeformer": lambda: edgeformer(model, threads, more),
        "torch": lambda: torch_model(model, threads, compiled=more == "compile"),
        "sentence-transformers": lambda: sentence_transformers(model, threads, more),
        "optimum-onnxruntime": lambda: optimum_onnxruntime(model, threads, int(more.removeprefix("O"))),
        "optimum-openvino": lambda: optimum_openvino(model, threads),
    }
    return built[kind]()


def timed(call: Call, calls: int) -> list[float]:
    """Milliseconds of each call, after one that warms up."""
    call()
    results = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        results.append((time.perf_counter() - began) * 1000)
    return results


def answering(name: str, model: Path, threads: int) -> Callable[[list[int]], list[float]]:
    """What answers requests. Raises whatever the way's libraries raise."""
    prepare, prepared = way_named(name, model, threads), dict[tuple[int, int], Call]()

    def answer(request: list[int]) -> list[float]:
        batch, seq, calls = request
        if (batch, seq) not in prepared:
            prepared[batch, seq] = prepare(batch, seq)
        return timed(prepared[batch, seq], calls)

    return answer


def main() -> None:
    """NAME MODEL THREADS."""
    name, model, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    serve(name, lambda: answering(name, model, threads))


if __name__ == "__main__":
    main()
