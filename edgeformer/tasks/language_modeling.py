"""Language modelling (paper B): the next token of a text."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import Probability, TextConfig
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import DistilledTraining, Recipe, TrainingConfig
from edgeformer.artifacts.scores import EarlyExitScore, EvaluationRow, ExitScore, Score
from edgeformer.data.batching import IGNORED
from edgeformer.tasks.arrays import Array, Arrays, Float64s, Floats, Int64s
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords, exit_logits, first_exits
from edgeformer.tasks.metric import Meter, Metric, ScoreColumn, perplexity_of, token_losses, top_probability
from edgeformer.tasks.tokens import TokenTask


class LanguageTraining(DistilledTraining, TrainingConfig):
    """Training settings of language modelling. The checkpoint with the best validation loss is kept."""

    exit_weight: Probability = Field(
        0.3, description="λ of paper B, eq. 5: loss = (1 − λ) · final + λ · mean over the exits"
    )
    checkpointing: Literal["none", "loop", "cycles"] = Field(
        "none",
        description="recompute activations in the backward pass instead of storing them: loop stores the input of each "
        "loop; cycles also those of attention and of every two TRM cycles, so that less is recomputed at once",
    )
    chunked_loss: bool = Field(
        True, description="compute logits and loss for a few hundred tokens at a time, which saves memory"
    )
    score_padding: bool = Field(
        False, description="include padding in the loss, to reproduce a defect of the published code"
    )


class LanguageRecipe(Recipe):
    """Recipe of paper B: a looped decoder that predicts the next token."""

    task: Literal["language-modeling"]
    data: TextConfig
    training: LanguageTraining
    allow_leak: bool = Field(
        False,
        description="train although the model sees the tokens that it predicts; all its artifacts carry a warning",
    )

    @model_validator(mode="after")
    def _settings_have_effect(self) -> Self:
        if self.training.score_padding and self.data.mode == "packed":
            raise ValueError("training.score_padding: packed rows have no padding; use data.mode: paragraphs")
        if self.training.distillation.states:
            raise ValueError("training.distillation.states: exists for pretrained encoders only; remove it")
        return self


TokenValues = Mapping[int, Floats]
"""Loop → one number for each predicted token, [n]."""


class LanguageScore(Score):
    """Scores of a language model on one set; loss and perplexity are those of the final head, per token."""

    loss: float = Field(description="mean cross-entropy per predicted token, nats")
    perplexity: float = Field(description="exp(loss)")
    n: int = Field(description="predicted tokens")
    words: int | None = Field(None, description="words of the text, plus one per paragraph end")
    word_perplexity: float | None = Field(
        None, description="exp(total nats / words): comparable across tokenizers and with published tables"
    )
    exits: dict[str, ExitScore] = Field(description="loop → score of the exit after it; the last loop included")
    early_exit: EarlyExitScore | None = None

    @property
    def by_exit(self) -> dict[int, ExitScore]:
        return {loop: self.exits[str(loop)] for loop in sorted(map(int, self.exits))}

    @property
    def leaving_early(self) -> EarlyExitScore | None:
        return self.early_exit


class LanguageMeter(Meter):
    """Sums the losses of all tokens at the exits (ascending order); ``records`` receives every token at every exit."""

    def __init__(self, exits: Sequence[int], records: ExitRecords | None = None) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must be increasing, not {list(exits)}")
        self._exits = tuple(exits)
        self._thresholds = EarlyExit().thresholds(self._exits)
        self._tokens = 0
        self._loss_sums = dict.fromkeys(self._exits, 0.0)
        self._early_loss_sum = 0.0
        self._exit_counts = dict.fromkeys(self._exits, 0)
        self._has_confidence = False
        self._records = records

    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count ``targets`` [B, S] by logits [B, S, V], or by losses and optional confidence and cosine [B, S]."""
        targets = batch["targets"]
        counted = targets != IGNORED
        names = (
            {"logits": self._exits[-1]} if "logits" in outputs else {exit_logits(loop): loop for loop in self._exits}
        )
        losses: dict[int, Float64s] = {}
        confidence: dict[int, Float64s] = {}
        cosine: dict[int, Array] = {}
        for name, loop in names.items():
            if name in outputs:  # row by row: a mask over all logits would copy them
                rows = [*zip(outputs[name], targets, counted, strict=True)]
                losses[loop] = np.concatenate([token_losses(logits[mask], row[mask]) for logits, row, mask in rows])
                if name != "logits":
                    confidence[loop] = np.concatenate([top_probability(logits[mask]) for logits, _, mask in rows])
                continue
            losses[loop] = outputs[f"loss_exit{loop}"][counted].astype(np.float64)
            if f"confidence_exit{loop}" in outputs:
                confidence[loop] = outputs[f"confidence_exit{loop}"][counted].astype(np.float64)
            if f"cosine_exit{loop}" in outputs:
                cosine[loop] = outputs[f"cosine_exit{loop}"][counted]
        self.add_tokens(losses, confidence or None, cosine)

    def add_tokens(
        self, losses: TokenValues, confidence: TokenValues | None = None, cosine: TokenValues | None = None
    ) -> None:
        """Count predicted tokens: loop → loss in nats, top probability and cosine of every token, [n] each."""
        self._has_confidence, count = confidence is not None, len(losses[self._exits[-1]])
        self._tokens += count
        for loop in self._exits:
            self._loss_sums[loop] += float(np.asarray(losses[loop], dtype=np.float64).sum())
        if confidence is None:
            return
        compared = np.stack([confidence[loop] if loop in self._thresholds else np.zeros(count) for loop in self._exits])
        first = first_exits(self._exits, compared, self._thresholds)
        for place, loop in enumerate(self._exits):
            exiting = first == place
            self._early_loss_sum += float(losses[loop][exiting].sum(dtype=np.float64))
            self._exit_counts[loop] += int(exiting.sum())
            if self._records is not None:
                recorded = confidence.get(loop, np.ones(count))
                self._records.add(loop, losses[loop], recorded, cosine=(cosine or {}).get(loop))

    def score(self, words: int | None = None) -> LanguageScore:
        if not self._tokens:
            raise ValueError("cannot score an empty set")
        losses = {loop: total / self._tokens for loop, total in self._loss_sums.items()}
        exits = {str(loop): ExitScore(loss=loss, perplexity=perplexity_of(loss)) for loop, loss in losses.items()}
        last, early, early_loss = self._exits[-1], None, self._early_loss_sum / self._tokens
        if self._has_confidence:
            early = EarlyExitScore(
                loss=early_loss, perplexity=perplexity_of(early_loss),
                mean_loops=sum(loop * count for loop, count in self._exit_counts.items()) / self._tokens,
                share={str(loop): count / self._tokens for loop, count in self._exit_counts.items()},
                thresholds={str(loop): threshold for loop, threshold in self._thresholds.items()},
            )  # fmt: skip
        return LanguageScore(
            loss=exits[str(last)].loss, perplexity=exits[str(last)].perplexity, n=self._tokens, words=words,
            word_perplexity=perplexity_of(self._loss_sums[last] / words) if words else None, exits=exits,
            early_exit=early,
        )  # fmt: skip


MAX_PERPLEXITY_RISE: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.002, "int8": 0.02, "int4": 0.06}
"""Largest allowed relative rise of an artifact's perplexity against FP32 on the same tokens."""


class LanguageModeling(TokenTask):
    """The next token of a text."""

    name = "language-modeling"
    noun = "language model"
    recipe_type = LanguageRecipe
    score_type = LanguageScore
    metric = Metric("perplexity", "perplexity", 2, higher_is_better=False, lowest=1.0, highest=None)
    columns = (
        ScoreColumn("n", "tokens", None), ScoreColumn("loss", "loss", 4), metric,
        ScoreColumn("word_perplexity", "per word", 2),
    )  # fmt: skip
    exit_schedule = EarlyExit()
    score_note = (
        "Loss is in nats per token. Perplexity per token depends on the tokenizer, perplexity per word does not. *By "
        "confidence*: every token exits at the first loop whose confidence reaches the threshold; loops are a mean "
        "and say nothing about time."
    )
    golden_note = "too few tokens to compare models"

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> LanguageMeter:
        return LanguageMeter(exits, records)

    def record(self, score: LanguageScore) -> dict[str, float]:
        values = super().record(score) | {f"val_loss_exit{loop}": each.loss for loop, each in score.by_exit.items()}
        if (early := score.early_exit) is not None:
            values |= {"early_exit_loss": early.loss, "early_exit_mean_loops": early.mean_loops}
        return values

    def describe(self, score: LanguageScore) -> str:
        exits = ", ".join(f"loop {loop} {exit_.perplexity:.2f}" for loop, exit_ in score.by_exit.items())
        return f"validation loss {score.loss:.4f}, perplexity per token: {exits}"

    def evaluation_rows(self, artifact: str, split: str, score: LanguageScore, *, leaks: bool) -> list[EvaluationRow]:
        (full,) = super().evaluation_rows(artifact, split, score, leaks=leaks)
        earlier = list(score.by_exit.items())[:-1]
        changes = ({"exit": loop, **exit_.model_dump(), "word_perplexity": None} for loop, exit_ in earlier)
        return [full, *(full.model_copy(update=update) for update in changes)]

    def lost(
        self, score: LanguageScore, reference: LanguageScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        rise, limit = score.perplexity / reference.perplexity - 1, MAX_PERPLEXITY_RISE[precision]
        if rise <= limit:  # false for NaN
            return None
        return f"perplexity {score.perplexity:.2f} is {rise:.2%} above FP32; the limit is {limit:.1%}"

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> LanguageScore:
        """Score logits [n, V] of flat positions."""
        targets = answers["targets"].reshape(-1)
        targets = targets if rows is None else targets[rows]
        counted = targets != IGNORED
        meter = LanguageMeter((exit_,))
        meter.add_tokens({exit_: token_losses(logits[counted], targets[counted])})
        return meter.score()


TASK = LanguageModeling()
