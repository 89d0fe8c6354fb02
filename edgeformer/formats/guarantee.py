"""What early exit of an artifact is promised to cost, the thresholds that keep the promise, and what they were seen to
save. It stands in bundle.json, with the artifact that it is about."""

from __future__ import annotations

from pydantic import Field

from edgeformer.formats.base import Frozen


class ExitTime(Frozen):
    """Time of single texts, each in a call of its own, in turn with early exit and with all loops."""

    provider: str = Field(description="what computed")
    host: str = Field(description="the processor")
    threads: int
    rows: int = Field(description="texts that were timed, drawn from the held-out ones")
    early_ms: dict[str, float] = Field(description="mean, p50, p90… as far as the texts can carry them")
    full_ms: dict[str, float] = Field(description="the same texts with all loops")
    ratio: float = Field(description="mean with early exit over mean with all loops")


class ExitGuarantee(Frozen):
    """The score falls by at most ``max_drop`` on texts like the held-out ones, with this confidence."""

    max_drop: float = Field(description="ε: of accuracy, early exit against all loops")
    confidence: float = Field(description="1 − δ: of so many draws of held-out rows, thresholds keep the promise")
    method: str = Field(description="what chose the thresholds")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a text leave there")
    split: str = Field(description="the held-out set, or file")
    reused: bool | None = Field(
        None,
        description="whether these rows had a part in choosing the weights or in judging the artifact (the validation "
        "split), so that the confidence is no longer exact; None: written by an earlier version, which did not say",
    )
    rows: int = Field(description="held-out rows that the thresholds were chosen on")
    lost: int = Field(description="of these: right with all loops, wrong with early exit")
    won: int = Field(description="of these: wrong with all loops, right with early exit")
    p_value: float = Field(description="of these answers or better ones, if the score fell by more than max_drop")
    level: float = Field(description="that p_value had to reach: 1 − confidence over the number of sequences")
    accuracy: float = Field(description="of these rows with early exit")
    full_accuracy: float = Field(description="of these rows with all loops")
    mean_loops: float
    share: dict[str, float] = Field(description="loop → share of the held-out rows that leave there; sums to 1")
    time: ExitTime
    created: str

    @property
    def drop(self) -> float:
        """What early exit costs in accuracy on the held-out rows themselves."""
        return (self.lost - self.won) / self.rows

    def sentence(self) -> str:
        """What is promised, in words."""
        left = ", ".join(f"{share:.1%} after loop {loop}" for loop, share in self.share.items() if share)
        sure = f"{100 * self.confidence:.4g} % confidence"
        said = (
            f"accuracy falls by at most {100 * self.max_drop:g} points with {sure} on texts like the "
            f"{self.rows:,} rows of {self.split} (they left: {left})"
        )
        if not self.reused:
            return said
        return f"{said}; the same rows chose the epoch or judged the artifact, so this is no independent proof"
