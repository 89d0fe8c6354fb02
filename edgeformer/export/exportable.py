"""A trained model, ready to be exported: its torch module, its exits, and the golden inputs that its graphs are
checked against."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import Drift, LoopDrift, Precision
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.models import ModelSpec, model_spec_of
from edgeformer.models.adapter import ModelAdapter, count_parameters
from edgeformer.models.weights import GOLDEN_INPUTS, MODEL_FOLDER, load_model
from edgeformer.run import Run
from edgeformer.tasks import Task, task_named

Array = NDArray[Any]
Logits = NDArray[np.float32]
Tokens = dict[str, NDArray[np.int64]]
T = TypeVar("T")


@dataclass(frozen=True)
class Exportable:
    """A model in evaluation mode on the CPU, and what its graphs are checked against.

    Attributes:
        model: the model itself; every graph is made of it.
        exits: loops that answer, in rising order; the last one is the whole model.
        parameters: of the whole model, each counted once.
        needed: exit → parameters that its graph needs; the last exit is the full graph.
        inputs: real validation inputs, int64 [n, S] each.
        answers: what is right for them, as the task scores it.
        references: exit → torch FP32 logits of the inputs, float32 [rows or tokens, C].
        states: loop → torch FP32 hidden states, float32 [n, S, d].
        golden: what golden.npz holds.
        leaks: it sees what it is asked to predict.
    """

    recipe: Recipe
    task: Task
    model_spec: ModelSpec
    model: nn.Module
    exits: tuple[int, ...]
    parameters: int
    needed: dict[int, int]
    inputs: Tokens
    answers: Mapping[str, Array]
    references: dict[int, Logits]
    states: dict[int, Logits]
    golden: dict[str, Array]
    leaks: bool

    @property
    def adapter(self) -> ModelAdapter:
        """The family's torch half."""
        return self.model_spec.adapter

    @property
    def last(self) -> int:
        """The last exit: that of the full graph."""
        return self.exits[-1]

    def score(self, exit_: int, logits: Logits, rows: NDArray[np.int64] | None = None) -> Score:
        """Score logits like ``references``. ``rows``: which golden rows or tokens they are of; None: all."""
        return self.task.golden_score(exit_, logits, self.answers, rows, self.recipe.data)


def open_exportable(run: Run, *, allow_leak: bool = False) -> Exportable:
    """The run's weights with their golden inputs, after the probe for leaks.

    Raises:
        ArtifactError: a file of the run is missing or damaged.
        InputError: the model looks ahead, and ``allow_leak`` is not set.
    """
    names, answers = task_named(run.recipe.task).golden_names
    path = run.folder / MODEL_FOLDER / GOLDEN_INPUTS
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in (*names, *answers)}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None
    if any(array.dtype != np.int64 or 0 in array.shape for array in arrays.values()):
        raise ArtifactError(f"{path}: damaged (int64 arrays with rows are expected); train the run again")
    model = load_model(run.folder)
    try:
        found = run.model_spec.adapter.causality(model)
    except ValueError as error:
        raise ArtifactError(
            f"{run.folder}: the causality probe found nothing to judge: {error}; train it again"
        ) from None
    # A run whose architecture leaked stays marked, even if training shrank the leak below what the probe sees.
    seen_now = found is not None and found.leaks
    leaks = seen_now or run.manifest.leaks
    if leaks and not allow_leak:
        ahead = f"outputs depend on tokens up to {found.reach} positions ahead" if found and seen_now else ""
        raise InputError(
            f"{run.folder}: this model leaks future tokens ({ahead or 'run.json says so'}), so its scores are void; "
            "export it all the same, marked as leaking, with --allow-leak"
        )
    inputs, right = ({name: arrays[name] for name in which} for which in (names, answers))
    return with_references(run.settled, model, inputs, right, leaks=leaks)


def with_references(
    recipe: Recipe, model: nn.Module, inputs: Tokens, answers: Mapping[str, Array], *, leaks: bool
) -> Exportable:
    """A model with what torch FP32 computes for its inputs; the arguments are those of :class:`Exportable`."""
    task, model_spec = task_named(recipe.task), model_spec_of(recipe)
    exits: Any = model_spec.adapter.exits(model)
    with torch.inference_mode():
        outputs = exits(*map(torch.from_numpy, inputs.values()))
    count = len(exits.exits)
    logits = {exit_: found.numpy() for exit_, found in zip(exits.exits, outputs[:count], strict=True)}
    kept = {name: answers[name] for name in task.golden_names[1]}
    return Exportable(
        recipe=recipe,
        task=task,
        model_spec=model_spec,
        model=model,
        exits=exits.exits,
        parameters=count_parameters(model),
        needed=model_spec.adapter.needed(model),
        inputs=inputs,
        answers=task.right_answers(answers, logits),
        references={exit_: found.reshape(-1, found.shape[-1]) for exit_, found in logits.items()},
        states={loop: state.numpy() for loop, state in enumerate(outputs[count:], start=1)},
        golden={**inputs, **kept, **task.golden_answers(logits)},
        leaks=leaks,
    )


def read_json(path: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """What ``take`` makes of a JSON object that belongs to a run. Raises ArtifactError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("an object is expected")
        return take(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


# What a precision does to a model's numbers: would FP16 hold them, and how far do they drift from loop to loop?


FP16_LARGEST = 65_504.0

DRIFT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1, "int4": 3e-1}
"""Of the root mean square of torch FP32's state; like the logits' tolerances fixed here, not chosen per model."""


@torch.inference_mode()
def largest_activation(model: nn.Module, *inputs: NDArray[np.int64]) -> float:
    """Largest absolute number that any module of the FP32 model takes or gives on these inputs, attention scores too.

    ONNX Runtime's CPU provider computes FP16 graphs in FP32, so running one here cannot show an overflow.
    """
    largest = 0.0

    def note(tensor: object) -> None:
        nonlocal largest
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            # NaN would lose every comparison, and is no smaller a problem than infinity.
            largest = max(largest, float(tensor.abs().max().nan_to_num(float("inf"))))

    def watch(module: nn.Module, taken: tuple[object, ...], given: object) -> None:
        for tensor in (*taken, given):
            note(tensor)

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        with _Scores(note):
            model(*map(torch.from_numpy, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return largest


class _Scores(TorchFunctionMode):
    """Shows the scores q·kᵀ/√D, which torch's attention keeps to itself and a graph computes in its own precision."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            self._note(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        return func(*args, **(kwargs or {}))


def measure_drift(states: Mapping[int, Array], references: Mapping[int, Array], precision: Precision) -> Drift:
    """Compare states of golden inputs, loop → float32 [B, S, C], with those of torch FP32."""
    tolerance = DRIFT_TOLERANCE[precision]
    loops = []
    for loop, reference in sorted(references.items()):
        error = states[loop].astype(np.float64) - reference
        size, rms = (float(np.sqrt(np.square(of, dtype=np.float64).mean())) for of in (reference, error))
        known = np.isfinite(error).all() and size > 0
        largest = float(np.abs(error).max()) / size if known else None
        loops.append(LoopDrift(loop=loop, rms_error=rms / size if known else None, max_error=largest))
    beyond = [row.loop for row in loops if row.rms_error is None or row.rms_error > tolerance]
    return Drift(tolerance=tolerance, loops=tuple(loops), first_beyond=beyond[0] if beyond else None)
