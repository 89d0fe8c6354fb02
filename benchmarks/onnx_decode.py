"""Decoding CRT-Deep in torch against ONNX Runtime on this CPU, per token, at a context.

ONNX Runtime runs the decode graph (all loops in one call) and the step graphs up to every exit.

Random weights: the time does not depend on them. All variants take turns, A B C A B C …, in one process; for each round
the ratio of the medians is taken, and printed with its spread over the rounds. Exporting takes a while;
--graphs keeps the graphs (FP32, 0.4 GB at 92M) and uses those that are there.

Usage: python benchmarks/onnx_decode.py [--context 512] [--rounds 5] [--tokens 8] [--recipe NAME] [--threads N]
                                        [--graphs DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
import torch

from edgeformer.backends.decoder import Decoder
from edgeformer.backends.onnxruntime.decode_graph import FullDepthEngine
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.onnxruntime.steps import StepEngine, StepParts
from edgeformer.backends.torch.session import torch_decoder
from edgeformer.families import load_recipe
from edgeformer.families.crt.cache import CachedLoops
from edgeformer.families.crt.graphs import compose_decode, step_specs
from edgeformer.families.crt.model import CRT
from edgeformer.families.crt.network import build_crt
from edgeformer.families.tracing import export_graph
from edgeformer.machine.host import cpu_name, default_threads, now
from edgeformer.stages.exporting.graph_files import weights_file, write_graph
from edgeformer.tasks.language_modeling.recipe import LanguageRecipe

DECODE = "decode"


class Text(Protocol):
    """What every variant can do, as `generate` uses it."""

    def read(self, ids: Sequence[int]) -> None:
        """Take in tokens."""

    def advance(self, loop: int) -> None:
        """Compute the newest of them."""

    def logits(self, loop: int) -> Any:
        """Logits of the next one."""


class Writing:
    """A text of ``context`` tokens, and then one token at a time, always up to the same loop."""

    def __init__(self, text: Text, ids: list[int], loop: int) -> None:
        self._text, self._loop = text, loop
        self.logits = self.step(ids)

    def step(self, ids: list[int]) -> Any:
        """Read, compute and answer, as for every token that is written."""
        self._text.read(ids)
        self._text.advance(self._loop)
        self.logits = self._text.logits(self._loop)
        return self.logits

    def median_ms(self, tokens: list[int]) -> float:
        """Median milliseconds of one token."""
        times = []
        for token in tokens:
            started = time.perf_counter()
            self.step([token])
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times)


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Of two variants, round by round."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def write_graphs(model: CRT, folder: Path) -> dict[str, Path]:
    """Part → file, and the decode graph under ``DECODE``; all with one file of weights."""
    paths = {name: folder / f"{name}.onnx" for name in (*step_specs(model), DECODE)}
    if not all(path.is_file() for path in paths.values()):
        started = time.perf_counter()
        graphs = {name: export_graph(spec) for name, spec in step_specs(model).items()}
        graphs[DECODE] = compose_decode(model, graphs)
        with weights_file(folder / "model.onnx_data") as weights:
            for name, graph in graphs.items():
                write_graph(graph, paths[name], weights)
        print(f"exported in {time.perf_counter() - started:.0f} s", flush=True)
    return paths


def variants(model: CRT, paths: dict[str, Path], ids: list[int], threads: int) -> dict[str, Writing]:
    """All that is compared, with the context read."""

    def opened(path: Path) -> OnnxSession:
        return OnnxSession(path, threads=threads, in_turns=True)

    last = model.loops
    parts = StepParts(paths, last, model.exits, opened)
    found: dict[str, tuple[Text, int]] = {
        "torch": (torch_decoder(CachedLoops(model)), last),
        "decode graph": (Decoder(FullDepthEngine(opened(paths[DECODE]))), last),
    }
    found |= {f"step graphs, exit {loop}": (Decoder(StepEngine(parts)), loop) for loop in model.exits}
    return {name: Writing(text, ids, loop) for name, (text, loop) in found.items()}


@torch.inference_mode()
def measure(model: CRT, paths: dict[str, Path], settings: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per token of every variant in every round; a first round warms up and is not counted."""
    draw = np.random.default_rng(0)
    words, last = model.tokens.num_embeddings, model.loops
    ids = draw.integers(words, size=settings.context).tolist()
    extra = [draw.integers(words, size=settings.tokens).tolist() for _ in range(settings.rounds + 1)]
    compared = variants(model, paths, ids, settings.threads)
    found: dict[str, list[float]] = {name: [] for name in compared}
    for number, fresh in enumerate(extra):
        measured = {name: writing.median_ms(fresh) for name, writing in compared.items()}
        if number == 0:
            continue
        for name, value in measured.items():
            found[name].append(value)
        print(f"round {number}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in measured.items()))
    # All have read the same text by now; their last answers must be the uncached model's.
    states = model(torch.tensor([[*ids, *chain.from_iterable(extra)]]))
    expected = {loop: model.head_of(loop)(states[loop][0, -1]).numpy() for loop in model.exits}
    answered = {name: int(name.rsplit(" ", 1)[-1]) if "exit" in name else last for name in compared}
    steps = {loop: found[f"step graphs, exit {loop}"] for loop in model.exits}
    return {
        "ms_per_token": {name: spread(values) for name, values in found.items()},
        "torch_over_decode_graph": ratio(found["torch"], found["decode graph"]),
        "torch_over_step_graphs": ratio(found["torch"], steps[last]),
        "step_graphs_over_decode_graph": ratio(steps[last], found["decode graph"]),
        "decode_graph_over_exit": {str(loop): ratio(found["decode graph"], values) for loop, values in steps.items()},
        "max_abs_difference": {
            name: float(np.abs(writing.logits - expected[answered[name]]).max()) for name, writing in compared.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """The ratios as sentences."""
    for name, value in result.items():
        if name.endswith("over_exit"):
            for loop, one in value.items():
                print(f"{name.replace('_', ' ')} {loop}: {one['median']:.2f} ({one['low']:.2f}–{one['high']:.2f})")
        elif "_over_" in name:
            print(f"{name.replace('_', ' ')}: {value['median']:.2f} ({value['low']:.2f}–{value['high']:.2f})")
    print(f"largest difference from the uncached logits: {max(result['max_abs_difference'].values()):.1e}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="crt_deep_rtx4050")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per round and variant")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--graphs", type=Path, help="keep the exported graphs here, or use those that are there")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if not isinstance(recipe, LanguageRecipe):
        raise SystemExit(f"{arguments.recipe} is no language model")
    if arguments.context + arguments.tokens * (arguments.rounds + 1) > recipe.model.max_positions:
        raise SystemExit(f"context and new tokens are more than the model's {recipe.model.max_positions} positions")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = build_crt(recipe.model).eval()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(model, write_graphs(model, folder), arguments)
    show(result)
    if arguments.json is not None:
        settings = {key: getattr(arguments, key) for key in ("recipe", "context", "rounds", "tokens", "threads")}
        versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
        host = {"cpu": cpu_name(), **versions, "python": platform.python_version(), "measured": now()}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        document = {**settings, "parameters": parameters, "host": host, **result}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
