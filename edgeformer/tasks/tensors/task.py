"""Tensors: what a graph is for is not known, so it is held to what it computes in FP32."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from edgeformer.formats.golden import INPUT, OUTPUT, Golden, GoldenError
from edgeformer.formats.manifest import Parity, Precision
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import Score
from edgeformer.tasks.calls import Axes, Run
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn
from edgeformer.tasks.task import Int64s
from edgeformer.tasks.tensors.data import Axis, TensorData
from edgeformer.tasks.tensors.scoring import (
    TensorScore,
    agreement,
    as_parity,
    differing_shapes,
    measure_errors,
    score_of,
)
from edgeformer.tasks.tensors.untrained import Untrained


class Tensors(Untrained):
    """Any named inputs, any named outputs."""

    name: ClassVar[str] = "tensors"
    noun: ClassVar[str] = "wrapped graph"
    recipe_type: ClassVar[type[Recipe]] = Recipe
    score_type: ClassVar[type[Score]] = TensorScore
    metric: ClassVar[Metric] = Metric("cosine", True, 4, -1.0, 1.0, "--min-cosine", "golden inputs")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "calls", None),
        ScoreColumn("cosine", "cosine with FP32", 4),
        ScoreColumn("loss", "RMS error", 4),
    )
    unit: ClassVar[str] = "calls"
    phase: ClassVar[Literal["steady", "decode"]] = "steady"
    trained: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    pipeline_tag: ClassVar[str] = "other"
    use: ClassVar[str] = "profile"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (), ()
    score_note: ClassVar[str] = "Of every output, how close it is to the FP32 graph's on the golden inputs; the worst."
    few: ClassVar[str] = "they are few"

    def axes(self, data: TensorData) -> Axes:
        return {name: tuple(axis.takes or "" for axis in axes) for name, axes in data.inputs.items()}

    def fit_shape(self, data: TensorData, batch: int, seq: int) -> tuple[int, int]:
        return (
            batch if data.takes("batch") else data.size_of("batch") or 1,
            seq if data.takes("seq") else data.size_of("seq") or 1,
        )

    def shape_notes(self, data: TensorData) -> list[str]:
        inputs = ", ".join(f"{name} {_shape_text(axes)}" for name, axes in data.inputs.items())
        sized = [what for what, taken in (("B: batch", data.takes("batch")), ("S: seq", data.takes("seq"))) if taken]
        told = f" ({', '.join(sized)} of a row)" if sized else "; all sizes are fixed, whatever --batch and --seq say"
        return [f"inputs: {inputs}{told}"]

    def input_shapes(self, data: TensorData, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        sizes = {"batch": batch, "seq": seq}
        return {name: tuple(sizes.get(a.takes or "", a.size) for a in axes) for name, axes in data.inputs.items()}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Different calls are different golden inputs, as far as there are; axes are cut, or repeated from the start.

        The rows of a batch come from golden calls in turn.
        """
        sizes, inputs = dict(zip(("batch", "seq"), shape, strict=True)), golden.cases(INPUT)
        return [
            {name: _sized(array, number, axes.get(name, ()), sizes) for name, array in inputs.items()}
            for number in range(count)
        ]

    def golden_outputs(self, golden: Golden, run: Run, most: int | None) -> dict[str, Array]:
        """Every output, name → [calls, …]: golden inputs are whole calls, which nothing may cut."""
        inputs = golden.cases(INPUT)
        # A number by itself is an array without axes, not numpy's kind of a float.
        answers = [run({name: np.asarray(array[i]) for name, array in inputs.items()}) for i in range(len(golden))]
        found: dict[str, Array] = {}
        for name in answers[0]:
            pieces = [np.asarray(answer[name]) for answer in answers]
            if len({piece.shape for piece in pieces}) > 1:
                raise GoldenError(f"output {name!r} has another shape in every call, so it cannot be compared")
            found[name] = np.stack(pieces)
        return found

    def golden_score(
        self, exit_: int, logits: Arrays, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> TensorScore:
        """Score outputs, name → [calls, …], against those that ``answers`` holds."""
        errors = measure_errors(logits, answers)
        score = score_of(errors, len(next(iter(answers.values()))))
        if score is None:
            raise GoldenError(f"output {errors[0].name!r} is not finite")
        return score

    def golden_parity(
        self, golden: Arrays, logits: Arrays, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        reference = {name.removeprefix(OUTPUT): array for name, array in golden.items() if name.startswith(OUTPUT)}
        problem = differing_shapes(logits, reference)
        if problem is not None:
            raise GoldenError(f"golden.npz has other outputs: {problem}")
        n = len(next(iter(reference.values())))
        return as_parity(measure_errors(logits, reference), agreement(logits, reference), n, precision, provider)

    def lost(self, found: TensorScore, reference: TensorScore, precision: Precision, *, trimmed: bool) -> str | None:
        """Nothing: the bar is on the outputs themselves."""
        return None


def _shape_text(axes: tuple[Axis, ...]) -> str:
    """``[B, 3, S]``."""
    letters = {"batch": "B", "seq": "S"}
    return f"[{', '.join(letters.get(axis.takes or '', str(axis.size)) for axis in axes)}]"


def _sized(cases: Array, number: int, axes: tuple[str, ...], sizes: dict[str, int]) -> Array:
    """One input of call ``number``: golden calls [calls, …] joined along the rows, every axis as long as it should be.

    Args:
        axes: what sizes each axis of the input.
        sizes: ``batch`` and ``seq`` of the call.
    """
    array = np.asarray(cases[number % len(cases)])
    if "batch" in axes:
        rows = axes.index("batch")
        needed = -(-sizes["batch"] // array.shape[rows])
        array = np.concatenate([cases[(number * needed + more) % len(cases)] for more in range(needed)], axis=rows)
    for place, takes in enumerate(axes):
        if takes:
            array = np.take(array, np.arange(sizes[takes]) % array.shape[place], axis=place)
    return np.asarray(array, order="C")
