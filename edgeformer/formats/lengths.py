"""How long the texts of a set are, as run.json has it."""

from pydantic import Field

from edgeformer.formats.base import Frozen


class Lengths(Frozen):
    """How many words, or tokens, texts have: of all texts of one set."""

    min: int
    median: float
    mean: float
    max: int
    edges: tuple[int, ...] = Field(
        strict=False,
        description="bins: from edges[i] up to, but not, edges[i + 1]; the last one holds all longer texts",
    )
    texts: tuple[int, ...] = Field(strict=False, description="in each bin")
