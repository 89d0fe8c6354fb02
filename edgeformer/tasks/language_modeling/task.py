"""Language modelling: data, metric, scoring and golden inputs of models that predict the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import IGNORED, TextRows, text_batch
from edgeformer.data.encoding import Prepared
from edgeformer.data.folders import local_text_parts
from edgeformer.data.labelled import LabelledTexts
from edgeformer.data.language import (
    encode_paragraphs,
    encode_text_file,
    prepare_text,
    prepare_text_set,
    set_paragraphs,
    text_file,
    text_set_name,
)
from edgeformer.data.sources import Columns
from edgeformer.data.tokenization import boundary_id, load_language_tokenizer
from edgeformer.formats.data_config import FileTokenizer, TextConfig
from edgeformer.formats.golden import GoldenError
from edgeformer.formats.manifest import Parity, Precision
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import EvaluationRow, Score
from edgeformer.tasks.early_exit import Departures, ExitNotes
from edgeformer.tasks.language_modeling.recipe import LanguageRecipe, LanguageTraining
from edgeformer.tasks.language_modeling.scoring import (
    LanguageMeter,
    LanguageScore,
    exit_thresholds,
    perplexity_of,
)
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn, token_losses
from edgeformer.tasks.parity import as_parity
from edgeformer.tasks.running import LOGITS_BYTES, cut_batches
from edgeformer.tasks.task import Float64s, Int64s, Origin, Task, TextReader

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
