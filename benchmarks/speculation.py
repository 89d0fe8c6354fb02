"""Does an early exit that drafts tokens, which all loops verify, write faster? And is the text the same?

For a bundle with a step artifact (``export --exit all``) and a text: how often the first choice of each exit is that of
all loops; then every prompt, the first tokens of a paragraph, is continued by every variant in turns: the decode graph
and the step artifact without drafts, and speculation for every exit and number of drafts. For each one: greedy texts
that are the same token for token, and the largest difference in log-probability where they first differ; accepted
drafts, tokens per round; and its speed over the decode graph's, per prompt, by the clock and by the processor's time,
which other processes disturb less: median, 10th and 90th percentile.

``--untrained KEY=VALUE…`` measures the shape of looped_mini with these changes instead, with random weights: the time
of a round by exit and drafts, the tokens per round from which it is faster than a token after the other, and the most
that it can bring (every draft accepted).

Usage:
    python -m benchmarks.speculation BUNDLE --text valid.txt [--precision fp32] [--temperature 0] [--json FILE]
    python -m benchmarks.speculation --untrained model.hidden_size=1024 model.layers=6 [--precision int8] [--json FILE]
    python -m benchmarks.speculation --table FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tabulate import tabulate

from edgeformer.bundle import Bundle
from edgeformer.data.encoding import PlainText
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.decoder import Decoder, FullDepthEngine, StepEngine, StepSession
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.speculation import Sampling, Speculation, Speculator
from edgeformer.system.host import cpu_name, now
from edgeformer.tasks.early_exit import exit_logits

_PROMPT_TOKENS = 16
_PLAIN, _STEPS = "decode graph", "step artifact"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = np.quantile(np.array(values), (0.1, 0.5, 0.9))
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


def continue_text(
    decoder: Decoder[Any],
    ids: Sequence[int],
    tokens: int,
    sampling: Sampling,
    speculation: Speculation | None,
    seed: int,
) -> tuple[list[int], tuple[float, float], Speculator | None]:
    """The tokens after ``ids``, and the seconds per token after the first call, by the clock and of the processor."""
    text, unread, generator = list[int](), list(ids), np.random.default_rng(seed)
    speculator = None
    if speculation is not None:
        assert speculation.exit is not None
        speculator = Speculator(decoder, speculation.exit, speculation, sampling, generator)
    began, began_cpu, first = 0.0, 0.0, 0
    while len(text) < tokens:
        if speculator is not None:
            unread = speculator.write(unread, tokens - len(text))
        else:
            decoder.read(unread)
            decoder.advance(decoder.loops)
            unread = [sampling.pick(decoder.logits(decoder.loops), generator)]
        text += unread
        if not began:  # the prompt is read in the first call
            began, began_cpu, first = time.perf_counter(), time.process_time(), len(text)
        unread = unread[-1:]
    later = max(1, len(text) - first)
    return text, ((time.perf_counter() - began) / later, (time.process_time() - began_cpu) / later), speculator


def gap_of_difference(decoder: Decoder[Any], prompt: Sequence[int], first: list[int], second: list[int]) -> float:
    """The difference of the log-probabilities of the first tokens in which two greedy texts differ."""
    place = next(place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    decoder.read([*prompt, *first[:place]])
    decoder.advance(decoder.loops)
    logits = decoder.logits(decoder.loops)
    return abs(float(logits[first[place]] - logits[second[place]]))


def agreement(bundle: Bundle, precision: str, exits: Sequence[int], ids: Sequence[int]) -> dict[str, float]:
    """Share of the tokens whose first choice at an exit is that of all loops, in windows of a text."""
    length = bundle.manifest.max_length
    windows = np.array(ids[: len(ids) // length * length], dtype=np.int64).reshape(-1, length)
    same: dict[int, list[float]] = {exit_: [] for exit_ in exits[:-1]}
    options = OpenOptions(exits=tuple(exits))
    with bundle.session(bundle.artifact(f"onnx-{precision}-step"), options) as session:
        for window in windows:
            outputs = session.run({"input_ids": window[None]})
            best = outputs[exit_logits(exits[-1])].argmax(-1)
            for exit_, shares in same.items():
                shares.append(float((outputs[exit_logits(exit_)].argmax(-1) == best).mean()))
    return {str(exit_): round(statistics.mean(shares), 4) for exit_, shares in same.items()}


def measure_bundle(arguments: argparse.Namespace) -> dict[str, Any]:
    """Continue every prompt with every variant, in turns."""
    bundle, precision, sampling = Bundle.open(arguments.bundle), arguments.precision, Sampling(arguments.temperature)
    exits = bundle.manifest.exits
    plain = PlainText(bundle.reader().tokenizer)
    paragraphs = [plain.encode(line).ids for line in arguments.text.read_text(encoding="utf-8").splitlines()]
    paragraphs = [[plain.boundary, *ids] for ids in paragraphs if len(ids) >= 2 * _PROMPT_TOKENS]
    chosen = np.linspace(0, len(paragraphs) - 1, arguments.prompts).astype(int)
    prompts = [paragraphs[place][: _PROMPT_TOKENS + 1] for place in chosen]
    ids = [token for paragraph in paragraphs for token in paragraph][: arguments.scored]
    variants: dict[str, Speculation | None] = {_PLAIN: None, _STEPS: None}
    for exit_ in exits[:-1]:
        for drafts in arguments.drafts:
            variants[f"exit {exit_}, {drafts} drafts"] = Speculation(drafts, exit_)
    for threshold in arguments.thresholds:
        drafts = max(arguments.drafts)
        variants[f"exit {exits[0]}, up to {drafts} drafts of {threshold:g}"] = Speculation(drafts, exits[0], threshold)
    options = OpenOptions(threads=arguments.threads)
    openers: dict[str, Decoder[Any]] = {
        role: bundle.decoder(bundle.artifact(f"onnx-{precision}-{role}"), which, options)
        for role, which in (("decode", exits[-1:]), ("step", exits))
    }
    texts: dict[str, list[list[int]]] = {name: [] for name in variants}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    rounds, drafted, accepted = (dict.fromkeys(variants, 0) for _ in range(3))
    for number, prompt in enumerate(prompts):
        turns = list(variants.items())
        for name, speculation in turns if number % 2 else turns[::-1]:
            role = "decode" if name == _PLAIN else "step"
            openers[role] = decoder = openers[role].fresh()
            text, taken, speculator = continue_text(decoder, prompt, arguments.tokens, sampling, speculation, number)
            texts[name].append(text)
            seconds[name].append(taken)
            if speculator is not None:
                rounds[name] += speculator.rounds
                drafted[name] += speculator.drafted
                accepted[name] += speculator.accepted
    rows = {}
    for name, speculation in variants.items():
        row: dict[str, Any] = {"tokens_per_s": round(1 / statistics.median(clock for clock, _ in seconds[name]), 1)}
        for place, kind in enumerate(("speed_over_decode_graph", "the_same_in_cpu_time")):
            pairs = zip(seconds[_PLAIN], seconds[name], strict=True)
            row[kind] = spread([plain[place] / own[place] for plain, own in pairs])
        if not arguments.temperature:
            row["same_texts"] = sum(a == b for a, b in zip(texts[name], texts[_STEPS], strict=True))
            gaps = [
                gap_of_difference(openers["step"].fresh(), prompt, plain_text, text)
                for prompt, plain_text, text in zip(prompts, texts[_STEPS], texts[name], strict=True)
                if plain_text != text
            ]
            row["largest_gap"] = round(max(gaps, default=0.0), 4)
        if speculation is not None:
            row |= {
                "exit": speculation.exit,
                "drafts": speculation.drafts,
                "threshold": speculation.threshold,
                "accepted_share": round(accepted[name] / max(1, drafted[name]), 4),
                "tokens_per_round": round((rounds[name] + accepted[name]) / rounds[name], 3),
            }
        rows[name] = row
    distinct = statistics.mean(len(set(text)) / len(text) for text in texts[_STEPS])
    return {
        "run": bundle.name, "parameters": bundle.manifest.parameters, "prompts": len(prompts),
        "prompt_tokens": _PROMPT_TOKENS + 1, "tokens": arguments.tokens, "temperature": arguments.temperature,
        "scored_tokens": len(ids), "agreement_with_all_loops": agreement(bundle, precision, exits, ids),
        "distinct_tokens_share": round(distinct, 3), "variants": rows,
    }  # fmt: skip


def write_steps(overrides: Sequence[str], precision: str, folder: Path) -> tuple[dict[str, Path], Path, Any]:
    """Graphs of looped_mini's shape with changes, with random weights: step parts, decode graph, and its recipe."""
    import torch

    from edgeformer.export.graphs import weights_file, write_graph
    from edgeformer.export.quantize import quantized_graphs
    from edgeformer.models import load_recipe
    from edgeformer.models.decoder.adapter import ADAPTER

    recipe: Any = load_recipe("looped_mini", list(overrides))
    torch.manual_seed(0)
    graphs = ADAPTER.trace(ADAPTER.build(recipe).eval(), ["input_ids"], steps=True)
    if precision == "int8" or precision == "int4":
        graphs = quantized_graphs(graphs, precision, folder)
    assert graphs.decode is not None
    with weights_file(folder / "model.onnx_data") as weights:
        for name, graph in {**graphs.steps, "decode": graphs.decode}.items():
            write_graph(graph, folder / f"{name}.onnx", weights)
    return {part: folder / f"{part}.onnx" for part in graphs.steps}, folder / "decode.onnx", recipe


def measure_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a token, and of rounds whose drafts are all accepted, by exit and number of drafts, in turns."""
    with tempfile.TemporaryDirectory() as name:
        parts, decode, recipe = write_steps(arguments.untrained, arguments.precision, Path(name))
        loops = recipe.model.iterations
        open_part: Callable[[Path], OnnxSession] = partial(OnnxSession, threads=arguments.threads, in_turns=True)
        steps = StepSession(parts, loops, open_part, exits=tuple(range(1, loops + 1)))
        plain = FullDepthEngine(OnnxSession(decode, threads=arguments.threads), loops)
        context = np.random.default_rng(0).integers(0, recipe.model.vocab_size, arguments.context).tolist()
        times: dict[tuple[int, int], list[float]] = {(loops, 0): []}
        times |= {(exit_, drafts): [] for exit_ in range(1, loops) for drafts in arguments.drafts}
        decoders: dict[tuple[int, int], Decoder[Any]] = {}
        for exit_, drafts in times:
            decoders[exit_, drafts] = decoder = Decoder(plain if exit_ == loops else StepEngine(steps))
            decoder.read(context)
            decoder.advance(loops)
        for number in range(arguments.rounds + 1):
            for (exit_, drafts), decoder in decoders.items():
                began = time.perf_counter()
                for place in range(drafts + 1):
                    decoder.read([place + 1])
                    if place < drafts:
                        decoder.advance(exit_)
                        decoder.logits(exit_).argmax()
                decoder.advance(loops)
                if drafts:
                    decoder.newest_logits(drafts + 1).argmax(-1)
                else:
                    decoder.logits(loops).argmax()
                if number:  # the first round warms up
                    times[exit_, drafts].append(1000 * (time.perf_counter() - began))
        steps.close()
    token_ms = times.pop((loops, 0))
    rows = {}
    for (exit_, drafts), round_ms in times.items():
        costs = [a / b for a, b in zip(round_ms, token_ms, strict=True)]  # in tokens of the decode graph
        rows[f"exit {exit_}, {drafts} drafts"] = {
            "exit": exit_, "drafts": drafts, "round_ms": spread(round_ms),
            "tokens_per_round_to_break_even": spread(costs),
            "largest_speed_up": spread([(drafts + 1) / cost for cost in costs]),
        }  # fmt: skip
    return {
        "untrained": arguments.untrained, "loops": loops, "context": arguments.context, "rounds": arguments.rounds,
        "token_ms": spread(token_ms), "variants": rows,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The variants as a Markdown table."""

    def cell(value: Any) -> Any:
        return f"{value['median']:.2f} ({value['p10']:.2f}–{value['p90']:.2f})" if isinstance(value, dict) else value

    left_out = ("exit", "drafts", "threshold")
    columns = [key for key in next(reversed(result["variants"].values())) if key not in left_out]
    rows = [[name, *(cell(row.get(key, "")) for key in columns)] for name, row in result["variants"].items()]
    return tabulate(rows, ["", *(column.replace("_", " ") for column in columns)], tablefmt="pipe")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--untrained", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--precision", choices=("fp32", "int8", "int4"), default="fp32")
    parser.add_argument("--text", type=Path, help="text of paragraphs, one a line, that the model was not trained on")
    parser.add_argument("--scored", type=int, default=20_000, help="tokens of the text on which the exits are compared")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.3], help="adaptive drafts at the first exit")
    parser.add_argument("--context", type=int, default=128, help="tokens before the timed ones, untrained shapes")
    parser.add_argument("--rounds", type=int, default=15, help="of untrained shapes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of a --json file")
    parser.add_argument("--json", type=Path, help="add the figures to this file, by model, precision and temperature")
    arguments = parser.parse_args()
    if arguments.table is not None:
        for name, result in json.loads(arguments.table.read_text(encoding="utf-8")).items():
            print(f"{name}\n\n{table(result)}\n")
        return
    if (arguments.bundle is None) == (arguments.untrained is None):
        parser.error("give either a BUNDLE or --untrained")
    if arguments.bundle is not None and arguments.text is None:
        parser.error("a BUNDLE needs --text")
    result = measure_bundle(arguments) if arguments.bundle is not None else measure_shape(arguments)
    host = {"cpu": cpu_name(), "threads": arguments.threads, "onnxruntime": onnxruntime.__version__, "measured": now()}
    result = {"precision": arguments.precision, "host": host, **result}
    print(json.dumps({key: value for key, value in result.items() if key != "variants"}))
    print(table(result))
    if arguments.json is not None:
        known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else {}
        model = result.get("run") or " ".join(arguments.untrained)
        name = f"{model}, {arguments.precision}" + (
            f", temperature {arguments.temperature:g}" if arguments.bundle else ""
        )
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = json.dumps(dict(sorted({**known, name: result}.items())), indent=1)
        arguments.json.write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
