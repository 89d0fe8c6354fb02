"""Tasks of models that predict the next token: running text as rows, and the largest logits as golden answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer, TextConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.data.batching import IGNORED, TextRows, cut_batches, text_batch
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.tokenization import TextBounds, load_language_tokenizer
from edgeformer.tasks.arrays import Array, Arrays, Batch, Float64s, Int64s, RowNumbers
from edgeformer.tasks.metric import as_parity, perplexity_of, token_losses, top_probability
from edgeformer.tasks.task import ReadConfig, RowSource, TextReader

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping
    from edgeformer.tasks.task import Trim

EVALUATION_TOKENS = 8192
"""Tokens per call for models that return losses per token."""
LOGITS_BYTES = 256 * 10**6
"""Maximum size of one call's logits in bytes: 1,273 tokens of a vocabulary of 50,257."""

SCORED_TOKENS = 2048
"""Validation tokens on which export scores artifacts: enough to detect a change of 2%."""

GOLDEN_ROWS, GOLDEN_TOKENS = 8, 64
GOLDEN_TOP = 32
"""Logits per golden token in golden.npz; storing all would take gigabytes."""


class TokenTask(RowSource):
    """A model that predicts the next token and so writes text: its step and decode artifacts keep a cache."""

    budget = "language-modeling"
    unit = "tokens"
    can_write = True
    confidence = staticmethod(top_probability)
    pipeline_tag = "text-generation"
    use = "generate"
    golden_names = ("input_ids",), ("targets",)

    def set_name(self, data: TextConfig, split: str, /) -> str:
        """Return the set that ``split`` names; ``test``, if not a set, means the first test set or validation."""
        tests = [part for part in data.parts if part not in ("train", "validation")]
        return (tests or ["validation"])[0] if split == "test" and "test" not in tests else split

    def prepare(self, recipe: Any, cache: Path, progress: Progress, /) -> Prepared[TextRows]:
        from edgeformer.data.language import prepare_text  # other tasks import this module, too

        return prepare_text(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def set_texts(self, data: TextConfig, name: str, /) -> LabelledTexts:
        from edgeformer.data.language import paragraphs
        from edgeformer.data.splits import unknown_set

        if name not in data.parts:
            raise unknown_set(name, ["validation", *data.parts])
        return LabelledTexts.unlabelled([*paragraphs(data, name)])

    def file_texts(self, data: TextConfig, path: Path, columns: Columns | None = None, /) -> LabelledTexts:
        from edgeformer.data.language import long_paragraphs
        from edgeformer.data.sources import file_source

        if columns is not None and (columns.label or columns.text_pair):
            raise DataError(f"{path}: a language model reads texts only; leave out --label and --pair")
        source = file_source(path, labelled=False, columns=columns)  # plain text, or a table with a text column
        return LabelledTexts.unlabelled([*long_paragraphs(data, (source,), str(path))])

    def sampled_rows(self, texts: LabelledTexts, max_rows: int, max_words: int, /) -> NDArray[np.int64]:
        words = np.cumsum([len(str(text).split()) + 1 for text in texts.texts])
        return np.arange(min(len(texts), int(np.searchsorted(words, max_words)) + 1), dtype=np.int64)

    def reader(self, tokenizer: Any, data: Any, vocabulary: int, described: ReadConfig = dict, /) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
        loaded = load_language_tokenizer(config, vocab_size=vocabulary, training_texts=None, is_padded=True)
        bounds = TextBounds.of(loaded, described())
        return TextReader(loaded, bounds.boundary, vocabulary, bounds)

    def encode_rows(
        self, data: TextConfig, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False
    ) -> TextRows:
        """Encode paragraphs: packed as in training, or one row per document for exported graphs.

        Exported graphs have no input for positions, so they cannot know where a document starts in a packed row. One
        row per document predicts the same tokens from the same context, with two exceptions: a document that crosses
        the end of a packed row (training forgets the part in front), and a document that is longer than the model
        reads (its rest is not in ``n``).
        """
        from edgeformer.data.language import encode_paragraphs

        config = data if as_trained else data.model_copy(update={"mode": "paragraphs"})
        plain = PlainText(reader.tokenizer, reader.bounds)
        return encode_paragraphs([str(text) for text in texts.texts], config, plain)

    def batch(self, rows: TextRows, numbers: RowNumbers, pad: int, *, pad_to: int | None = None) -> Batch:
        """Return input_ids, targets and, for packed rows, positions: int64 [B, S]."""
        return text_batch(rows, numbers, pad, pad_to=pad_to)

    def example(self, recipe: Any, rows: int) -> Batch:
        names = ["input_ids", "targets", *(["positions"] if recipe.data.mode == "packed" else [])]
        return {name: np.zeros((rows, recipe.data.tokens_at_once), dtype=np.int64) for name in names}

    def rows_at_once(self, longest: int) -> int:
        return max(1, EVALUATION_TOKENS // max(1, longest))

    def call_batches(
        self, rows: TextRows, max_rows: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        max_tokens = EVALUATION_TOKENS if losses else max(1, LOGITS_BYTES // (4 * vocabulary))
        return cut_batches(rows.lengths[:first], max_rows, max_tokens)

    def judged_rows(self, rows: TextRows) -> int:
        return min(len(rows), int(np.searchsorted(np.cumsum(rows.lengths), SCORED_TOKENS)) + 1)

    def trim(self, data: TextConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping) -> Trim:
        raise InputError(
            "--vocab-trim: only the vocabulary of a classifier or embedding model can be trimmed, because a language "
            "model predicts its whole vocabulary; leave it out"
        )

    def row_answers(self, outputs: Arrays, batch: Arrays, data: Any) -> Array:
        """Return the summed loss of each row, [B]."""
        rows = zip(outputs["logits"], batch["targets"], batch["targets"] != IGNORED, strict=True)
        return np.array([token_losses(logits[mask], targets[mask]).sum() for logits, targets, mask in rows])

    def row_figures(self, answers: Array, rows: TextRows, data: TextConfig) -> Float64s:
        """Return summed loss in nats and number of predicted tokens: [n, 2]."""
        return np.stack([answers, rows.lengths], axis=1).astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        loss, count = figures.sum(axis=0)
        return perplexity_of(loss / count)

    def golden_inputs(self, prepared: Prepared[TextRows], recipe: Any) -> Batch:
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

    def client_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        return {"sequence_length": recipe.data.sequence_length, "boundary_token_id": prepared.pad}

    def tokenizer_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        boundary = prepared.tokenizer.id_to_token(prepared.pad)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": recipe.data.sequence_length,
            "model_input_names": ["input_ids"], "bos_token": boundary, "eos_token": boundary,
        }  # fmt: skip

    def card_lines(self, recipe: Any) -> list[str]:
        data = recipe.data
        length = f"{data.sequence_length} tokens at a time ({data.mode}); takes at most {recipe.model.max_positions}"
        return [f"**Length:** {length}"]
