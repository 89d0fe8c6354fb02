"""Language modelling (paper B): the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import Probability, TextConfig
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import DistilledTraining, Recipe, TrainingConfig
from edgeformer.artifacts.scores import EarlyExitScore, ExitScore, Score
from edgeformer.data.batching import IGNORED, TextRows, text_batch
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.language import encode_paragraphs, paragraphs, prepare_text, text_file
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import Columns
from edgeformer.data.splits import unknown_set
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords, exit_logits, first_exits
from edgeformer.tasks.metric import (
    Array,
    Arrays,
    Meter,
    Metric,
    ScoreColumn,
    as_parity,
    perplexity_of,
    token_losses,
    top_probability,
)
from edgeformer.tasks.task import Float64s, Int64s, Task, TextReader


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


TokenValues = Mapping[int, NDArray[np.floating]]
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
                loss=early_loss,
                perplexity=perplexity_of(early_loss),
                mean_loops=sum(loop * count for loop, count in self._exit_counts.items()) / self._tokens,
                share={str(loop): count / self._tokens for loop, count in self._exit_counts.items()},
                thresholds={str(loop): threshold for loop, threshold in self._thresholds.items()},
            )
        return LanguageScore(
            loss=exits[str(last)].loss,
            perplexity=exits[str(last)].perplexity,
            n=self._tokens,
            words=words,
            word_perplexity=perplexity_of(self._loss_sums[last] / words) if words else None,
            exits=exits,
            early_exit=early,
        )


MAX_PERPLEXITY_RISE: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.002, "int8": 0.02, "int4": 0.06}
"""Largest allowed relative rise of an artifact's perplexity against FP32 on the same tokens."""

GOLDEN_ROWS, GOLDEN_TOKENS = 8, 64
GOLDEN_TOP = 32
"""Logits per golden token in golden.npz; storing all would take gigabytes."""


class LanguageModeling(Task):
    """The next token of a text."""

    name = "language-modeling"
    noun = "language model"
    recipe_type = LanguageRecipe
    score_type = LanguageScore
    metric = Metric("perplexity", False, 2, 1.0, None, "--max-perplexity")
    columns = (
        ScoreColumn("n", "tokens", None),
        ScoreColumn("loss", "loss", 4),
        ScoreColumn("perplexity", "perplexity", 2),
        ScoreColumn("word_perplexity", "per word", 2),
    )
    unit = "tokens"
    writes_text = True
    can_trim = False
    phase = "decode"
    exit_schedule = EarlyExit()
    pipeline_tag = "text-generation"
    use = "generate"
    golden_names = ("input_ids",), ("targets",)
    length_key = "sequence_length"
    pad_key = "boundary_token_id"
    score_note = (
        "Loss is in nats per token. Perplexity per token depends on the tokenizer, perplexity per word does not. *By "
        "confidence*: every token exits at the first loop whose confidence reaches the threshold; loops are a mean "
        "and say nothing about time."
    )
    golden_note = "too few tokens to compare models"

    def set_name(self, data: TextConfig, split: str, /) -> str:
        """Return the set that ``split`` names; ``test``, if not a set, means the first test set or validation."""
        tests = [part for part in data.parts if part not in ("train", "validation")]
        return (tests or ["validation"])[0] if split == "test" and "test" not in tests else split

    def prepare(self, recipe: LanguageRecipe, cache: Path, progress: Progress) -> Prepared[TextRows]:
        return prepare_text(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def set_texts(self, data: TextConfig, name: str) -> LabelledTexts:
        if name not in data.parts:
            raise unknown_set(name, ["validation", *data.parts])
        return LabelledTexts.unlabelled([*paragraphs(data, name)])

    def file_texts(self, data: TextConfig, path: Path, columns: Columns | None = None) -> LabelledTexts:
        return LabelledTexts.unlabelled(text_file(path, data, columns))

    def encode_rows(
        self, data: TextConfig, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False
    ) -> TextRows:
        """Encode paragraphs: packed as in training, or one row per document for exported graphs.

        Exported graphs have no input for positions, so they cannot know where a document starts in a packed row. One
        row per document predicts the same tokens from the same context, with two exceptions: a document that crosses
        the end of a packed row (training forgets the part in front), and a document that is longer than the model
        reads (its rest is not in ``n``).
        """
        config = data if as_trained else data.model_copy(update={"mode": "paragraphs"})
        plain = PlainText(reader.tokenizer, reader.bounds)
        return encode_paragraphs([str(text) for text in texts.texts], config, plain)

    def batch(
        self, rows: TextRows, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """Return input_ids, targets and, for packed rows, positions: int64 [B, S]."""
        return text_batch(rows, numbers, pad, pad_to=pad_to)

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> LanguageMeter:
        return LanguageMeter(exits, records)

    def row_figures(self, answers: Array, rows: TextRows, data: TextConfig) -> Float64s:
        """Return summed loss in nats and number of predicted tokens: [n, 2]."""
        return np.stack([answers, rows.lengths], axis=1).astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        loss, count = figures.sum(axis=0)
        return perplexity_of(loss / count)

    def lost(
        self, score: LanguageScore, reference: LanguageScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        rise, limit = score.perplexity / reference.perplexity - 1, MAX_PERPLEXITY_RISE[precision]
        if rise <= limit:  # false for NaN
            return None
        return f"perplexity {score.perplexity:.2f} is {rise:.2%} above FP32; the limit is {limit:.1%}"

    def golden_inputs(self, prepared: Prepared[TextRows], recipe: LanguageRecipe) -> dict[str, Int64s]:
        """Return 8 evenly spaced windows of the validation text and the tokens after them; tiny texts are repeated."""
        stream, length = prepared.validation.ids, min(GOLDEN_TOKENS, recipe.data.sequence_length)
        if len(stream) <= length:
            stream = np.resize(stream, length + 1)
        starts = np.linspace(0, len(stream) - length - 1, GOLDEN_ROWS).astype(np.int64)
        windows = stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
        return {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}

    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """Return the 32 largest logits of every token, log-sum-exp and standard deviation of all logits, per exit."""
        golden: dict[str, Array] = {}
        for loop, logits in references.items():
            count = min(GOLDEN_TOP, logits.shape[-1])
            top = np.argpartition(-logits, count - 1, axis=-1)[..., :count]
            order = np.argsort(-np.take_along_axis(logits, top, axis=-1), axis=-1, kind="stable")
            indices = np.take_along_axis(top, order, axis=-1)
            largest = logits.max(-1, keepdims=True)
            log_sum = largest[..., 0] + np.log(np.exp(logits - largest).sum(-1))
            golden[f"top_values_exit{loop}"] = np.take_along_axis(logits, indices, axis=-1)
            golden[f"top_indices_exit{loop}"] = indices.astype(np.int64)
            golden[f"log_sum_exp_exit{loop}"] = log_sum.astype(np.float32)
            golden[f"logits_std_exit{loop}"] = np.asarray(logits.std())
        return golden

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

    def golden_parity(
        self, golden: Arrays, logits: Array, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        """Compare the largest logits and the log-sum-exp of every token with golden.npz.

        A wrong logit changes one of the two, unless a small logit became even smaller. ``logits``: [n, ≤ S, V].
        """
        names = [f"{name}_exit{exit_}" for name in ("top_values", "top_indices", "log_sum_exp", "logits_std")]
        missing = [name for name in names if name not in golden]
        if missing:
            raise GoldenError(
                f"golden.npz has no {missing[0]!r}, because an older version wrote it; export the run again"
            )
        values, indices, log_sum, spread = (golden[name] for name in names)
        count, last = logits.shape[-1], logits.shape[1]
        if indices.shape[:1] != logits.shape[:1] or indices.shape[1] < last or indices.max() >= count:
            raise GoldenError(f"golden.npz's tokens {indices.shape} do not fit the logits {logits.shape}")
        values, indices, log_sum = values[:, -last:], indices[:, -last:], log_sum[:, -last:]
        top_logits = np.take_along_axis(logits, indices, axis=-1)
        likeliest = indices[..., 0].reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):  # logits that are not finite are reported below
            losses = token_losses(logits.reshape(-1, count), likeliest).reshape(log_sum.shape)
            log_sum_error = np.abs(losses + top_logits[..., 0] - log_sum)
            error = np.append(np.abs(top_logits - values), log_sum_error[..., None], axis=-1)
        if not np.isfinite(logits).all():
            error = np.full(1, np.nan)
        return as_parity(error, float(spread), logits.argmax(-1).reshape(-1) == likeliest, precision, provider)

    def card_lines(self, recipe: LanguageRecipe) -> list[str]:
        data = recipe.data
        length = f"{data.sequence_length} tokens at a time ({data.mode}); takes at most {recipe.model.max_positions}"
        return [f"**Length:** {length}"]


TASK = LanguageModeling()
