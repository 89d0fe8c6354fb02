"""Scoring a language model: loss per predicted token, of an artifact's last exit or of every exit of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.data.batching import TextRows
from edgeformer.data.language import encode_text_file, prepare_text_set
from edgeformer.formats.data_config import TextConfig
from edgeformer.formats.progress import Progress
from edgeformer.formats.scores import EvaluationRow
from edgeformer.machine.host import cpu_name
from edgeformer.stages.evaluating.subject import TORCH, Subject
from edgeformer.tasks import task_named
from edgeformer.tasks.running import Calls, score_calls


@dataclass
class Texts:
    """The set that a model is scored on, as rows of tokens; read when they are asked for, and once."""

    subject: Subject
    config: TextConfig
    split: str = "test"
    file: Path | None = None
    cache: Path | None = None
    _known: dict[str, TextRows] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The set's own name: ``test`` is the set of that name, else the first test set, else validation."""
        if self.file is not None:
            return self.file.name
        tests = [part for part in self.config.parts if part not in ("train", "validation")]
        if self.split == "test" and "test" not in tests:
            return tests[0] if tests else "validation"
        return self.split

    def rows(self, artifact: str) -> TextRows:
        """The rows that an artifact can read.

        Exported graphs take no positions, so that they cannot tell where in a packed row a document starts: for them
        every document is a row of its own. They predict the same tokens from the same context as the packed rows
        do, except where a document goes over the end of a packed row (which forgets the part in front of it) and
        where it is longer than the model reads (which cuts it, and leaves the rest out of ``n``).
        """
        mode = self.config.mode if artifact == TORCH else "paragraphs"
        if mode not in self._known:
            config, tokenizer = self.config.model_copy(update={"mode": mode}), self.subject.tokenizer
            if self.file is not None:
                self._known[mode] = encode_text_file(self.file, config, tokenizer)
            else:
                trained_on = self.subject.trained_on
                self._known[mode] = prepare_text_set(config, tokenizer, self.cache, self.split, trained_on)
        return self._known[mode]


def score_texts(texts: Texts, artifact: str, most: int, progress: Progress) -> list[EvaluationRow]:
    """The row of an artifact; of ``torch`` one for each exit, the last one first.

    Args:
        most: rows per batch at the most.
    """
    subject, rows = texts.subject, texts.rows(artifact)
    exits = subject.exits if artifact == TORCH else (subject.loop_of(artifact),)
    task = task_named("language-modeling")
    batches = task.call_batches(rows, most, subject.vocabulary, losses=artifact == TORCH)
    meter = task.meter(exits)
    calls = Calls(task, rows, subject.pad, batches)
    progress.start(f"Scoring {artifact} on {texts.name}", len(rows), "rows")
    try:
        with subject.open(artifact) as session:
            warm_up = artifact != TORCH  # of the weights themselves no time is told
            seconds = score_calls(session.run, calls, meter, warm_up=warm_up, advance=progress.advance)
            provider = session.provider
    finally:
        progress.finish()
    score = meter.score(task.words(rows, cut=True))
    found = task.rows(artifact, texts.name, score, leaks=subject.leaks)
    if exits != subject.exits and exits[0] != subject.exits[-1]:
        found = [row.model_copy(update={"exit": exits[0]}) for row in found]
    if artifact == TORCH:  # its time would be that of every exit's head, and of the losses
        return found
    timed = {
        "ms_per_sample": 1000 * seconds / len(rows),
        "batch": max(map(len, batches)),
        "provider": provider,
        "host": cpu_name(),
    }
    return [row.model_copy(update=timed) for row in found]
