"""Cached against uncached decoding of the 92M CRT-Deep on this CPU, per token, at a context; and of its exits.

Random weights: the time does not depend on them. All variants take turns, A B C A B C …, in one process; for each round
the ratio of the medians is taken, and printed with its spread over the rounds.

Usage: python benchmarks/decode_speed.py [--context 512] [--rounds 5] [--tokens 8] [--recipe NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edgeformer.models import load_recipe
from edgeformer.models.crt.model import CRT, CachedLoops
from edgeformer.runtimes.torch.session import torch_decoder
from edgeformer.system.host import cpu_name, now
from edgeformer.tasks.language_modeling import LanguageRecipe


class Cached:
    """One text of ``context`` tokens, and then one token at a time, always up to the same loop."""

    def __init__(self, model: CRT, ids: torch.Tensor, loop: int) -> None:
        self._decoder, self._loop = torch_decoder(CachedLoops(model)), loop
        self(ids)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Logits after ``token`` [1, 1], or after the last of several."""
        self._decoder.read_rows(token.numpy())
        self._decoder.advance(self._loop)
        self.logits = torch.from_numpy(self._decoder.row_logits(self._loop))
        return self.logits


class Uncached:
    """The whole text again for every token; of the head only the last position, as any decoder would."""

    def __init__(self, model: CRT, ids: torch.Tensor, loop: int) -> None:
        self._model, self._ids, self._loop = model, ids, loop

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Logits after ``token`` [1, 1]."""
        self._ids = torch.cat((self._ids, token), dim=1)
        state = self._model(self._ids, until=self._loop)[self._loop][:, -1]
        return self._model.head_of(self._loop)(state)


def median_ms(step: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> float:
    """Median milliseconds of one token."""
    times = []
    for token in tokens:
        started = time.perf_counter()
        step(token.view(1, 1))
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


@torch.inference_mode()
def measure(model: CRT, context: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Milliseconds per token of every variant in every round; a first round warms up and is not counted."""
    generator = torch.Generator().manual_seed(0)
    words, last = model.tokens.num_embeddings, model.loops
    ids = torch.randint(0, words, (1, context), generator=generator)
    extra = torch.randint(0, words, (tokens * (rounds + 1),), generator=generator).split(tokens)
    # The uncached text starts anew at ``context`` in each round, while the cached ones grow: if anything, that favours
    # the uncached one. Repeating it is slow, so fewer tokens do.
    minimum = max(1, tokens // 4)
    cached = {f"cached, exit {loop}": Cached(model, ids, loop) for loop in model.exits}
    results: dict[str, list[float]] = {"uncached": [], **{name: [] for name in cached}}
    for number, fresh in enumerate(extra):
        measured = {"uncached": median_ms(Uncached(model, ids, last), fresh[:minimum])}
        measured |= {name: median_ms(step, fresh) for name, step in cached.items()}
        if number == 0:
            continue
        for name, value in measured.items():
            results[name].append(value)
        print(f"round {number}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in measured.items()))
    # The cached variants have read the whole text by now; their last answers must be the uncached model's.
    states = model(torch.cat((ids, torch.cat(extra).view(1, -1)), dim=1))
    differences = {
        str(loop): float((model.head_of(loop)(states[loop][:, -1]) - cached[f"cached, exit {loop}"].logits).abs().max())
        for loop in model.exits
    }
    full = results[f"cached, exit {last}"]
    return {
        "ms_per_token": {name: spread(values) for name, values in results.items()},
        "uncached_over_cached": spread([a / b for a, b in zip(results["uncached"], full, strict=True)]),
        "last_exit_over_exit": {
            str(loop): spread([a / b for a, b in zip(full, results[f"cached, exit {loop}"], strict=True)])
            for loop in model.exits[:-1]
        },
        "max_abs_difference": differences,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="crt_deep_rtx4050")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per round and variant")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if not isinstance(recipe, LanguageRecipe):
        raise SystemExit(f"{arguments.recipe} is no language model")
    if arguments.context + arguments.tokens * (arguments.rounds + 1) > recipe.model.max_positions:
        raise SystemExit(f"context and new tokens are more than the model's {recipe.model.max_positions} positions")
    torch.manual_seed(0)
    config: Any = recipe.model
    model = CRT(config).eval()
    result = measure(model, arguments.context, arguments.rounds, arguments.tokens)
    speed = result["uncached_over_cached"]
    print(f"cached is {speed['median']:.1f}× faster per token (from {speed['low']:.1f} to {speed['high']:.1f})")
    print(f"largest difference from the uncached logits: {max(result['max_abs_difference'].values()):.1e}")
    for loop, ratio in result["last_exit_over_exit"].items():
        print(f"exit {loop}: {ratio['median']:.2f}× (from {ratio['low']:.2f} to {ratio['high']:.2f}) of the last exit")
    if arguments.json is not None:
        settings = {key: getattr(arguments, key) for key in ("recipe", "context", "rounds", "tokens")}
        where = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        host = {**where, "python": platform.python_version(), "measured": now()}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        document = {**settings, "parameters": parameters, "host": host, **result}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
