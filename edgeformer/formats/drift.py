"""How an artifact's error grows from loop to loop, as bundle.json has it."""

from __future__ import annotations

from pydantic import Field

from edgeformer.formats.base import Frozen


class LoopDrift(Frozen):
    """How far the state after one loop is from torch FP32's, on the golden inputs. None where it is not finite."""

    loop: int
    rms_error: float | None = Field(description="root mean square of the difference over that of the reference")
    max_error: float | None = Field(description="largest difference over the reference's root mean square")


class Drift(Frozen):
    """How an artifact's error grows from loop to loop."""

    tolerance: float = Field(description="of rms_error")
    loops: tuple[LoopDrift, ...] = Field(strict=False)
    first_beyond: int | None = Field(None, description="the first loop beyond the tolerance")
