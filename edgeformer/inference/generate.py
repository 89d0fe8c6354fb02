"""Generate: continue a prompt token by token, with a bundle's graphs (no torch) or with a run's own weights (torch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import PlainText, require_unicode
from edgeformer.inference.predict import EarlyExit, exit_thresholds
from edgeformer.run import TORCH, Location, Run, is_torch_provider
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, requested_providers
from edgeformer.tasks.metric import top_probability
from edgeformer.tasks.sampling import Sampler, Sampling

DEFAULT_TOKENS = 64
"""Largest number of new tokens if ``max_tokens`` is None."""

_DECODER_ROLES = ("decode", "step")
_PRECISIONS = ("fp32", "fp16", "int8", "int4")
"""In the order of preference."""

_INCOMPLETE = "\ufffd"
"""What a tokenizer returns for bytes that are not a whole character (yet)."""

_CONTEXT = 8
"""Earlier tokens that are decoded with new ones: enough for the bytes of a character and the space before a word."""


@dataclass(frozen=True)
class GenerateOptions:
    """Length, sampling, exits and artifact. Without ``exit`` and ``early`` every token takes all loops.

    Attributes:
        max_tokens: new tokens at most; None: ``DEFAULT_TOKENS``, or as many as fit behind the prompt.
        sampling: how tokens are drawn.
        exit: every token answers after this loop.
        early: every token answers at the first exit that is confident enough.
        artifact: a step or decode artifact of the bundle, or ``torch``; None: FP32 of the bundle, else torch.
        runtime: ``--runtime``; None: the artifact's default.
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
    """A generated text and its cost.

    Attributes:
        artifact: the artifact's id, or ``torch``.
        text: the new text, without the prompt.
        tokens: the new tokens; the last one ends the text where ``stopped`` is ``boundary``.
        loops: the loop that answered, for each of ``tokens``.
        prompt_seconds: time until the first new token, without loading the model.
        seconds: time until the last token, without loading the model.
        tokens_per_s: new tokens after the first, per second; None where there is only one.
        notes: for the reader.
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
        """Return the fields for JSON output."""
        return asdict(self)


def generate(
    location: Location, prompt: str, options: GenerateOptions, on_text: Callable[[str], None] | None = None
) -> Generation:
    """Continue ``prompt`` with the bundle's graphs, or with the run's own weights in torch.

    Args:
        location: the run, the bundle, or both.
        prompt: may be empty.
        options: length, sampling, exits and artifact.
        on_text: called with each piece of new text as soon as it is complete.

    Raises:
        InputError: no causal language model, no such exit or artifact, or a text that is too long.
        ArtifactError: an unfinished or damaged run or bundle, or the graphs that are needed were not exported.
        MissingDependencyError: torch is needed and not installed.
    """
    artifact = options.artifact or location.artifact
    model = _select_model(location, artifact)
    if isinstance(model, Run):
        exits = model.exits
        max_positions, trained_length = model.recipe.model.max_positions, model.recipe.data.tokens_at_once
    else:
        exits, trained_length = model.manifest.exits, model.manifest.max_length
        max_positions = model.manifest.max_positions or trained_length
    thresholds = _token_thresholds(model.name, exits, options)
    tokenizer = model.reader().tokenizer
    plain = PlainText(tokenizer)
    require_unicode("the prompt", prompt)
    ids = [plain.boundary, *plain.encode(prompt).ids]
    max_tokens, notes = _limit_tokens(len(ids), options.max_tokens, max_positions, trained_length)
    if isinstance(model, Run):
        if options.runtime is not None and not is_torch_provider(options.runtime):
            raise InputError(f"--runtime {options.runtime}: computes no run's own weights; that is torch")
        artifact_id, decoder = TORCH, model.decoder(options.runtime)
    else:
        entry = _select_decoder(location, model, artifact, all_loops=set(thresholds) == {exits[-1]})
        provider = None if options.runtime is None else _first_provider(entry, options.runtime)
        artifact_id, decoder = entry.id, model.decoder(entry, thresholds, OpenOptions(provider))

    stream, pieces = TextStream(tokenizer, ids), list[str]()

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    sampler, last_exit = Sampler(options.sampling), max(thresholds)
    tokens, loops = list[int](), list[int]()
    prompt_seconds, unread = 0.0, ids
    started = time.perf_counter()
    while len(tokens) < max_tokens:
        decoder.read(unread)
        for loop, threshold in thresholds.items():
            decoder.advance(loop)
            logits = decoder.logits(loop)
            if loop == last_exit or float(top_probability(np.asarray(logits)[None])[0]) >= threshold:
                break
        token = sampler.pick(logits)
        tokens.append(token)
        loops.append(loop)
        if len(tokens) == 1:
            prompt_seconds = time.perf_counter() - started
        if token == plain.boundary:
            break
        emit(stream.push(token))
        unread = [token]
    seconds = time.perf_counter() - started
    emit(stream.finish())
    later_tokens, later_seconds = len(tokens) - 1, seconds - prompt_seconds
    return Generation(
        run=location.name,
        artifact=artifact_id,
        prompt=prompt,
        text="".join(pieces),
        prompt_tokens=len(ids),
        tokens=tuple(tokens),
        loops=tuple(loops),
        mean_loops=sum(loops) / len(loops),
        stopped="boundary" if tokens[-1] == plain.boundary else "max_tokens",
        provider=decoder.provider,
        prompt_seconds=prompt_seconds,
        seconds=seconds,
        tokens_per_s=later_tokens / later_seconds if later_tokens and later_seconds > 0 else None,
        notes=notes,
    )


def _select_model(location: Location, artifact: str | None) -> Bundle | Run:
    """Return the bundle if it holds ``artifact``, or graphs that generate; else the run.

    Args:
        location: the run, the bundle, or both.
        artifact: an artifact's id, or ``torch``; None: any.

    Raises:
        InputError: no causal language model, or no such artifact.
        ArtifactError: an unfinished or damaged run, or a bundle without its run whose graphs cannot generate.
    """
    command = _export_command(location)
    if artifact != TORCH and location.bundle is not None:
        bundle = location.open_bundle()
        _check_generates(location, bundle)
        if artifact is not None or _decoder_graphs(bundle):
            return bundle
    if artifact not in (None, TORCH):
        raise InputError(f"--artifact {artifact}: {location.name} has no bundle; make one with: {command}")
    if location.run is None:
        raise ArtifactError(f"{location.bundle}: holds no graphs that write text; export its run again with: {command}")
    run = location.open_run()
    _check_generates(location, run)
    run.require_finished()
    return run


def _check_generates(location: Location, model: Bundle | Run) -> None:
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


def _export_command(location: Location) -> str:
    return f"edgeformer export {location.argument} --exit all"


def _decoder_graphs(bundle: Bundle) -> list[ArtifactManifest]:
    """Return graphs that keep the work for earlier tokens, in the order of preference."""
    graphs = [artifact for artifact in bundle.built(*_DECODER_ROLES) if artifact.is_graph and not artifact.trimmed]
    return sorted(graphs, key=lambda graph: (_PRECISIONS.index(graph.precision), _DECODER_ROLES.index(graph.role)))


def _select_decoder(location: Location, bundle: Bundle, artifact: str | None, *, all_loops: bool) -> ArtifactManifest:
    """Return the requested artifact, or the preferred one; only step artifacts can answer before the last loop."""
    name, command, has_run = bundle.name, _export_command(location), location.run is not None
    graphs = _decoder_graphs(bundle)
    if artifact is None:
        for graph in graphs:
            if all_loops or graph.role == "step":
                return graph
        instead = f", or write with --artifact {TORCH}" if has_run else ""
        raise ArtifactError(
            f"{name}: --exit and --confidence need the step graphs, which its bundle does not hold; make them "
            f"with: {command}{instead}"
        )
    # An engine is used only on request, because it does not run on every machine.
    engines = [entry for entry in bundle.built(*_DECODER_ROLES) if not entry.is_graph]
    ids = [*(entry.id for entry in (*graphs, *engines)), *([TORCH] if has_run else [])]
    listed = ", ".join(ids) or "nothing"
    entry = next((entry for entry in bundle.artifacts if entry.id == artifact), None)
    if entry is None:
        raise InputError(f"--artifact {artifact}: {name} writes with {listed}")
    if entry.role not in _DECODER_ROLES:
        raise InputError(
            f"--artifact {artifact}: reads whole texts and keeps nothing of earlier tokens; {name} writes "
            f"with {listed}; missing ones are made with: {command}"
        )
    if entry.role == "decode" and not all_loops:
        raise InputError(
            f"--artifact {artifact}: takes all loops for every token; --exit and --confidence need a step "
            f"artifact ({name} writes with {listed}; missing ones are made with: {command})"
        )
    return entry


def _first_provider(artifact: ArtifactManifest, runtime: str) -> str:
    if runtime == ALL_RUNTIMES:
        raise InputError(f"--runtime {runtime}: one of them writes; name it")
    providers = requested_providers(artifact, runtime)
    if not providers:
        raise InputError(f"--runtime {runtime}: does not open {artifact.id}")
    return providers[0]


def _token_thresholds(name: str, exits: Sequence[int], options: GenerateOptions) -> Mapping[int, float]:
    """Return loop → smallest top probability at which a token answers, in rising order; the last one is 0."""
    last = exits[-1]
    if options.exit is not None:
        if options.exit not in exits:
            raise InputError(f"--exit {options.exit}: {name} has exits after the loops {', '.join(map(str, exits))}")
        return {options.exit: 0.0}
    if options.early is None:
        return {last: 0.0}
    if len(exits) == 1:
        raise InputError(f"--confidence: {name} has no exit before its last loop")
    return {**exit_thresholds(exits, options.early), last: 0.0}


def _limit_tokens(
    prompt_tokens: int, requested: int | None, max_positions: int, trained_length: int
) -> tuple[int, tuple[str, ...]]:
    """Return the largest number of new tokens, and notes on a smaller default and on exceeding the trained length.

    Raises:
        InputError: the prompt, or the requested number of tokens behind it, does not fit.
    """
    if prompt_tokens > max_positions:
        raise InputError(f"the prompt has {prompt_tokens} tokens; the model takes at most {max_positions}")
    available = max_positions - prompt_tokens + 1  # the last new token is never read
    limits = (
        f"the prompt has {prompt_tokens} tokens and the model takes at most {max_positions}, so at most {available} "
        "can be written"
    )
    if requested is not None and requested > available:
        raise InputError(f"--max-tokens {requested}: {limits}")
    notes = [limits] if requested is None and available < DEFAULT_TOKENS else []
    max_tokens = requested or min(DEFAULT_TOKENS, available)
    if prompt_tokens + max_tokens - 1 > trained_length:
        notes.append(f"trained on {trained_length} tokens at a time; what comes behind that is guesswork")
    return max_tokens, tuple(notes)


class TextStream:
    """Decodes a growing list of tokens piece by piece, and never returns a part of a character.

    Args:
        tokenizer: of the model.
        prompt: tokens before the first new one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._decoded = len(self._ids)
        self._start = max(0, self._decoded - _CONTEXT)

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now, often a word, sometimes nothing yet."""
        self._ids.append(token)
        return self._new_text(final=False)

    def finish(self) -> str:
        """Return the remaining text; bytes that are no whole character become the replacement character."""
        return self._new_text(final=True)

    def _new_text(self, *, final: bool) -> str:
        previous, text = (
            str(self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True))
            for end in (self._decoded, None)
        )
        if not final and text.endswith(_INCOMPLETE):
            return ""
        self._decoded = len(self._ids)
        self._start = max(self._start, self._decoded - _CONTEXT)
        return text[len(previous) :]
