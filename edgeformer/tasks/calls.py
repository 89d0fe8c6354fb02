"""What a measuring process gives a model that reads text: real inputs at a stated shape.

They are the bundle's golden rows, cut or repeated. Never zeros, never random tokens, which would falsify
confidence exits and lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.golden import Golden, Tokens
from edgeformer.tasks.metric import Array, Arrays

if TYPE_CHECKING:
    from edgeformer.tasks.task import Task

Run = Callable[[Arrays], Arrays]
"""Inputs by name → outputs by name: a session's ``run``."""

Axes = Mapping[str, tuple[str, ...]]
"""Input → what sizes each of its axes: ``batch``, ``seq``, or nothing (it is fixed). Empty: of text, [batch, seq]."""


def fit_row(row: Tokens, seq: int) -> Tokens:
    """One row cut or repeated: the first token (such as [CLS]) stays first, those after it repeat.

    Args:
        row: token ids, int64 [k].
        seq: tokens of the result.
    """
    if row.size >= seq:
        return row[:seq]
    body = row[1:] if row.size > 1 else row
    return np.concatenate([row[:1], np.resize(body, seq - 1)])


def make_buffers(golden: Golden, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """Different inputs of shape [batch, seq], nothing padded, the golden rows used in turn.

    Several buffers in rotation keep a cache from answering instead of the artifact.

    Args:
        golden: of the bundle; the model takes an attention mask where it has one (classifiers).
        batch: rows of an input.
        seq: tokens of each row.
        count: how many inputs.
    """
    buffers: list[dict[str, Tokens]] = []
    rows = golden.texts()
    for number in range(count):
        picked = [rows[(number * batch + offset) % len(rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack([fit_row(row, seq) for row in picked]), dtype=np.int64)
        mask = {"attention_mask": np.ones_like(ids)} if golden.padded else {}
        buffers.append({"input_ids": ids, **mask})
    return buffers


class TextCalls:
    """Golden inputs as calls of a session: as models do it that read text. Other tasks do it their own way."""

    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]

    def axes(self, data: Any) -> Axes:
        """How the inputs of a model with this data section are sized."""
        return {}

    def fit_shape(self, data: Any, batch: int, seq: int) -> tuple[int, int]:
        """The batch size and length that a model can take instead of what is asked for: where its own are fixed."""
        return batch, seq

    def shape_notes(self, data: Any) -> list[str]:
        """What a reader of a report must be told of the inputs; nothing of text."""
        return []

    def input_shapes(self, data: Any, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        """Input → sizes in a call, where batch size and length do not tell them; nothing of text."""
        return {}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Different inputs of one shape, of the golden inputs cut or repeated.

        Args:
            axes: from :meth:`axes`.
            shape: batch size and length.
            count: how many inputs.
        """
        return [dict(call) for call in make_buffers(golden, *shape, count)]

    def golden_outputs(self, golden: Golden, run: Run, most: int | None) -> Any:
        """What a model computes of the golden inputs, as :meth:`golden_parity` takes it: logits of all rows.

        In as few calls as it takes: INT8 graphs scale their activations by the whole batch, so that another batch is
        another (if similar) answer.

        Args:
            most: rows that one call takes; None: any number.

        Raises:
            GoldenError: an input is not there.
            ArtifactError: it has no logits.
        """
        inputs = golden.inputs(self.golden_names[0])
        pieces = []
        for start in range(0, len(golden), most or len(golden)):
            outputs = run({name: array[start : start + (most or len(golden))] for name, array in inputs.items()})
            if "logits" not in outputs:
                names = ", ".join(outputs) or "none"
                raise ArtifactError(f"it has no output `logits`, but {names}; export the run again")
            pieces.append(outputs["logits"])
        return np.concatenate(pieces)


def longest_call(task: Task, max_positions: int | None, max_length: int | None) -> int | None:
    """Tokens of the longest call that a model ever gets: what it takes, and no more than its texts are cut to.

    Args:
        task: of the model. What writes text goes on behind the length that it was trained with.
        max_positions: tokens that the model takes; None: any number.
        max_length: tokens that its texts are cut to; None: not known.

    Returns:
        None: any number.
    """
    cut_to = max_length if task.reads_text and not task.writes_text else None
    return min((length for length in (max_positions, cut_to) if length is not None), default=None)
