"""What early exit of an artifact is promised to cost, the thresholds that keep the promise, and what they were seen to
save. It stands in bundle.json, with the artifact that it is about."""

from __future__ import annotations

from pydantic import Field

from edgeformer.formats.base import Frozen


class ExitTime(Frozen):
    """Time of single texts, each in a call of its own, in turn with early exit and with all loops.

    All loops are run by the step artifact, and by the full graph of the same precision where the bundle has one.
    """

    provider: str = Field(description="what computed")
    host: str = Field(description="the processor")
    threads: int
    rows: int = Field(description="texts that were timed, drawn from the held-out ones")
    early_ms: dict[str, float] = Field(description="mean, p50, p90… as far as the texts can carry them")
    full_ms: dict[str, float] = Field(description="the same texts with all loops")
    ratio: float = Field(description="mean with early exit over mean with all loops of the step artifact")
    full_graph: str | None = Field(None, description="artifact id of the full graph; None: there was none to time")
    full_graph_ms: dict[str, float] = Field({}, description="the same texts through the full graph")
    quickest: str | None = Field(
        None, description="artifact that runs all loops in the shorter time; None: older bundles, which did not compare"
    )
    quickest_ratio: float | None = Field(None, description="mean with early exit over the mean of `quickest`")
    ratio_low: float | None = Field(None, description="95 % interval of `quickest_ratio`, over the texts")
    ratio_high: float | None = None

    @property
    def pays(self) -> bool | None:
        """Whether early exit is faster than the fastest way through all loops; None: it cannot be told."""
        if self.ratio_low is None or self.ratio_high is None or self.ratio_low < 1 <= self.ratio_high:
            return None
        return self.ratio_high < 1

    def sentence(self) -> str:
        """Return what early exit takes against all loops, for people."""
        if self.quickest_ratio is None or self.ratio_low is None or self.ratio_high is None:
            return "its time was not compared with the full graph; run edgeformer exits again"
        means = [self.full_ms["mean"], *([self.full_graph_ms["mean"]] if self.full_graph_ms else [])]
        verdict = {
            True: "early exit is faster",
            False: f"early exit is slower here; use {self.quickest}",
            None: f"whether early exit is faster cannot be told from {self.rows:,} texts",
        }[self.pays]
        return (
            f"one text takes {self.early_ms['mean']:.3g} ms with early exit, {min(means):.3g} ms with all loops of "
            f"{self.quickest} ({self.quickest_ratio:.2f}×, 95 % interval {self.ratio_low:.2f} to "
            f"{self.ratio_high:.2f}): {verdict}"
        )


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
