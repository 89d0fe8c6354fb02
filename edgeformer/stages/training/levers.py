"""What a recipe asks of the device for speed, and whether it is there: TF32, page-locked memory, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from edgeformer.formats.recipe import TrainingConfig

_FIRST_WITH_TF32 = (8, 0)
"""Compute capability."""


@dataclass(frozen=True)
class Levers:
    """What is used of it.

    Attributes:
        tf32: steps multiply float32 in TF32.
        pinned: batches are copied out of page-locked memory, and nothing waits for the copy.
        graphs: the launches of compiled shapes are replayed as CUDA graphs.
        unused: of what was asked for, what is not used and why, for people.
    """

    tf32: bool
    pinned: bool
    graphs: bool
    unused: tuple[str, ...] = ()

    @classmethod
    def on(cls, training: TrainingConfig, device: torch.device) -> Levers:
        """Those of a recipe on this device."""
        on_card = device.type == "cuda"
        here = f"this run trains on the {device.type.upper()}"
        graphs = training.compile is not None and training.compile.cuda_graphs
        unused = []
        if training.tf32 and not on_card:
            unused.append(f"training.tf32 is not used: TF32 is a format of CUDA cards and {here}")
        if training.pinned_memory and not on_card:
            unused.append(f"training.pinned_memory is not used: nothing is copied to a card, {here}")
        if graphs and not on_card:
            unused.append(f"training.compile.cuda_graphs is not used: CUDA graphs need a CUDA card and {here}")
        tf32 = training.tf32 and on_card
        if tf32 and (capability := torch.cuda.get_device_capability(device)) < _FIRST_WITH_TF32:
            tf32 = False
            found = "{}.{}".format(*capability)
            unused.append(f"training.tf32 is not used: it needs compute capability 8.0, and this card has {found}")
        pinned = on_card and training.pinned_memory is not False
        return cls(tf32, pinned, graphs and on_card, tuple(unused))

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Around the steps of training: scores, which are computed between them, are not cut down."""
        before = torch.get_float32_matmul_precision()
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if self.tf32:
                torch.set_float32_matmul_precision(before)
