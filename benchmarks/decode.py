"""Decoding CRT-Deep on this CPU as `generate` does, FP32 and INT8, against cached decoding in torch; and its prompt.

Random weights, an exported bundle's own graphs: the decode graph (all loops in one call) and the step graphs, which
stop after any loop. torch is eager with keys, values and convolution inputs kept; its matrix products are routed as
``set_float32_matmul_precision`` does with --matmul, and ``OMP_PROC_BIND=true`` pins its threads. All variants take
turns, A B C A B C …, in one process; ratios are of medians, round by round, with their spread.

``exits``: how much faster a step that stops after loop e is than one through all L, embedding and head subtracted from
both, as a share of L / e. ``prefill``: a prompt read in one call, to the logits of its next token, against one forward
of the full graph on the same tokens, and against as many steps of one token.

Usage: python -m benchmarks.decode [--recipe crt_deep_rtx4050] [--context 512] [--rounds 5] [--tokens 8] [--threads N]
                                   [--matmul highest|high|medium] [--graphs DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from benchmarks.onnx_decode import Writing, ratio, spread
from edgeformer.backends.decoder import Decoder
from edgeformer.backends.onnxruntime.decode_graph import FullDepthEngine
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.onnxruntime.steps import StepEngine, StepParts
from edgeformer.backends.torch.session import torch_decoder
from edgeformer.families import load_recipe
from edgeformer.families.crt.cache import CachedLoops
from edgeformer.families.crt.model import CRT
from edgeformer.families.crt.network import NETWORK, build_crt
from edgeformer.families.tracing import cut_out
from edgeformer.machine.host import cpu_name, default_threads, now
from edgeformer.stages.exporting.graph_files import weights_file, write_graph
from edgeformer.stages.exporting.int8 import quantized_graphs
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.language_modeling.recipe import LanguageRecipe

PRECISIONS = ("fp32", "int8")
DECODE, FULL = "decode", "full"
Files = dict[str, Path]


def write_graphs(model: CRT, folder: Path) -> dict[str, Files]:
    """Precision → part → file: the step graphs, the decode graph, and the full forward of the last exit."""
    known = {precision: folder / precision for precision in PRECISIONS}
    if not all((place / "done").is_file() for place in known.values()):
        started = time.perf_counter()
        plain = NETWORK.trace(model, ["input_ids"], steps=True)
        for precision, place in known.items():
            place.mkdir(parents=True, exist_ok=True)
            graphs = plain if precision == "fp32" else quantized_graphs(plain, place)
            assert graphs.decode is not None
            full = cut_out(graphs.exits, {exit_logits(model.loops): "logits"})
            with weights_file(place / "model.onnx_data") as weights:
                for name, graph in {**graphs.steps, DECODE: graphs.decode, FULL: full}.items():
                    write_graph(graph, place / f"{name}.onnx", weights)
            (place / "done").touch()
            print(f"{precision} written after {time.perf_counter() - started:.0f} s", flush=True)
    return {precision: {path.stem: path for path in place.glob("*.onnx")} for precision, place in known.items()}


class Bench:
    """All that is compared.

    Args:
        settings: of the command line.
    """

    def __init__(self, model: CRT, files: dict[str, Files], settings: argparse.Namespace) -> None:
        self.model, self.settings = model, settings
        self._draw = np.random.default_rng(0)
        self.prompt = self.tokens(settings.context)
        self.parts, self.decode, self.full = {}, {}, {}
        for precision, paths in files.items():
            self.parts[precision] = StepParts(paths, model.loops, model.exits, self._opened)
            self.decode[precision], self.full[precision] = (self._opened(paths[name]) for name in (DECODE, FULL))
        last = model.loops
        self.writing = {"torch": Writing(torch_decoder(CachedLoops(model)), self.prompt, last)}
        for precision in files:
            text = Decoder(FullDepthEngine(self.decode[precision]))
            self.writing[f"{precision} decode graph"] = Writing(text, self.prompt, last)
            for loop in model.exits:
                steps = Decoder(StepEngine(self.parts[precision]))
                self.writing[f"{precision} steps, exit {loop}"] = Writing(steps, self.prompt, loop)

    def _opened(self, path: Path) -> OnnxSession:
        return OnnxSession(path, threads=self.settings.threads, in_turns=True)

    def tokens(self, count: int) -> list[int]:
        """At random."""
        return list(self._draw.integers(self.model.tokens.num_embeddings, size=count).tolist())

    def rounds(self) -> Iterator[dict[str, float]]:
        """Milliseconds of everything in turns; a first round warms up and is not given."""
        for number in range(self.settings.rounds + 1):
            fresh = self.tokens(self.settings.tokens)
            found = {name: writing.median_ms(fresh) for name, writing in self.writing.items()}
            for precision in self.parts:
                found |= {f"{precision} {name}": value for name, value in self._ends(precision, fresh).items()}
            if number:
                print(
                    f"round {number}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True
                )
                yield found

    def _ends(self, precision: str, fresh: list[int]) -> dict[str, float]:
        """Embedding and head alone; the prompt in one call, and one forward of the full graph on it."""
        parts, ids = self.parts[precision], np.array([self.prompt], dtype=np.int64)

        def ends(token: int) -> None:
            engine = StepEngine(parts)
            engine.readout(engine.embed(np.array([[token]], dtype=np.int64), 0, keep=False), self.model.loops)

        return {
            "embedding and head": statistics.median(timed_ms(lambda token=token: ends(token)) for token in fresh),
            "prefill": timed_ms(
                lambda: Writing(Decoder(FullDepthEngine(self.decode[precision])), self.prompt, self.model.loops)
            ),
            "full forward": timed_ms(lambda: self.full[precision].run({"input_ids": ids})),
        }

    def differences(self) -> dict[str, float]:
        """Largest difference of the last logits from those of a full forward in torch, once all rounds are over."""
        found = {}
        for name, writing in self.writing.items():
            loop = int(name.rsplit(" ", 1)[-1]) if "exit" in name else self.model.loops
            reference = self.writing["torch"].logits if loop == self.model.loops else None
            if reference is not None and name != "torch":
                found[name] = float(np.abs(writing.logits - reference).max())
        return found


def timed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def measure(bench: Bench) -> dict[str, Any]:
    """Times and ratios."""
    rounds = list(bench.rounds())
    times = {name: [one[name] for one in rounds] for name in rounds[0]}
    loops, result = bench.model.loops, {"ms": {name: spread(values) for name, values in times.items()}}
    for precision in bench.parts:
        ends, whole = times[f"{precision} embedding and head"], times[f"{precision} steps, exit {loops}"]
        share = {}
        for loop in bench.model.exits[:-1]:
            early = times[f"{precision} steps, exit {loop}"]
            gains = [(w - e) / (t - e) for w, t, e in zip(whole, early, ends, strict=True)]
            share[str(loop)] = spread([gain * loop / loops for gain in gains])
        prefill = times[f"{precision} prefill"]
        result[precision] = {
            "torch_over_decode_graph": ratio(times["torch"], times[f"{precision} decode graph"]),
            "torch_over_steps": ratio(times["torch"], whole),
            "exits_share_of_loop_ratio": share,
            "prefill_over_full_forward": ratio(prefill, times[f"{precision} full forward"]),
            "token_by_token_over_prefill": ratio(
                [value * bench.settings.context for value in times[f"{precision} decode graph"]], prefill
            ),
        }
    return {**result, "max_abs_difference_from_torch": bench.differences()}


def show(result: dict[str, Any]) -> None:
    """The ratios as sentences."""
    for precision in PRECISIONS:
        for name, value in result[precision].items():
            several = value if "median" not in value else {"": value}
            for loop, one in several.items():
                what = f"{precision} {name.replace('_', ' ')} {loop}".rstrip()
                print(f"{what}: {one['median']:.2f} ({one['low']:.2f}–{one['high']:.2f})")
    print(f"largest differences: {result['max_abs_difference_from_torch']}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="crt_deep_rtx4050")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per round and variant")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--matmul", choices=["highest", "high", "medium"], default="medium", help="of torch")
    parser.add_argument("--graphs", type=Path, help="keep the exported graphs here, or use those that are there")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if not isinstance(recipe, LanguageRecipe):
        raise SystemExit(f"{arguments.recipe} is no language model")
    if arguments.context + arguments.tokens * (arguments.rounds + 1) > recipe.model.max_positions:
        raise SystemExit(f"context and new tokens are more than the model's {recipe.model.max_positions} positions")
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision(arguments.matmul)
    torch.manual_seed(0)
    model = build_crt(recipe.model).eval()
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode(mode=False):
        files = write_graphs(model, arguments.graphs or Path(temporary))
        result = measure(Bench(model, files, arguments))
    show(result)
    if arguments.json is not None:
        settings = {
            key: getattr(arguments, key) for key in ("recipe", "context", "rounds", "tokens", "threads", "matmul")
        }
        versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
        pinned = os.environ.get("OMP_PROC_BIND", "false")
        host = {"cpu": cpu_name(), **versions, "python": platform.python_version(), "pinned": pinned, "measured": now()}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**settings, "host": host, **result}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
