"""Language modelling (paper B): the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import FileTokenizer, Probability, TextConfig
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import EarlyExitScore, EvaluationRow, ExitScore, Score
from edgeformer.data.batching import IGNORED, TextRows, text_batch
from edgeformer.data.encoding import Prepared
from edgeformer.data.language import (
    encode_paragraphs,
    encode_text_file,
    prepare_text,
    prepare_text_set,
    set_paragraphs,
    text_file,
    text_set_name,
)
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import Columns, local_text_parts
from edgeformer.data.tokenization import boundary_id, load_language_tokenizer
from edgeformer.tasks.early_exit import Departures, ExitNotes, exit_logits, first_exits
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, ScoreColumn, token_losses, top_probability
from edgeformer.tasks.parity import as_parity
from edgeformer.tasks.scoring import LOGITS_BYTES, cut_batches
from edgeformer.tasks.task import Float64s, Int64s, Origin, Task, TextReader

# The part of a recipe that is language modelling's own.


class LanguageTraining(TrainingConfig):
    """What only language modelling has; the checkpoint of the best validation loss is kept."""

    exit_weight: Probability = Field(
        0.3, description="λ of paper B, eq. 5: loss = (1 − λ) · final + λ · mean over the exits"
    )
    checkpointing: Literal["none", "loop", "cycles"] = Field(
        "none",
        description="recompute activations in the backward pass: loop keeps the input of each loop, "
        "cycles those of the attention and of every two TRM cycles (a little more kept, far less recomputed at once)",
    )
    chunked_loss: bool = Field(
        True, description="compute the vocabulary-sized logits a few hundred tokens at a time, never all at once"
    )
    score_padding: bool = Field(
        False, description="count padding as tokens to predict, as the published code does; reproduces its defect only"
    )


class LanguageRecipe(Recipe):
    """A recipe of paper B: a looped decoder that predicts the next token."""

    task: Literal["language-modeling"]
    data: TextConfig
    training: LanguageTraining
    allow_leak: bool = Field(
        False,
        description="train although the model sees the tokens it is asked to predict; everything made of it says so",
    )

    @model_validator(mode="after")
    def _padding_exists(self) -> Self:
        if self.training.score_padding and self.data.mode == "packed":
            raise ValueError("training.score_padding: packed rows have no padding; use data.mode: paragraphs")
        return self


# Scores of a language model from per-token losses: every exit by itself, and early exit by confidence (paper B).


TokenValues = Mapping[int, NDArray[np.floating]]
"""Loop → one number for each predicted token, [n]."""

_LARGEST_LOSS = 709.0  # exp of more is no float any more, and not JSON


class LanguageScore(Score):
    """Scores of a language model on one set; loss and perplexity are those of the final head, per token."""

    loss: float = Field(description="nats per predicted token: the sum over all of them divided by their number")
    perplexity: float = Field(description="exp(loss)")
    n: int = Field(description="tokens predicted")
    words: int | None = Field(None, description="words of the text, each paragraph's end counted as one")
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


def exit_thresholds(
    exits: Sequence[int], start: float = 0.92, floor: float = 0.80, decay: float = 0.98
) -> dict[int, float]:
    """Loop → smallest top probability that lets a token leave there: max(floor, start · decay^(loop − 1)).

    Paper B, eq. 6; its step counts loops from zero in the released code, so loop 1 has ``start`` itself.
    """
    return {loop: max(floor, start * decay ** (loop - 1)) for loop in exits}


class LanguageMeter(Meter):
    """Adds up the losses of all tokens of a set, batch by batch.

    Args:
        exits: loops after which a head answers, in rising order, the last loop among them.
        notes: is told of every token at every exit; None: nobody asks for other thresholds than paper B's.
    """

    def __init__(self, exits: Sequence[int], notes: ExitNotes | None = None) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must rise, not {list(exits)}")
        self._exits = tuple(exits)
        self._thresholds = exit_thresholds(self._exits[:-1])
        self._tokens = 0
        self._sums = dict.fromkeys(self._exits, 0.0)
        self._early_sum = 0.0
        self._left = dict.fromkeys(self._exits, 0)
        self._with_confidence: bool | None = None
        self._notes = notes

    def add(self, outputs: Mapping[str, NDArray[Any]], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count ``targets`` [B, S] by logits [B, S, V], or by losses and perhaps confidence [B, S]."""
        targets = batch["targets"]
        counted = targets != IGNORED
        if "logits" in outputs:
            self.add_tokens({self._exits[-1]: _losses(outputs["logits"], targets, counted)})
        elif exit_logits(self._exits[-1]) in outputs:
            logits = {loop: outputs[exit_logits(loop)] for loop in self._exits}
            self.add_tokens(
                {loop: _losses(found, targets, counted) for loop, found in logits.items()},
                {loop: _confidence(found, counted) for loop, found in logits.items()},
            )
        else:
            losses = {loop: outputs[f"loss_exit{loop}"][counted].astype(np.float64) for loop in self._exits}
            sure = {
                loop: outputs[f"confidence_exit{loop}"][counted].astype(np.float64)
                for loop in self._exits
                if f"confidence_exit{loop}" in outputs
            }
            cosine = {
                loop: outputs[f"cosine_exit{loop}"][counted] for loop in self._exits if f"cosine_exit{loop}" in outputs
            }
            self.add_tokens(losses, sure or None, cosine)

    def add_tokens(
        self, losses: TokenValues, confidence: TokenValues | None = None, cosine: TokenValues | None = None
    ) -> None:
        """Count tokens: loop → loss in nats, top probability and cosine, of every predicted token, [n] each.

        The last loop's confidence does not matter: whoever is left answers there. Cosines are for the notes alone.

        Raises:
            ValueError: an exit without its losses or confidence, arrays of other lengths, or confidence for some
                batches only.
        """
        counts = {len(losses[loop]) for loop in self._exits if loop in losses}
        if not losses.keys() >= set(self._exits) or len(counts) != 1:
            raise ValueError(f"needs the losses of the same tokens at each of the exits {self._exits}")
        if self._with_confidence not in (None, confidence is not None):
            raise ValueError("either every batch comes with confidence, or none")
        self._with_confidence = confidence is not None
        for loop in self._exits:
            self._sums[loop] += float(np.asarray(losses[loop], dtype=np.float64).sum())
        self._tokens += counts.pop()
        if confidence is None:
            return
        self._leave(losses, confidence)
        if self._notes is not None:
            for loop in self._exits:
                sure = confidence[loop] if loop in confidence else np.ones(len(losses[loop]))
                self._notes.add(loop, losses[loop], sure, cosine=(cosine or {}).get(loop))

    def _leave(self, losses: TokenValues, confidence: TokenValues) -> None:
        everyone = len(losses[self._exits[-1]])
        for loop in self._thresholds:
            if loop not in confidence or len(confidence[loop]) != everyone:
                raise ValueError(f"needs the confidence of the same tokens at exit {loop}")
        nobody = np.zeros(everyone)  # at an exit without a threshold
        sure = np.stack([confidence[loop] if loop in self._thresholds else nobody for loop in self._exits])
        first = first_exits(self._exits, sure, self._thresholds)
        for place, loop in enumerate(self._exits):
            leaving = first == place
            self._early_sum += float(losses[loop][leaving].sum(dtype=np.float64))
            self._left[loop] += int(leaving.sum())

    def score(self, words: int | None = None) -> LanguageScore:
        if not self._tokens:
            raise ValueError("cannot score an empty set")
        exits = {str(loop): _exit_score(self._sums[loop] / self._tokens) for loop in self._exits}
        total, full = self._sums[self._exits[-1]], exits[str(self._exits[-1])]
        early = None
        if self._with_confidence:
            early = EarlyExitScore(
                **_exit_score(self._early_sum / self._tokens).model_dump(),
                mean_loops=sum(loop * count for loop, count in self._left.items()) / self._tokens,
                share={str(loop): count / self._tokens for loop, count in self._left.items()},
                thresholds={str(loop): threshold for loop, threshold in self._thresholds.items()},
            )
        return LanguageScore(
            loss=full.loss,
            perplexity=full.perplexity,
            n=self._tokens,
            words=words,
            word_perplexity=perplexity_of(total / words) if words else None,
            exits=exits,
            early_exit=early,
        )


def perplexity_of(loss: float) -> float:
    """exp(loss), or the largest that is still a number in JSON."""
    return math.exp(min(loss, _LARGEST_LOSS))


def _exit_score(loss: float) -> ExitScore:
    return ExitScore(loss=loss, perplexity=perplexity_of(loss))


def _confidence(logits: NDArray[Any], counted: NDArray[np.bool_]) -> Float64s:
    return np.concatenate([top_probability(row[there]) for row, there in zip(logits, counted, strict=True)])


def _losses(logits: NDArray[Any], targets: NDArray[Any], counted: NDArray[np.bool_]) -> Float64s:
    """Row by row: all counted logits at once would be one more copy of them."""
    rows = zip(logits, targets, counted, strict=True)
    return np.concatenate([token_losses(row[there], wanted[there]) for row, wanted, there in rows])


# Language modelling: data, metric, scoring and golden inputs of models that predict the next token.


LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.002, "int8": 0.02, "int4": 0.06}
"""Share by which the perplexity of an artifact may rise against FP32 on the same tokens."""

GOLDEN_ROWS, GOLDEN_TOKENS = 8, 64
GOLDEN_TOP = 32
"""Logits per golden token that the bundle keeps; all of them would be gigabytes."""

EVALUATION_TOKENS = 8192
"""Tokens that are scored at the same time where a model answers with losses."""


class LanguageModeling(Task):
    """The next token of a text."""

    name: ClassVar[str] = "language-modeling"
    noun: ClassVar[str] = "language model"
    recipe_type: ClassVar[type[Recipe]] = LanguageRecipe
    score_type: ClassVar[type[Score]] = LanguageScore
    metric: ClassVar[Metric] = Metric("perplexity", False, 2, 1.0, None, "--max-perplexity")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "tokens", None),
        ScoreColumn("loss", "loss", 4),
        ScoreColumn("perplexity", "perplexity", 2),
        ScoreColumn("word_perplexity", "per word", 2),
    )
    unit: ClassVar[str] = "tokens"
    phase: ClassVar[Literal["steady", "decode"]] = "decode"
    writes_text: ClassVar[bool] = True
    pipeline_tag: ClassVar[str] = "text-generation"
    use: ClassVar[str] = "generate"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids",), ("targets",)
    score_note: ClassVar[str] = (
        "Loss is in nats per token. Perplexity per token depends on the tokenizer, per word it does not. *By "
        "confidence*: every token leaves at the first exit that is sure enough; loops are a mean, and no time."
    )
    few: ClassVar[str] = "they are few"

    def prepare(self, recipe: LanguageRecipe, cache: Path, progress: Progress) -> Prepared[TextRows]:
        return prepare_text(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def local_data(self, data: TextConfig, folder: Path) -> tuple[TextConfig, list[str]]:
        return local_text_parts(data, folder)

    def set_name(self, data: TextConfig, split: str) -> str:
        return text_set_name(data, split)

    def read_set(self, data: TextConfig, reader: TextReader, split: str, origin: Origin) -> TextRows:
        """Exported graphs take no positions, so that they cannot tell where in a packed row a document starts: for them
        every document is a row of its own. They predict the same tokens from the same context as the packed rows do,
        except where a document goes over the end of a packed row (which forgets the part in front of it) and where it
        is longer than the model reads (which cuts it, and leaves the rest out of ``n``).
        """
        config = self._as_read(data, origin.as_trained)
        return prepare_text_set(config, reader.tokenizer, origin.cache, split, origin.trained_on)

    def read_file(
        self,
        data: TextConfig,
        reader: TextReader,
        path: Path,
        columns: Columns | None = None,
        *,
        as_trained: bool = False,
    ) -> TextRows:
        return encode_text_file(path, self._as_read(data, as_trained), reader.tokenizer, columns)

    def set_texts(self, data: TextConfig, name: str) -> LabelledTexts:
        return LabelledTexts.unlabelled(set_paragraphs(data, name))

    def file_texts(self, data: TextConfig, path: Path) -> LabelledTexts:
        return LabelledTexts.unlabelled(text_file(path, data))

    def encode_rows(self, data: TextConfig, reader: TextReader, texts: LabelledTexts) -> TextRows:
        return encode_paragraphs([str(text) for text in texts.texts], self._as_read(data, False), reader.tokenizer)

    def _as_read(self, data: TextConfig, as_trained: bool) -> TextConfig:
        return data if as_trained else data.model_copy(update={"mode": "paragraphs"})

    def reader(self, tokenizer: Path, data: TextConfig, vocabulary: int) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer))
        found = load_language_tokenizer(config, vocab_size=vocabulary, training_texts=None)
        return TextReader(found, boundary_id(found), vocabulary)

    def batch(
        self, rows: TextRows, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """input_ids, targets and, for packed rows, positions: int64 [B, S]."""
        return text_batch(rows, numbers, pad, pad_to=pad_to)

    def weight(self, batch: Arrays) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def example(self, recipe: LanguageRecipe, rows: int) -> dict[str, Int64s]:
        ids = np.zeros((rows, recipe.data.sequence_length), dtype=np.int64)
        packed = {"positions": ids} if recipe.data.mode == "packed" else {}
        return {"input_ids": ids, "targets": ids, **packed}

    def evaluation_rows(self, longest: int) -> int:
        return max(1, EVALUATION_TOKENS // max(1, longest))

    def call_batches(
        self, rows: TextRows, most: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        tokens = EVALUATION_TOKENS if losses else LOGITS_BYTES // (4 * vocabulary)
        return cut_batches(rows.lengths[:first], most, max(1, tokens))

    def words(self, rows: TextRows, *, cut: bool = False) -> int | None:
        return None if cut and rows.truncated else rows.words

    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None, data: Any = None) -> LanguageMeter:
        return LanguageMeter(exits, notes)

    def row_answers(self, outputs: Arrays, batch: Arrays) -> Array:
        """Summed losses of every row's tokens, [B]: the logits of all rows would not fit."""
        rows = zip(outputs["logits"], batch["targets"], strict=True)
        return np.array([token_losses(row[wanted != IGNORED], wanted[wanted != IGNORED]).sum() for row, wanted in rows])

    def row_figures(self, answers: Array, rows: TextRows, data: TextConfig) -> Float64s:
        """Summed loss in nats and number of predicted tokens: [n, 2]."""
        return np.stack([answers, rows.lengths], axis=1).astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        loss, count = figures.sum(axis=0)
        return perplexity_of(loss / count)

    def exit_thresholds(self, exits: Sequence[int]) -> dict[int, float]:
        return exit_thresholds(exits)

    def departures(self, found: Departures) -> dict[str, float | None]:
        return {"loss": found.loss, "perplexity": perplexity_of(found.loss)}

    def criterion(self, score: LanguageScore, training: LanguageTraining) -> float:
        return score.loss

    def record(self, score: LanguageScore) -> dict[str, float]:
        """val_loss, val_perplexity, val_loss_exitN, and what early exit does."""
        values = {"val_loss": score.loss, "val_perplexity": score.perplexity}
        values |= {f"val_loss_exit{loop}": exit_.loss for loop, exit_ in score.exits.items()}
        if score.early_exit is not None:
            values["early_exit_loss"] = score.early_exit.loss
            values["early_exit_mean_loops"] = score.early_exit.mean_loops
        return values

    def describe(self, score: LanguageScore) -> str:
        exits = ", ".join(f"loop {loop} {exit_.perplexity:.2f}" for loop, exit_ in score.exits.items())
        return f"validation loss {score.loss:.4f}, perplexity per token: {exits}"

    def rows(self, artifact: str, split: str, score: LanguageScore, *, leaks: bool = False) -> list[EvaluationRow]:
        """The last exit's row, then one for each earlier exit."""
        full = EvaluationRow(
            artifact=artifact,
            split=split,
            n=score.n,
            loss=score.loss,
            perplexity=score.perplexity,
            word_perplexity=score.word_perplexity,
            leaks=leaks,
        )
        *earlier, _ = score.by_exit.items()
        changed = (
            {"exit": loop, "loss": exit_.loss, "perplexity": exit_.perplexity, "word_perplexity": None}
            for loop, exit_ in earlier
        )
        return [full, *(full.model_copy(update=update) for update in changed)]

    def lost(
        self, found: LanguageScore, reference: LanguageScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        rise = found.perplexity / reference.perplexity - 1
        bar = LOSS[precision]
        if not rise <= bar:
            return f"perplexity {found.perplexity:.2f} is {rise:.2%} above FP32's; at most {bar:.1%} are allowed"
        return None

    def golden_inputs(self, prepared: Prepared[TextRows], recipe: LanguageRecipe) -> dict[str, Int64s]:
        """Eight evenly spaced windows of the validation text, and the tokens after them; a tiny text is repeated."""
        stream, length = prepared.validation.ids, min(GOLDEN_TOKENS, recipe.data.sequence_length)
        if len(stream) <= length:
            stream = np.resize(stream, length + 1)
        starts = np.linspace(0, len(stream) - length - 1, GOLDEN_ROWS).astype(np.int64)
        windows = stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
        return {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}

    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """Of every exit the 32 largest logits of every token, the log-sum-exp of all, and how widely they spread."""
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
        """See :meth:`Task.golden_score`. Logits [n, V] of flat positions."""
        targets = answers["targets"].reshape(-1)
        wanted = targets if rows is None else targets[rows]
        counted = wanted != IGNORED
        meter = LanguageMeter((exit_,))
        meter.add_tokens({exit_: token_losses(logits[counted], wanted[counted])})
        return meter.score()

    def golden_parity(
        self, golden: Arrays, logits: Array, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        """golden.npz keeps the largest logits of every token and the log-sum-exp of all: a wrong logit shows in one of
        the two, unless it is a small one that became even smaller.

        Args:
            logits: [n, S, V], or [n, s, V] for the last s positions.
        """
        names = [f"{name}_exit{exit_}" for name in ("top_values", "top_indices", "log_sum_exp", "logits_std")]
        missing = [name for name in names if name not in golden]
        if missing:
            raise GoldenError(f"golden.npz holds no {missing[0]!r}; it is of an older version: export the run again")
        values, indices, log_sum, spread = (golden[name] for name in names)
        count, last = logits.shape[-1], logits.shape[1]
        if indices.shape[:1] != logits.shape[:1] or indices.shape[1] < last or indices.max() >= count:
            raise GoldenError(f"golden.npz's tokens {indices.shape} do not fit the logits {logits.shape}")
        values, indices, log_sum = values[:, -last:], indices[:, -last:], log_sum[:, -last:]
        found = np.take_along_axis(logits, indices, axis=-1)
        likeliest = indices[..., 0].reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is reported as such
            losses = token_losses(logits.reshape(-1, count), likeliest).reshape(log_sum.shape)
            error = np.append(np.abs(found - values), np.abs(losses + found[..., 0] - log_sum)[..., None], axis=-1)
        if not np.isfinite(logits).all():
            error = np.full(1, np.nan)
        return as_parity(error, float(spread), logits.argmax(-1).reshape(-1) == likeliest, precision, provider)

    def client_config(self, prepared: Prepared[TextRows], recipe: LanguageRecipe) -> dict[str, object]:
        return {"sequence_length": recipe.data.sequence_length, "boundary_token_id": prepared.pad}

    def tokenizer_config(self, prepared: Prepared[TextRows], recipe: LanguageRecipe) -> dict[str, object]:
        name = prepared.tokenizer.id_to_token(prepared.pad)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": recipe.data.sequence_length,
            "model_input_names": ["input_ids"],
            "bos_token": name,
            "eos_token": name,
        }

    def bundle_facts(self, recipe: LanguageRecipe, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"max_length": recipe.data.sequence_length, "pad_id": int(config["boundary_token_id"])}

    def card_lines(self, recipe: LanguageRecipe) -> list[str]:
        data = recipe.data
        length = f"{data.sequence_length} tokens at a time ({data.mode}); takes at most {recipe.model.max_positions}"
        return [f"**Length:** {length}"]


TASK = LanguageModeling()
