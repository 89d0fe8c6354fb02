"""What is known of the inputs of somebody else's graph: it takes the place of a recipe's data section."""

from typing import ClassVar, Literal

from pydantic import Field

from edgeformer.formats.base import Frozen
from edgeformer.formats.data_config import DataSection, Parts

Takes = Literal["batch", "seq"]
"""What sizes an axis: the rows of a call, or the length of each."""


class Axis(Frozen):
    """One axis of an input."""

    size: int = Field(ge=1, description="of the golden inputs; of an axis that takes nothing, of every call")
    takes: Takes | None = Field(None, description="what sizes it in a call; None: it is always of this size")
    role: Takes | None = Field(None, description="what it would take if it were not fixed; None: not known")


class TensorData(DataSection):
    """The inputs of a graph, and where its golden inputs come from."""

    called: ClassVar[str] = "inputs of a graph"

    parts: Parts = Field({}, description="there are none: the graph came without data")
    inputs: dict[str, tuple[Axis, ...]] = Field(description="input → its axes")
    drawn: dict[str, str] = Field(description="input → how its golden numbers came to be")

    @property
    def tokens_at_once(self) -> int:
        """Length of the golden inputs."""
        return self.size_of("seq") or 1

    def takes(self, what: Takes) -> bool:
        """Whether any axis is sized by the rows, or by the length, of a call."""
        return any(axis.takes == what for axes in self.inputs.values() for axis in axes)

    def size_of(self, what: Takes) -> int | None:
        """Rows or length of the golden inputs; None where no axis is known to be that."""
        return next((axis.size for axes in self.inputs.values() for axis in axes if axis.role == what), None)
