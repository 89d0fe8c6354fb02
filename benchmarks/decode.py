"""Decoding CRT-Deep on this CPU as `generate` does, in FP32, INT8 and blocks of 4 and 8 bits, against torch.

Random weights, an exported bundle's own graphs. Every way is a process of its own that stays open and waits: the decode
graph (all loops in one call) and the step graphs (which stop after any loop), each opened as edgeformer opens it, and
torch: eager, with keys, values and convolution inputs kept, its threads pinned, and of the ways that torch has of
computing a product with one row the fastest that is as exact as FP32. Of each round all are asked in turn, every other
round backwards, and the exits of the step graphs in turn with every token; ratios are round by round, with their
spread.

The bars: torch's time over that of the decode graph in FP32 (3), and over that of the fastest with 8-bit or 4-bit
weights (6). ``exits``: how much faster a step that stops after loop e is than one through all L, as a share of L / e
(0.9); and the same of the loops only, embedding and head subtracted from both. ``prefill``: a prompt read in one call,
to the logits of its next token, over one forward of the full graph on the same tokens, which computes the logits of the
last one only, too (1.5).

``torch over reading weights``: of each round torch's time over that of reading a token's weights at the memory's rate,
or at that of the way which read fastest in this round. The last logits of all are compared with those of an
uncached forward of the whole text in torch, at every exit.

Usage: python -m benchmarks.decode [--recipe crt_deep_rtx4050] [--context 512] [--rounds 7] [--tokens 8] [--minutes 9]
                                   [--threads N] [--graphs DIR [--export-only]] [--json FILE]

--graphs keeps the exported graphs there, or uses those that are there; --export-only ends when they are written, so
that another call has its minutes for measuring. The exit code is 3 where a bar was not judged.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._decode import PRECISIONS, STEPPED
from benchmarks.judging import MET, NOT_JUDGED, NOT_MET, Bar, Limit, Watch, judged, report_bars, unless
from benchmarks.ways import Way, environment
from edgeformer.models import load_recipe
from edgeformer.runtimes import library_versions
from edgeformer.system.host import cpu_name, default_threads, now
from edgeformer.tasks.language_modeling import LanguageRecipe

_TORCH, _FP32_BAR, _BITS_BAR, _EXIT_BAR, _PREFILL_BAR = "torch", 3.0, 6.0, 0.9, 1.5
Times = dict[str, list[float]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of two ways, round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


class Bench:
    """All that is compared.

    Args:
        recipe: of the model.
        asked: the command line.
        folder: of the graphs.
        stack: ends the processes.
    """

    def __init__(self, recipe: LanguageRecipe, arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._asked, self._folder, self._stack = arguments, folder, stack
        model: Any = recipe.model
        self.loops, self._words = model.loops, model.vocab_size
        self.exits = (*model.exits, self.loops)
        self._draw = np.random.default_rng(0)
        self.prompt = self._tokens(arguments.context)
        self._text = list(self.prompt)

    def export(self) -> float:
        """Seconds that writing the graphs took."""
        with ExitStack() as alone:
            seconds: float = self._opened("graphs", alone).ask({})
        return seconds

    def open(self) -> dict[str, Any]:
        """Start every way, tune torch, and read the prompt; return torch's settings."""
        names = [_TORCH, *(f"{precision} decode" for precision in PRECISIONS)]
        names += [f"{precision} {kind}" for precision in STEPPED for kind in ("steps", "full")]
        self._ways = {name: self._opened(name, self._stack) for name in names}
        # What all are asked for: name of the figure → way and loop.
        self._asks = {_TORCH: (_TORCH, self.loops)}
        self._asks |= {f"{name} graph": (name, self.loops) for name in names if name.endswith("decode")}
        self._asks |= {f"{p} steps, exit {loop}": (f"{p} steps", loop) for p in STEPPED for loop in self.exits}
        tuned: dict[str, Any] = self._ways[_TORCH].ask({"do": "tune"})
        for way, loop in self._asks.values():
            self._ways[way].ask({"do": "read", "ids": self.prompt, "loop": loop})
        return tuned

    def weight_bytes(self) -> dict[str, int]:
        """Precision → bytes of weights that one token's products read."""
        return {name: self._ways[f"{name} decode"].ask({"do": "weight_bytes"}) for name in PRECISIONS}

    def round(self, number: int) -> dict[str, float]:
        """Milliseconds of everything, all in turn."""
        fresh = self._tokens(self._asked.tokens)
        self._text += fresh
        values: dict[str, Any] = {}
        for way in list(dict.fromkeys(way for way, _ in self._asks.values()))[:: -1 if number % 2 else 1]:
            loops = {loop: name for name, (its, loop) in self._asks.items() if its == way}
            if way.endswith("steps"):
                times = self._ways[way].ask({"do": "exits", "ids": fresh})
                values |= {name: times[str(loop)] for loop, name in loops.items()}
                values[f"{way.split()[0]} embedding and head"] = times["0"]
                continue
            for loop, name in loops.items():
                values[name] = self._ways[way].ask({"do": "write", "ids": fresh, "loop": loop})
        return values

    def prompts(self, number: int) -> dict[str, float]:
        """Milliseconds of reading the prompt in one call, and of one forward of the full graph, in turn.

        Texts begin anew with it.
        """
        asks = {f"{precision} prefill": f"{precision} decode" for precision in STEPPED}
        asks |= {f"{precision} full forward": f"{precision} full" for precision in STEPPED}
        request = {"do": "read", "ids": self.prompt, "loop": self.loops}
        return {name: self._ways[asks[name]].ask(request) for name in [*asks][:: -1 if number % 2 else 1]}

    def differences(self) -> dict[str, float]:
        """Largest difference of every way's last logits from those of an uncached forward of its whole text."""
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "logits.npz")
            self._ways[_TORCH].ask({"do": "reference", "ids": self._text, "file": file})
            with np.load(file) as read:
                exact = {int(loop): read[loop] for loop in read.files}
            values: dict[str, Any] = {}
            for name, (way, loop) in self._asks.items():
                subset = str(Path(folder) / "own.npy")
                self._ways[way].ask({"do": "save", "file": subset, "loop": loop})
                values[name] = float(np.abs(np.load(subset) - exact[loop]).max())
        return values

    def _tokens(self, count: int) -> list[int]:
        return list(self._draw.integers(self._words, size=count).tolist())

    def _opened(self, name: str, stack: ExitStack) -> Way:
        threads = self._asked.threads
        command = [
            sys.executable,
            "-m",
            "benchmarks._decode",
            name,
            self._asked.recipe,
            str(self._folder),
            str(threads),
        ]
        way = Way(name, command, environment(threads, torch_alone=name == _TORCH), stack)
        if way.reason:
            raise SystemExit(f"{name}: {way.reason}")
        return way


WHOLE = "exit {loop} over all loops, {precision}: share of the loops' ratio"
LOOPS_ONLY = "loops only (embedding and head subtracted), exit {loop}, {precision}: share of the loops' ratio"
_LOOPS_ONLY_BEFORE = "share of the loops' ratio, exit {loop}, {precision}"
"""What files without ``all_loops_over_exit`` call the same target."""


def speedups(times: Times, precision: str, exits: Sequence[int]) -> dict[int, list[float]]:
    """Exit → time of a step through all loops over that of one that stops there, round by round."""
    *early, last = exits
    full_us = times[f"{precision} steps, exit {last}"]
    return {loop: ratio(full_us, times[f"{precision} steps, exit {loop}"]) for loop in early}


def shares(times: Times, precision: str, exits: Sequence[int]) -> dict[int, list[float]]:
    """Exit → how much faster a step that stops there is, embedding and head subtracted, as a share of L / e."""
    *early, last = exits
    ends, full_us = times[f"{precision} embedding and head"], times[f"{precision} steps, exit {last}"]
    return {
        loop: [
            (w - e) / (t - e) * loop / last
            for w, t, e in zip(full_us, times[f"{precision} steps, exit {loop}"], ends, strict=True)
        ]
        for loop in early
    }


def whole_shares(times: Times, precision: str, exits: Sequence[int]) -> dict[int, list[float]]:
    """Exit → how much faster a step that stops there is, as a share of L / e."""
    return {
        loop: [value * loop / exits[-1] for value in values]
        for loop, values in speedups(times, precision, exits).items()
    }


def with_speedups(document: dict[str, Any]) -> dict[str, Any]:
    """Return a result with ``all_loops_over_exit`` and the targets on it, also where it is of before they were written.

    Such files kept no rounds: theirs are ratios of medians, without a range, and the targets say so.
    """
    if all("all_loops_over_exit" in document.get(precision, {}) for precision in STEPPED):
        return document
    upgraded, added = dict(document), list[Bar]()
    for precision in STEPPED:
        times = {name: value["median"] for name, value in document["ms"].items() if name.startswith(precision)}
        exits = sorted(int(name.rpartition(" ")[2]) for name in times if " steps, exit " in name)
        values = {
            loop: times[f"{precision} steps, exit {exits[-1]}"] / times[f"{precision} steps, exit {loop}"]
            for loop in exits[:-1]
        }
        upgraded[precision] = {
            "all_loops_over_exit": {str(loop): {"median": value} for loop, value in values.items()},
            **document[precision],
        }
        for loop, value in values.items():
            share = value * loop / exits[-1]
            bar: Bar = {"what": WHOLE.format(loop=loop, precision=precision), "sense": "at least", "wanted": _EXIT_BAR}
            disturbed = document["conditions"]["disturbed"]
            verdict = NOT_JUDGED if disturbed else MET if share >= _EXIT_BAR else NOT_MET
            added.append({**bar, "median": share, "verdict": verdict, "reason": disturbed or "ratio of medians"})
    names = {
        _LOOPS_ONLY_BEFORE.format(loop=loop, precision=precision): LOOPS_ONLY.format(loop=loop, precision=precision)
        for precision in STEPPED
        for loop in document[precision]["exits_share_of_loop_ratio"]
    }
    bars = [{**bar, "what": names.get(bar["what"], bar["what"])} for bar in document["bars"]]
    first = next((place for place, bar in enumerate(bars) if bar["what"] in names.values()), len(bars))
    return {**upgraded, "bars": [*bars[:first], *added, *bars[first:]]}


def bars_of(times: Times, exits: Sequence[int]) -> list[Bar]:
    """Every bar of this script."""
    speed = {name: ratio(times[_TORCH], times[f"{name} decode graph"]) for name in PRECISIONS}
    fewest = max((name for name in PRECISIONS if name != "fp32"), key=lambda name: statistics.median(speed[name]))
    bars = [judged("torch over the decode graph, fp32", speed["fp32"], _FP32_BAR, at_least=True)]
    bars.append(judged(f"torch over the decode graph, {fewest}", speed[fewest], _BITS_BAR, at_least=True))
    for precision in STEPPED:
        for label, by_exit in (
            (WHOLE, whole_shares(times, precision, exits)),
            (LOOPS_ONLY, shares(times, precision, exits)),
        ):
            for loop, values in by_exit.items():
                quantity = label.format(loop=loop, precision=precision)
                bars.append(judged(quantity, values, _EXIT_BAR, at_least=True))
        prompts = ratio(times[f"{precision} prefill"], times[f"{precision} full forward"])
        bars.append(judged(f"prefill over one forward, {precision}", prompts, _PREFILL_BAR, at_least=False))
    return bars


def summary(times: Times, exits: Sequence[int], context: int) -> dict[str, Any]:
    """Times, and every ratio with its spread, by precision."""
    result: dict[str, Any] = {"ms": {name: spread(values) for name, values in times.items()}}
    for precision in PRECISIONS:
        graph = times[f"{precision} decode graph"]
        result[precision] = {"torch_over_decode_graph": spread(ratio(times[_TORCH], graph))}
        if precision not in STEPPED:
            continue
        prefill = times[f"{precision} prefill"]
        by_token = [value * context / full_us for value, full_us in zip(graph, prefill, strict=False)]
        result[precision] |= {
            "torch_over_steps": spread(ratio(times[_TORCH], times[f"{precision} steps, exit {exits[-1]}"])),
            "all_loops_over_exit": {
                str(e): spread(results) for e, results in speedups(times, precision, exits).items()
            },
            "exits_share_of_loop_ratio": {
                str(e): spread(results) for e, results in shares(times, precision, exits).items()
            },
            "prefill_over_full_forward": spread(ratio(prefill, times[f"{precision} full forward"])),
            "token_by_token_over_prefill": spread(by_token),
        }
    return result


def rates(times: Times, read: Mapping[str, int], bandwidths: Sequence[float]) -> dict[str, Any]:
    """Gigabytes of weights per second by memory and by each way that takes all loops; how far reading alone would get.

    Args:
        read: precision → bytes of weights that a token's products read.
        bandwidths: bytes per second, of each round.
    """
    ways = {_TORCH: "fp32", **{f"{precision} decode graph": precision for precision in PRECISIONS}}
    reached = {way: [read[name] / ms * 1000 for ms in times[way]] for way, name in ways.items()}
    # What was measured as the memory's rate is not always the most: a way may have been faster at its moment.
    limits = [max(values) for values in zip(bandwidths, *reached.values(), strict=True)]
    return {
        "weight_bytes_per_token": dict(read),
        "memory_gb_per_s": statistics.median(bandwidths) / 1e9,
        "gb_per_s": {way: statistics.median(values) / 1e9 for way, values in reached.items()},
        "torch_over_reading_weights": {
            name: spread([ms / 1000 * rate / size for ms, rate in zip(times[_TORCH], limits, strict=True)])
            for name, size in read.items()
        },
    }


def measure(bench: Bench, arguments: argparse.Namespace, limit: Limit) -> tuple[Times, Times, list[float]]:
    """Of every round the times of tokens, with the rate of memory, and those of prompts; a first one warms up.

    Some machines' memory is twice as fast at one moment as at the next.
    """
    tokens: Times = {}
    prompts: Times = {}
    bandwidths: list[float] = []
    command = [sys.executable, "-m", "benchmarks._torch_rates", str(arguments.threads), "64", "64"]
    with ExitStack() as stack:
        memory = Way("memory", command, environment(arguments.threads, torch_alone=True), stack)
        for part, kept in ((bench.prompts, prompts), (bench.round, tokens)):
            part(1)
            for number in limit.rounds(arguments.rounds):
                if kept is tokens:
                    bandwidths.append(memory.ask("rates")["bandwidth"])
                values = part(number)
                for name, value in values.items():
                    kept.setdefault(name, []).append(value)
                print(
                    f"round {number + 1}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in values.items()), flush=True
                )
    return tokens, prompts, bandwidths


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="crt_deep_rtx4050")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per round and way")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of everything; rounds that would end later are left out"
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--graphs", type=Path, help="keep the exported graphs here, or use those that are there")
    parser.add_argument("--export-only", action="store_true", help="write the graphs to --graphs, and end")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.export_only and arguments.graphs is None:
        parser.error("--export-only: name the folder: --graphs DIR")
    return arguments


def main() -> int:
    """Command line; 3 where a bar was not judged."""
    arguments = options()
    recipe = load_recipe(arguments.recipe)
    if not isinstance(recipe, LanguageRecipe):
        raise SystemExit(f"{arguments.recipe} is no language model")
    if arguments.context + arguments.tokens * (arguments.rounds + 1) > recipe.model.max_positions:
        raise SystemExit(f"context and new tokens are more than the model's {recipe.model.max_positions} positions")
    watch, limit = Watch(), Limit(arguments.minutes, parts=2)
    limit.tell(9)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        bench = Bench(recipe, arguments, arguments.graphs or Path(temporary), stack)
        print(f"graphs after {bench.export():.0f} s", flush=True)
        if arguments.export_only:
            return 0
        tuned = bench.open()
        print(f"torch: {tuned['chosen']}", flush=True)
        tokens, prompts, bandwidths = measure(bench, arguments, limit)
        times = tokens | prompts
        result = summary(times, bench.exits, arguments.context)
        result["bandwidth"] = rates(times, bench.weight_bytes(), bandwidths)
        result["max_abs_difference"] = bench.differences()
        conditions = watch.conditions(arguments.threads)
    print(json.dumps({name: result[name] for name in ("bandwidth", "max_abs_difference")}, indent=2), flush=True)
    report = {key: getattr(arguments, key) for key in ("recipe", "context", "rounds", "tokens", "threads")}
    host = {"cpu": cpu_name(), "python": platform.python_version(), "measured": now()}
    report |= {"host": host, "versions": library_versions(), "torch": tuned, "conditions": conditions, **result}
    report["bars"] = unless(conditions["disturbed"], bars_of(times, bench.exits))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report_bars(report["bars"])


if __name__ == "__main__":
    sys.exit(main())
