"""What writes: a step or decode artifact of a bundle, without torch, or the run's own weights in torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.checkpoint_session import computed_by
from edgeformer.data.encoding import PlainText, require_unicode
from edgeformer.run import TORCH, Location, Run
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, providers_asked
from edgeformer.runtimes.decoder import Decoder
from edgeformer.tasks.language_modeling import exit_thresholds
from edgeformer.tasks.metric import top_probability
from edgeformer.tasks.sampling import Sampler, Sampling

_PRECISIONS = ("fp32", "fp16", "int8", "int4")
_WRITING = ("decode", "step")


@dataclass(frozen=True)
class Author:
    """A language model that can write, before anything heavy of it is opened.

    Attributes:
        location: what was asked for.
        model: the bundle, or the run.
        exits: loops after which it can answer; the last one is the last loop.
        max_positions: the longest text it takes.
        trained_length: tokens that it read at once in training.
        wanted: the artifact that was asked for; None: the best of those that fit.
        runtime: what ``--runtime`` names; None: the artifact's usual one, or for a run's weights torch.
    """

    location: Location
    model: Bundle | Run
    exits: tuple[int, ...]
    max_positions: int
    trained_length: int
    wanted: str | None = None
    runtime: str | None = None

    def open(self, exits: Collection[int]) -> tuple[str, Decoder[Any]]:
        """The id of what writes, and a text that answers after those loops.

        Raises:
            InputError: the artifact that was asked for cannot answer there.
            ArtifactError: nothing that can was exported, or it is damaged.
            MissingDependencyError: what it needs is not installed.
        """
        if isinstance(self.model, Run):
            if self.runtime is not None and not computed_by(self.runtime):
                raise InputError(f"--runtime {self.runtime}: computes no run's own weights; that is torch")
            return TORCH, self.model.decoder(self.runtime)
        chosen = self._pick(self.model, all_loops=set(exits) == {self.exits[-1]})
        return chosen.id, self.model.decoder(chosen, exits, OpenOptions(self._provider(chosen)))

    def _provider(self, chosen: ArtifactManifest) -> str | None:
        if self.runtime is None:
            return None
        if self.runtime == ALL_RUNTIMES:
            raise InputError(f"--runtime {self.runtime}: one of them writes; name it")
        providers = providers_asked(chosen, self.runtime)
        if not providers:
            raise InputError(f"--runtime {self.runtime}: does not open {chosen.id}")
        return providers[0]

    def _pick(self, bundle: Bundle, *, all_loops: bool) -> ArtifactManifest:
        """The artifact that was asked for, or the best that answers after all loops (or after others too)."""
        name, with_run, command = bundle.name, self.location.run is not None, _command(self.location)
        able = writing(bundle)
        if self.wanted is None:
            for artifact in able:
                if all_loops or artifact.role == "step":
                    return artifact
            instead = f", or write with --artifact {TORCH}" if with_run else ""
            raise ArtifactError(
                f"{name}: --exit and --confidence need the step graphs, which its bundle does not hold; make them "
                f"with: {command}{instead}"
            )
        # Engines write where they are asked for: they do not run everywhere.
        engines = [artifact for artifact in bundle.built(*_WRITING) if not artifact.is_graph]
        listed = ", ".join([*(one.id for one in (*able, *engines)), *([TORCH] if with_run else [])]) or "nothing"
        chosen = next((artifact for artifact in bundle.artifacts if artifact.id == self.wanted), None)
        if chosen is None:
            raise InputError(f"--artifact {self.wanted}: {name} writes with {listed}")
        if chosen.role not in _WRITING:
            raise InputError(
                f"--artifact {self.wanted}: reads whole texts and keeps nothing of earlier tokens; {name} writes "
                f"with {listed}; missing ones are made with: {command}"
            )
        if chosen.role == "decode" and not all_loops:
            raise InputError(
                f"--artifact {self.wanted}: takes all loops for every token; --exit and --confidence need a step "
                f"artifact ({name} writes with {listed}; missing ones are made with: {command})"
            )
        return chosen


def find_author(location: Location, artifact: str | None = None, runtime: str | None = None) -> Author:
    """The bundle where it holds graphs that write (or ``artifact`` is one of it), else the run.

    Args:
        location: the run, the bundle, or both.
        artifact: an artifact's id, or ``torch``; None: the one that ``location`` names, else FP32 before FP16.
        runtime: what shall compute it, as ``--runtime`` names it.

    Raises:
        InputError: not a language model, one that sees later tokens, or there is no such artifact.
        ArtifactError: an unfinished or damaged run, or a bundle by itself whose graphs cannot write.
    """
    wanted = artifact or location.artifact
    if wanted != TORCH and location.bundle is not None:
        bundle = location.open_bundle()
        _require_writer(location, bundle)
        if wanted is not None or writing(bundle):
            manifest = bundle.manifest
            most = manifest.max_positions or manifest.max_length
            return Author(location, bundle, manifest.exits, most, manifest.max_length, wanted, runtime)
    if wanted not in (None, TORCH):
        raise InputError(f"--artifact {wanted}: {location.name} has no bundle; make one with: {_command(location)}")
    if location.run is None:
        raise ArtifactError(
            f"{location.bundle}: holds no graphs that write text; export its run again with: {_command(location)}"
        )
    run = location.open_run()
    _require_writer(location, run)
    run.require_finished()
    recipe = run.recipe
    return Author(location, run, run.exits, recipe.model.max_positions, recipe.data.tokens_at_once, None, runtime)


def writing(bundle: Bundle) -> list[ArtifactManifest]:
    """Artifacts that keep what they computed for earlier tokens, those to prefer first: FP32, then the faster."""
    found = [artifact for artifact in bundle.built(*_WRITING) if artifact.is_graph and not artifact.trimmed]
    return sorted(found, key=lambda a: (_PRECISIONS.index(a.precision), _WRITING.index(a.role)))


def _require_writer(location: Location, model: Bundle | Run) -> None:
    if not model.task.writes_text:
        name = location.name
        text = " TEXT" if model.task.reads_text else ""
        raise InputError(
            f"{name}: is a {model.task.noun} and writes no text; use: edgeformer {model.task.use} {name}{text}"
        )
    if model.leaks:
        raise InputError(
            f"{location.name}: leaks future tokens, so it cannot write: a token's state depends on the tokens after "
            "it, which are not there yet, and nothing computed for it could be kept. Train it with model.causal: true"
        )


def _command(location: Location) -> str:
    return f"edgeformer export {location.argument} --exit all"


# generate: a prompt becomes a text, token after token.


_INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character (yet)."""

_CONTEXT = 8
"""Earlier tokens that are decoded together with new ones: enough for a character's bytes and a word's first space."""


USUAL_TOKENS = 64
"""That are written at most where nobody says how many."""


@dataclass(frozen=True)
class EarlyExit:
    """Leave at the first exit whose top probability is at least max(floor, start · decay^(loop − 1)) (paper B, eq. 6).

    Raises:
        InputError: a value out of its range.
    """

    start: float = 0.92
    floor: float = 0.80
    decay: float = 0.98

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.start), ("floor", self.floor), ("decay", self.decay)):
            if not 0 <= value <= 1:
                raise InputError(f"{name} must be in 0…1, not {value}")


@dataclass(frozen=True)
class GenerateOptions:
    """How much is written, how, and with what. Without ``exit`` and ``early`` every token takes all loops.

    Attributes:
        max_tokens: at most; None: the usual number, or for how many the model has room behind the prompt.
        artifact: an artifact of the bundle that keeps what it computed for earlier tokens, or ``torch``; None: FP32
            from the bundle where that has one, else torch.
        runtime: what shall compute it, as ``--runtime`` names it; None: its usual one.
    """

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    exit: int | None = None
    early: EarlyExit | None = None
    artifact: str | None = None
    runtime: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.exit is not None and self.early is not None:
            raise InputError("either a fixed exit or exit by confidence, not both")


@dataclass(frozen=True)
class Generation:
    """What was written, and what it took.

    Attributes:
        artifact: what wrote, ``torch`` for the run's own weights.
        text: the new text, without the prompt.
        tokens: the drawn tokens; the last one ends the text where ``stopped`` is ``boundary``.
        loops: the loop that answered, for each of ``tokens``.
        prompt_seconds: time until the first new token, loading the model not counted.
        tokens_per_s: new tokens after the first, per second; None where there is only one.
        notes: what the reader should know.
    """

    run: str
    artifact: str
    prompt: str
    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    loops: tuple[int, ...]
    mean_loops: float
    stopped: str
    provider: str
    prompt_seconds: float
    seconds: float
    tokens_per_s: float | None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return asdict(self)


def generate(
    location: Location, prompt: str, options: GenerateOptions, on_text: Callable[[str], None] | None = None
) -> Generation:
    """Go on writing where ``prompt`` ends: with the bundle's graphs, or with the run's own weights in torch.

    Args:
        location: the run, the bundle, or both.
        prompt: may be empty.
        options: how much, how, and with what.
        on_text: called with each piece of new text as soon as it is there.

    Raises:
        InputError: not a language model, one that sees later tokens, no such exit or artifact, or a text that gets too
            long.
        ArtifactError: an unfinished or damaged run or bundle, or the graphs that are needed were not exported.
        MissingDependencyError: torch is needed and not installed.
    """
    author = find_author(location, options.artifact, options.runtime)
    thresholds = _thresholds(author, options)
    tokenizer = author.model.reader().tokenizer
    plain = PlainText(tokenizer)
    require_unicode("the prompt", prompt)
    ids = [plain.boundary, *plain.encode(prompt).ids]
    most, notes = _length(len(ids), options.max_tokens, author)
    artifact, decoder = author.open(thresholds)
    stream, pieces = TextStream(tokenizer, ids), list[str]()

    def show(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    stop, sampler = (plain.boundary, most), Sampler(options.sampling)
    found = _decode(decoder, ids, stop, sampler, thresholds, lambda token: show(stream.push(token)))
    show(stream.finish())
    after_first, seconds = len(found.tokens) - 1, found.seconds - found.prompt_seconds
    return Generation(
        run=location.name,
        artifact=artifact,
        prompt=prompt,
        text="".join(pieces),
        prompt_tokens=len(ids),
        mean_loops=sum(found.loops) / len(found.loops),
        stopped="boundary" if found.tokens[-1] == plain.boundary else "max_tokens",
        provider=decoder.provider,
        tokens_per_s=after_first / seconds if after_first and seconds > 0 else None,
        notes=notes,
        **vars(found),
    )


@dataclass(frozen=True)
class _Drawn:
    """What :class:`Generation` says of the tokens; times are those in the model and in drawing, not in loading it."""

    tokens: tuple[int, ...]
    loops: tuple[int, ...]
    prompt_seconds: float
    seconds: float


def _decode(
    decoder: Decoder[Any],
    prompt: Sequence[int],
    stop: tuple[int, int],
    sampler: Sampler,
    thresholds: Mapping[int, float],
    on_token: Callable[[int], None],
) -> _Drawn:
    """Read ``prompt``, then draw tokens until ``stop``.

    Args:
        decoder: at the start of a text; work done for earlier tokens is kept in it.
        prompt: at least one token.
        stop: the token that ends a text, and the largest number of tokens.
        sampler: draws them.
        thresholds: loop → smallest top probability that lets it answer, in rising order; a fixed exit is one loop with
            threshold 0. The last of them answers whoever is left.
        on_token: called with every token but the one that ends the text, as soon as it is drawn.
    """
    end, most = stop
    tokens, loops = list[int](), list[int]()
    started = time.perf_counter()
    prompt_seconds, new = 0.0, list(prompt)
    while len(tokens) < most:
        decoder.read(new)
        for loop, threshold in thresholds.items():
            decoder.advance(loop)
            logits = decoder.logits(loop)
            if loop == max(thresholds) or float(top_probability(np.asarray(logits)[None])[0]) >= threshold:
                break
        token = sampler.pick(logits)
        tokens.append(token)
        loops.append(loop)
        if len(tokens) == 1:
            prompt_seconds = time.perf_counter() - started
        if token == end:
            break
        on_token(token)
        new = [token]
    return _Drawn(tuple(tokens), tuple(loops), prompt_seconds, time.perf_counter() - started)


def _thresholds(author: Author, options: GenerateOptions) -> dict[int, float]:
    """Loop → smallest top probability that lets it answer; the last of them always may."""
    *exits, last = author.exits
    if options.exit is not None:
        if options.exit not in author.exits:
            listed = ", ".join(map(str, author.exits))
            raise InputError(f"--exit {options.exit}: {author.model.name} has exits after the loops {listed}")
        return {options.exit: 0.0}
    if options.early is None:
        return {last: 0.0}
    if not exits:
        raise InputError(f"--confidence: {author.model.name} has no exit before its last loop")
    early = options.early
    return {**exit_thresholds(exits, early.start, early.floor, early.decay), last: 0.0}


def _length(prompt_tokens: int, wanted: int | None, author: Author) -> tuple[int, tuple[str, ...]]:
    """How many tokens to write at most, and notes: on less than usual, and on more than the model was trained on.

    Raises:
        InputError: the prompt, or so many tokens behind it as somebody asked for, do not fit.
    """
    most, trained = author.max_positions, author.trained_length
    room = most - prompt_tokens + 1  # the last new token is never read
    what = f"the prompt has {prompt_tokens} tokens and the model takes at most {most}, so at most {room} can be written"
    if prompt_tokens > most:
        raise InputError(f"the prompt has {prompt_tokens} tokens; the model takes at most {most}")
    if wanted is not None and wanted > room:
        raise InputError(f"--max-tokens {wanted}: {what}")
    notes = []
    if wanted is None and room < USUAL_TOKENS:
        notes.append(what)
    written = wanted or min(USUAL_TOKENS, room)
    if prompt_tokens + written - 1 > trained:
        notes.append(f"trained on {trained} tokens at a time; what comes behind that is guesswork")
    return written, tuple(notes)


class TextStream:
    """The text of a growing list of tokens that go on from a prompt: never half a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)

    def push(self, token: int) -> str:
        """Take a token; returns the text that is complete now, often a word, sometimes nothing yet."""
        self._ids.append(token)
        return self._new(final=False)

    def finish(self) -> str:
        """What is left: bytes that never became a character, as the replacement character."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        known, text = (
            str(self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True))
            for end in (self._read, None)
        )
        if not final and text.endswith(_INCOMPLETE):
            return ""
        self._read = len(self._ids)
        self._start = max(self._start, self._read - _CONTEXT)
        return text[len(known) :]
