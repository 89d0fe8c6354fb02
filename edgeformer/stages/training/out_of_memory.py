"""Going on after the device ran out of memory: the same optimizer step again, in smaller pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the one of torch's CPU allocator, which is a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


@dataclass(frozen=True)
class RandomState:
    """torch's random generators at the start of a step, so that its repetition draws the same numbers."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """The current state."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Put it back, and give cached memory back to the device."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
            torch.cuda.empty_cache()
