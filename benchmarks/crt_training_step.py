"""One training step of a CRT on this CPU: as training computes it against as plain torch does, and the trainer's share.

Plain torch: logits of every exit in chunks that are computed again in the backward pass, cross-entropy by
``torch.nn.functional``, attention in the matrices' type, convolutions as three products that autograd differentiates.
Random tokens in packed rows; both take turns, A B A B, on copies of one model. Process time is what counts on a machine
that has other work; the ratio of the medians of each round is printed with its spread. The largest difference of the
gradients is that of rounding. ``trainer`` is a step of edgeformer's own trainer, and the share of it that is spent
outside of forward, backward, clipping and the optimizer's step.

Usage: python benchmarks/crt_training_step.py [--recipe crt_mini] [--precision bf16] [--threads 1] [--rounds 5]
                                              [--steps 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from edgeformer.data.batching import IGNORED
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.causal import attention
from edgeformer.models.crt.model import CRT, DilatedConv
from edgeformer.models.distillation import Batch, Losses
from edgeformer.models.language_loss import CHUNK_TOKENS, exit_weights
from edgeformer.system.host import cpu_name, now
from edgeformer.tasks import get_task
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import connect
from edgeformer.training.loop.optimizer import build_optimizer, resolve_precision
from edgeformer.training.loop.step import Stepper

Loss = Callable[[nn.Module, Batch], Losses]


def random_batch(recipe: Any) -> Batch:
    """Rows of two documents each."""
    generator = torch.Generator().manual_seed(0)
    rows, length = recipe.training.batch_size, recipe.data.sequence_length
    ids = torch.randint(recipe.model.vocab_size, (rows, length + 1), generator=generator)
    ends = torch.randint(1, length, (rows, 1), generator=generator)
    places = torch.arange(length).expand(rows, length)
    positions = torch.where(places < ends, places, places - ends)
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "positions": positions}


def plain_cross_entropy(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Summed, from all logits of these tokens."""
    return functional.cross_entropy(head(x).float(), targets, ignore_index=IGNORED, reduction="sum")


def plain(model: CRT, exit_weight: float) -> Loss:
    """Put plain torch's ways in place; its loss."""
    model.attention.attend = attention
    for module in model.modules():
        if isinstance(module, DilatedConv):
            module.eval()

    def loss(wrapped: nn.Module, batch: Batch) -> Losses:
        flat, losses = batch["targets"].flatten(), {}
        for loop, state in wrapped(batch["input_ids"], batch["positions"]).items():
            parts = zip(state.flatten(0, 1).split(CHUNK_TOKENS), flat.split(CHUNK_TOKENS), strict=True)
            head = model.head_of(loop)
            each = [checkpoint(plain_cross_entropy, x, head, aims, use_reentrant=False) for x, aims in parts]
            losses[loop] = torch.stack(each).sum()
        weights = exit_weights([*losses], exit_weight)
        return Losses(torch.stack([weight * losses[loop] for loop, weight in weights.items() if weight]).sum(), {})

    return loss


class Steps:
    """A model with its optimizer, trained on one batch again and again."""

    def __init__(self, recipe: Any, model: CRT, loss: Loss, precision: str) -> None:
        self._model, self._loss, self._clip = model, loss, recipe.training.clip_norm
        self._optimizer = build_optimizer(model, recipe.training.optimizer)
        self._batch, self._half = random_batch(recipe), precision == "bf16"

    def gradient(self) -> Tensor:
        """Return the gradient of the mean loss, all parameters concatenated; the model does not change."""
        torch.manual_seed(0)
        self._backward()
        results = torch.cat(
            [parameter.grad.flatten() for parameter in self._model.parameters() if parameter.grad is not None]
        )
        self._optimizer.zero_grad()
        return results

    def step(self) -> None:
        """Forward, backward, clipping, optimizer."""
        self._backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip or 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self) -> None:
        autocast: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if self._half else nullcontext()
        with autocast:
            total = self._loss(self._model, self._batch).total
        (total / self._batch["targets"].numel()).backward()


class RandomText:
    """What the trainer's stepper asks of an objective, for random tokens. Counts the time of what must be computed."""

    per_token = True

    def __init__(self, recipe: Any, loss: Loss, model: CRT) -> None:
        self.recipe, self.model_spec, self.task, self.model = (
            recipe,
            model_spec_of(recipe),
            get_task(recipe.task),
            model,
        )
        self._loss, self._batch, self.computing_s = loss, random_batch(recipe), 0.0

    def batch(self, rows: NDArray[np.int64], device: torch.device, *, pinned: bool = False) -> tuple[Batch, int]:
        """The same one always."""
        return self._batch, self._batch["targets"].numel()

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Forward."""
        return self._loss(model, batch)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its process time added up."""

        def call(*arguments: Any, **options: Any) -> Any:
            started = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                self.computing_s += time.process_time() - started

        return call


def trainer_share(recipe: Any, model: CRT, loss: Loss, steps: int) -> dict[str, float]:
    """Process milliseconds of a step by the trainer, and how much of it is not computing."""
    processes = connect(recipe, "cpu", sharded=False)
    objective: Any = RandomText(recipe, loss, model)
    stepper = Stepper(objective, processes, 1000)
    stepper.model.train()
    rows, position = np.arange(recipe.training.batch_size), Position(batch_size=recipe.training.batch_size)
    stepper.take(rows, position)
    objective.losses = objective.timed(objective.losses)
    processes.accelerator.backward = objective.timed(processes.accelerator.backward)
    processes.clip = objective.timed(processes.clip)  # type: ignore[method-assign]
    stepper.optimizer.step = objective.timed(stepper.optimizer.step)  # type: ignore[method-assign]
    started = time.process_time()
    for _ in range(steps):
        stepper.take(rows, position)
    total = time.process_time() - started
    return {"ms_per_step": 1000 * total / steps, "outside_of_computing": 1 - objective.computing_s / total}


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(recipe: Any, precision: str, rounds: int, steps: int) -> dict[str, Any]:
    """Process and wall milliseconds per step, round by round; a first round warms up and is not counted."""
    models = [CRT(recipe.model).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    loss = model_spec_of(recipe).adapter.loss(models[1], recipe, None)
    both = {
        "plain": Steps(recipe, models[0], plain(models[0], recipe.training.exit_weight), precision),
        "edgeformer": Steps(recipe, models[1], loss, precision),
    }
    gradients = [variant.gradient() for variant in both.values()]
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    cpu, wall = ({name: list[float]() for name in both} for _ in range(2))
    for number in range(rounds + 1):
        for name, variant in both.items():
            started = time.process_time(), time.perf_counter()
            for _ in range(steps):
                variant.step()
            if number:
                cpu[name].append(1000 * (time.process_time() - started[0]) / steps)
                wall[name].append(1000 * (time.perf_counter() - started[1]) / steps)
        if number:
            print(
                f"round {number}: " + ", ".join(f"{name} {times[-1]:.0f} ms" for name, times in cpu.items()), flush=True
            )
    return {
        "process_ms": {name: spread(times) for name, times in cpu.items()},
        "wall_ms": {name: spread(times) for name, times in wall.items()},
        "plain_over_edgeformer": spread([a / b for a, b in zip(cpu["plain"], cpu["edgeformer"], strict=True)]),
        "relative_difference_of_gradients": difference,
        "trainer": trainer_share(recipe, models[1], loss, steps * 2),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="crt_mini")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in each round, of each variant")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    precision = resolve_precision(arguments.precision, "cpu")
    recipe = load_recipe(arguments.recipe, [f"training.precision={precision}", "training.accumulation=1"])
    result = measure(recipe, precision, arguments.rounds, arguments.steps)
    ratio, trainer = result["plain_over_edgeformer"], result["trainer"]
    print(f"{ratio['median']:.2f}× faster than plain torch (from {ratio['low']:.2f} to {ratio['high']:.2f})")
    print(f"gradients differ by {result['relative_difference_of_gradients']:.1e} of their norm")
    print(f"the trainer: {trainer['ms_per_step']:.0f} ms a step, {trainer['outside_of_computing']:.1%} not computing")
    if arguments.json is not None:
        settings = {key: getattr(arguments, key) for key in ("recipe", "threads", "rounds", "steps")}
        host = {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version(), "measured": now()}
        document = {**settings, "precision": precision, "host": host, **result}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
