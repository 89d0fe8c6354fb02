"""Proof of an import: texts are answered by edgeformer and by the library that the model came from, and compared."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.probes import PROBE_PAIRS, PROBE_TEXTS
from edgeformer.data.rows import Text, join_pair
from edgeformer.data.source_folder import quiet_transformers
from edgeformer.models.pretrained.source import Source
from edgeformer.runtimes.session import Array
from edgeformer.system.capability import installed_version
from edgeformer.tasks import TextReader, get_task
from edgeformer.tasks.task import Run, Unanswered

TOLERANCE = 1e-4
"""Largest allowed absolute difference of a number of an answer, relative to the largest number above 1."""
_SHOWN = 80
"""Characters of a text in a message."""
_SENTENCE = "sentence-transformers"
_LIBRARY_LENGTH = 512
"""Longest text that an import reads without --max-length, whatever the library reads."""
Reference = Callable[[Text], Array]
"""Answers a text or a pair alone, with the library's own tokenizer and rules."""


class Compared(NamedTuple):
    """Both answers to a text: logits, probabilities, a vector, scores of spans, or token ids, which are ``exact``."""

    text: Text
    expected: Array
    actual: Array
    exact: bool = False


def prove(library: str, answers: Iterable[Compared], *, allow: bool, tolerance: float = TOLERANCE) -> ImportProof:
    """Compare the answers of edgeformer with those of ``library`` (name and version).

    ``tolerance`` is of a number, relative to the largest number of its expected answer if that exceeds 1.
    Raises InputError with the text of the largest difference; with ``allow`` the import is unproven instead.
    """
    worst, reason, largest, texts = 0.0, None, 0.0, 0
    for text, expected, actual, exact in answers:
        texts += 1
        is_comparable = expected.shape == actual.shape
        error = float(np.abs(expected.astype(np.float64) - actual).max(initial=0.0)) if is_comparable else np.inf
        relative = error / max(1.0, float(np.abs(expected).max(initial=0.0)))
        if exact and error:
            error = relative = np.inf
        largest = max(largest, error)
        if not relative <= tolerance and not relative <= worst:  # NaN differs, too
            worst = relative
            shown = [np.array2string(a.ravel()[:6], precision=4, threshold=6) for a in (expected, actual)]
            joined = join_pair(text)
            place = f"{joined[:_SHOWN]!r}{'…' if len(joined) > _SHOWN else ''}"
            difference = f"by {error:.1e}" if is_comparable else f"in shape, {actual.shape} instead of {expected.shape}"
            difference = "in its tokens" if exact else difference
            reason = (
                f"the answer to {place} differs {difference} from that of {library}: {shown[1]} instead of {shown[0]}"
            )
    if not texts:
        return unproven(f"no probe text has an answer to compare with that of {library}")
    if reason is not None:
        unproven(reason, allowed=allow)
    finite = largest if np.isfinite(largest) else None
    return ImportProof(library=library, texts=texts, largest_difference=finite, tolerance=tolerance, reason=reason)


def unproven(reason: str, *, allowed: bool = True) -> ImportProof:
    """Return the record of an import that is not proven, for this ``reason``. Raises InputError: it is not allowed."""
    if not allowed:
        raise InputError(f"{reason}; import it unproven, and marked so, with --unproven") from None
    return ImportProof(reason=reason)


def prove_encoder(
    source: Source, recipe: Recipe, reader: TextReader, run: Run, progress: Progress, *,
    max_length: int | None, allow: bool,
) -> ImportProof:  # fmt: skip
    """Compare an encoder's answers to the probe texts with those of its library.

    ``reader`` and ``run`` are tokenizer and session of the run; they answer the texts in padded batches.
    ``max_length``: tokens that the user wants texts to be cut to; None: the library decides where its answers are cut.
    Raises InputError: an answer differs, or the library cannot open the model; ``allow`` as for prove().
    """
    with quiet_transformers():
        try:
            library, references = _open_library(source, recipe, max_length)
        except Exception as error:  # the libraries raise any type for a folder that they cannot open
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"transformers cannot open the model to compare its answers: {lines[0]}"
            return unproven(reason, allowed=allow)
        texts: list[Text] = [] if "CrossEncoder" in library else [*PROBE_TEXTS]
        tokenizer = reader.tokenizer
        task = get_task(recipe.task)
        if task.name not in ("embedding", "token-classification") and (
            tokenizer.num_special_tokens_to_add(True) > tokenizer.num_special_tokens_to_add(False)
        ):
            texts += PROBE_PAIRS
        compared = list[Compared]()
        with bar(progress, f"Comparing answers with {library}", len(references) * len(texts), "texts"):
            for prompt, reference in references.items():
                predictor = task.answerer.predictor(reader, recipe.data)
                predictor = predictor if prompt is None else replace(predictor, prompt=prompt)
                window = predictor.read(texts)
                outputs = predictor.run(run, window)
                for place, answer in enumerate(predictor.answers(window, outputs)):
                    rows = np.flatnonzero(window.places == place)
                    if not isinstance(answer, Unanswered) and len(rows) == 1:  # of a long text's windows, none is alone
                        numbers = _numbers(answer, window.encoded, int(rows[0]), outputs["logits"])
                        compared.append(Compared(texts[place], reference(texts[place]), numbers))
                    progress.advance(1)
    return prove(library, compared, allow=allow)


def _numbers(answer: Any, encoded: Any, row: int, logits: Array) -> Array:
    """Return the numbers of an answer: logits and probabilities of labels, a score, a vector, or logits of tokens."""
    if hasattr(answer, "spans"):
        return logits[encoded.offsets[row] : encoded.offsets[row + 1]].ravel()
    if hasattr(answer, "probabilities"):
        return np.concatenate([logits[row], [*answer.probabilities.values()]])
    return np.atleast_1d(answer.vector if hasattr(answer, "vector") else answer.score)


def _open_library(source: Source, recipe: Any, max_length: int | None) -> tuple[str, dict[str | None, Reference]]:
    """Return name and version of the library, and prompt → reference; None: texts as the model answers them."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    folder, cut = str(source.folder), recipe.data.tokens_at_once
    version = installed_version(_SENTENCE)

    def length(limit: int | None) -> int:
        return int(cut if max_length is not None or limit is None or limit > _LIBRARY_LENGTH else limit)

    # 1. CrossEncoder
    named = {"sentence_transformers", "sbert_ce_default_activation_function"}  # CrossEncoder saved the model
    is_cross_encoder = source.settings.model_type == "CrossEncoder" or not named.isdisjoint(source.config)
    if version is not None and is_cross_encoder and recipe.task == "regression":
        from sentence_transformers import CrossEncoder

        scorer: Any = CrossEncoder(folder, device="cpu", model_kwargs={"use_safetensors": True}, **options)
        scorer.max_seq_length = length(scorer.max_seq_length)
        return f"CrossEncoder of {_SENTENCE} {version}", {None: lambda pair: np.atleast_1d(scorer.predict(pair))}
    # 2. SentenceTransformer
    if version is not None and source.pooling is not None and source.pooling == recipe.model.pooling:
        from sentence_transformers import SentenceTransformer

        encoder: Any = SentenceTransformer(
            str(source.files.root), device="cpu", model_kwargs={"use_safetensors": True}, **options
        )
        encoder.max_seq_length = length(encoder.max_seq_length)
        references: dict[str | None, Reference] = {None: partial(encoder.encode, show_progress_bar=False)}
        for kind, prompt in recipe.data.prompts.items():
            if kind == "default" or source.settings.used_prompts.get(kind) != prompt:
                continue  # the default is in front of all texts, and the library does not know a prompt of the user
            references[prompt] = partial(getattr(encoder, f"encode_{kind}"), show_progress_bar=False)
        return f"{_SENTENCE} {version}", references
    # 3. transformers
    import torch
    import transformers

    task = recipe.task
    heads = {"embedding": "", "token-classification": "ForTokenClassification"}
    auto_model: Any = getattr(transformers, f"AutoModel{heads.get(task, 'ForSequenceClassification')}")
    model = auto_model.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **options).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
    max_tokens, names = length(tokenizer.model_max_length), inspect.signature(model.forward).parameters
    is_multi_label = model.config.problem_type == "multi_label_classification"

    def answer(text: Text) -> Array:
        encoding = tokenizer(*([text] if isinstance(text, str) else text), truncation=True, max_length=max_tokens,
                             return_tensors="pt")  # fmt: skip
        with torch.inference_mode():
            outputs = model(**{name: tensor for name, tensor in encoding.items() if name in names}, return_dict=True)
        if task == "embedding":
            states = outputs.last_hidden_state[0].numpy()
            pools = {"cls": states[0], "mean": states.mean(0), "max": states.max(0)}
            vector = pools[recipe.model.pooling]
            return np.asarray(vector / np.linalg.norm(vector) if recipe.model.normalize else vector)
        logits = outputs.logits[0]
        if task == "token-classification":
            return np.asarray(logits.ravel())
        if task == "regression":
            return np.asarray(logits.sigmoid() if source.activation() == "sigmoid" else logits)
        return np.asarray(torch.cat([logits, logits.sigmoid() if is_multi_label else logits.softmax(-1)]))

    return f"transformers {transformers.__version__}", {None: answer}
