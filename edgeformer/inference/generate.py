"""Generate: continue a prompt token by token, with a bundle's graphs (no torch) or with a run's own weights (torch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import PlainText, require_unicode
from edgeformer.inference.predict import NAME_ONE_RUNTIME
from edgeformer.inference.sampling import Sampling
from edgeformer.run import TORCH, Location, Run, is_torch_provider
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, requested_providers
from edgeformer.tasks.early_exit import EarlyExit, is_confident
from edgeformer.tasks.metric import top_probability

if TYPE_CHECKING:
    from edgeformer.runtimes.decoder import Decoder

DEFAULT_TOKENS = 64  # largest number of new tokens if `max_tokens` is None

_DECODER_ROLES = ("decode", "step")
_PRECISIONS = ("fp32", "fp16", "int8", "int4")  # in the order of preference

_INCOMPLETE = "\ufffd"  # what a tokenizer returns for bytes that are not a whole character (yet)

_CONTEXT = 8
"""Earlier tokens that are decoded with new ones: enough for the bytes of a character and the space before a word."""


@dataclass(frozen=True)
class GenerateOptions:
    """Length, sampling, exits and artifact. Without ``exit``, ``early`` and ``cosine`` every token takes all loops.

    Attributes:
        max_tokens: new tokens at most; None: 64, or as many as fit behind the prompt.
        sampling: how tokens are chosen.
        exit: every token answers after this loop.
        early: every token answers at the first exit that is confident enough.
        artifact: a step or decode artifact of the bundle, or ``torch``; None: FP32 of the bundle, else torch.
        runtime: a runtime or one of its providers; None: the usual runtime of the artifact.
        cosine: every token answers at the first exit where the cosine of its states around the loop reaches this.
    """

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    exit: int | None = None
    early: EarlyExit | None = None
    artifact: str | None = None
    runtime: str | None = None
    cosine: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"--max-tokens {self.max_tokens}: must be at least 1")
        rules = {"--exit": self.exit, "--confidence": self.early, "--cosine": self.cosine}
        flags = [flag for flag, value in rules.items() if value is not None]
        if len(flags) > 1:
            raise InputError(f"{', '.join(flags)}: exclude each other; leave out all but one of them")


@dataclass(frozen=True)
class Generation:
    """A generated text and its cost."""

    run: str
    artifact: str  # its id, or ``torch``
    prompt: str
    text: str  # without the prompt
    prompt_tokens: int
    tokens: tuple[int, ...]  # new ones; the last one ends the text where ``stopped`` is ``boundary``
    loops: tuple[int, ...]  # the loop that answered, for each of ``tokens``
    mean_loops: float
    stopped: str
    provider: str
    prompt_seconds: float  # until the first new token, without loading the model
    seconds: float  # until the last one
    tokens_per_s: float | None  # after the first new token; None: there are no more
    notes: tuple[str, ...] = ()


def generate(
    location: Location, prompt: str, options: GenerateOptions, on_text: Callable[[str], None] | None = None
) -> Generation:
    """Continue ``prompt`` (which may be empty) with the bundle's graphs, or with the run's own weights in torch.

    ``on_text`` is called with each piece of new text as soon as it is complete. Raises as :class:`Writer`, and
    InputError for a prompt that is too long.
    """
    with closing(Writer(location, options)) as writer:
        ids = writer.encode(prompt)
        max_tokens, notes = writer.token_limit(ids, options.max_tokens, DEFAULT_TOKENS)
        pieces, prompt_seconds, provider = list[TextPiece](), 0.0, writer.decoder.provider
        started = time.perf_counter()
        for piece in writer.write(ids, max_tokens, options.sampling):
            pieces.append(piece)
            if len(pieces) == 1:
                prompt_seconds = time.perf_counter() - started
            if piece.text and on_text is not None:
                on_text(piece.text)
        seconds = time.perf_counter() - started
        loops = tuple(piece.loop for piece in pieces)
        later_tokens, later_seconds = len(pieces) - 1, seconds - prompt_seconds
        return Generation(
            run=location.name, artifact=writer.artifact, prompt=prompt, text="".join(piece.text for piece in pieces),
            prompt_tokens=len(ids), tokens=tuple(piece.token for piece in pieces), loops=loops,
            mean_loops=sum(loops) / len(loops), stopped=str(pieces[-1].stopped), provider=provider,
            prompt_seconds=prompt_seconds, seconds=seconds, notes=tuple(notes),
            tokens_per_s=later_tokens / later_seconds if later_tokens and later_seconds > 0 else None,
        )  # fmt: skip


class TextPiece(NamedTuple):
    """A new token, the loop that answered, and the text that is complete now.

    ``stopped``: why it is the last one (``boundary``, ``stop`` or ``max_tokens``), or None.
    """

    token: int
    loop: int
    text: str
    stopped: str | None = None


class Writer:
    """A language model that continues prompts, one after the other; length and sampling are those of each text.

    ``ends``: tokens that end a text. ``tokenizer_config`` has the chat template if there is one. Raises InputError: no
    causal language model, or no such exit, artifact or runtime; ArtifactError: an unfinished or damaged run or bundle,
    or the graphs that are needed were not exported.
    """

    def __init__(self, location: Location, options: GenerateOptions) -> None:
        artifact, runtime = options.artifact or location.artifact, options.runtime
        name, command, has_run = location.name, location.step_command, location.run is not None
        # 1. The model: the bundle if it holds ``artifact`` (None: any graphs that generate), else the run
        bundle: Bundle | None = None
        graphs = list[ArtifactManifest]()
        if artifact != TORCH and location.bundle is not None:
            bundle = location.open_bundle()
            graphs = [entry for entry in bundle.built(*_DECODER_ROLES) if entry.is_graph and not entry.trimmed]
            if artifact is None and bundle.task.can_write and not bundle.leaks and not graphs:
                bundle = None
        elif artifact not in (None, TORCH):
            raise InputError(f"--artifact {artifact}: {name} has no bundle; write it with: {command}")
        if bundle is None and not has_run:
            raise ArtifactError(
                f"{location.bundle}: has no graph that writes text; export its run again with: {command}"
            )
        model: Bundle | Run = bundle if bundle is not None else location.open_run()
        task = model.task
        if not task.can_write:
            text = " TEXT" if task.can_answer else ""
            raise InputError(f"{name}: is a {task.noun} and writes no text; use: edgeformer {task.use} {name}{text}")
        if model.leaks:
            raise InputError(
                f"{name}: leaks future tokens, so it cannot write text: each token depends on later ones; train it "
                "with model.causal: true"
            )
        # 2. The loops after which a token may answer
        if isinstance(model, Run):
            model.require_finished()
            exits, recipe = model.exits, model.recipe
            self._max_positions, self._trained_length = recipe.model.max_positions, recipe.data.tokens_at_once
        else:
            exits, self._trained_length = model.manifest.exits or (model.loops,), model.manifest.max_length
            self._max_positions = model.manifest.max_positions or self._trained_length
        if options.exit is not None and options.exit not in exits:
            listed = ", ".join(map(str, exits))
            raise InputError(f"--exit {options.exit}: {model.name} has exits after the loops {listed}")
        # Loop → smallest top probability at which a token answers, in rising order.
        self._thresholds = {options.exit or exits[-1]: 0.0}
        if len(exits) == 1 and (options.early, options.cosine) != (None, None):
            flag = "--confidence" if options.cosine is None else "--cosine"
            raise InputError(f"{flag}: {model.name} has no exit before its last loop; leave it out")
        if options.early is not None:
            self._thresholds = {**options.early.thresholds(exits), exits[-1]: 0.0}
        self._cosine = options.cosine
        if self._cosine is not None:
            self._thresholds = {**dict.fromkeys(exits[:-1], self._cosine), exits[-1]: 0.0}
        # 3. Its tokenizer, and what computes it
        reader = model.reader()
        self.tokenizer, self._plain = reader.tokenizer, PlainText(reader.tokenizer, reader.bounds)
        self.tokenizer_config, self.ends = model.tokenizer_config(), self._plain.bounds.ends
        if isinstance(model, Run):
            if runtime is not None and not is_torch_provider(runtime):
                raise InputError(f"--runtime {runtime}: cannot run the weights of a run; use torch-cpu or torch-cuda")
            self.artifact, self._open = TORCH, partial(model.decoder, runtime)
        else:
            # The requested artifact, or the preferred graph; only step artifacts can answer before the last loop.
            all_loops = set(self._thresholds) == {exits[-1]}
            graphs.sort(key=lambda graph: (_PRECISIONS.index(graph.precision), _DECODER_ROLES.index(graph.role)))
            if artifact is None:
                chosen = next((graph for graph in graphs if all_loops or graph.role == "step"), None)
                if chosen is None:
                    instead = f", or write with --artifact {TORCH}" if has_run else ""
                    raise ArtifactError(
                        f"--exit, --confidence: {model.name} has no step artifact, which they need; write one with: "
                        f"{command}{instead}"
                    )
            else:
                chosen, why = next((entry for entry in model.artifacts if entry.id == artifact), None), ""
                if chosen is None:
                    why = "is no artifact of the bundle"
                elif chosen.role not in _DECODER_ROLES:
                    why = "reads whole texts and cannot write token by token"
                elif not all_loops and chosen.role != "step":
                    why = "runs all loops for every token, and --exit, --confidence and --cosine need a step artifact"
                if chosen is None or why:
                    # An engine is used only on request, because it does not run on every machine.
                    engines = [entry for entry in model.built(*_DECODER_ROLES) if not entry.is_graph]
                    ids = [*(entry.id for entry in (*graphs, *engines)), *([TORCH] if has_run else [])]
                    listed = ", ".join(ids) or "nothing"
                    raise InputError(
                        f"--artifact {artifact}: {why}; give one of {listed}, or write more with: {command}"
                    )
            if runtime == ALL_RUNTIMES:
                raise InputError(NAME_ONE_RUNTIME)
            providers = (None,) if runtime is None else requested_providers(chosen, runtime)
            if not providers:
                raise InputError(f"--runtime {runtime}: does not open {chosen.id}; leave it out")
            self.artifact = chosen.id
            self._open = partial(model.decoder, chosen, self._thresholds, OpenOptions(providers[0]))
        self.name = name

    @cached_property
    def decoder(self) -> Decoder[Any]:
        """The opened model. Raises as :meth:`edgeformer.bundle.Bundle.decoder`."""
        return self._open()

    def close(self) -> None:
        """Close the model if it is open."""
        if "decoder" in self.__dict__:
            self.decoder.close()

    def encode(self, prompt: str, *, is_chat: bool = False) -> list[int]:
        """Return the tokens of a prompt behind those that begin a text, or of a rendered chat template.

        Raises InputError: invalid Unicode, or a chat without text.
        """
        require_unicode("the chat" if is_chat else "the prompt", prompt)
        ids: list[int] = self._plain.encode(prompt, is_chat=True).ids if is_chat else self._plain.encode_prompt(prompt)
        if is_chat and not ids:
            raise InputError("the chat template makes no text of these messages; change them")
        return ids

    def token_limit(self, ids: Sequence[int], requested: int | None, default: int | None) -> tuple[int, list[str]]:
        """Return the number of new tokens that may follow a prompt, and notes for the reader.

        That is ``requested``, else ``default``, or as many as fit; a ``default`` of None: as many as fit.
        Raises InputError: the prompt is too long, or ``requested`` tokens do not fit behind it.
        """
        max_positions = self._max_positions
        if len(ids) > max_positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens, and the model takes at most {max_positions}; shorten it"
            )
        available = max_positions - len(ids) + 1  # the last new token is never read
        limits = f"the prompt has {len(ids)} of at most {max_positions} tokens, so at most {available} can follow"
        if requested is not None and requested > available:
            raise InputError(f"--max-tokens {requested}: {limits}")
        default = default or available
        notes = [limits] if requested is None and available < default else []
        max_tokens = requested or min(default, available)
        if len(ids) + max_tokens - 1 > self._trained_length:
            length = self._trained_length
            notes.append(f"the model was trained on {length} tokens at a time; text beyond that is unreliable")
        return max_tokens, notes

    def write(
        self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> Iterator[TextPiece]:
        """Yield the continuation of a prompt of at least one token; the last piece has ``stopped``.

        It ends in front of the texts ``stop``, or after ``max_tokens``, see :meth:`token_limit`.
        """
        self.decoder = decoder = self.decoder.fresh()
        stream, generator = TextStream(self.tokenizer, ids, stop), np.random.default_rng(sampling.seed)
        unread, last_exit, count = ids, max(self._thresholds), 0
        while True:
            decoder.read(unread)
            for loop, threshold in self._thresholds.items():
                decoder.advance(loop)
                if self._cosine is not None and loop != last_exit and decoder.cosine() < threshold:
                    continue  # the released code's rule; no logits are needed to go on
                logits = decoder.row_logits(loop)[0]
                if self._cosine is not None or loop == last_exit:
                    break
                if is_confident(top_probability(np.asarray(logits)[None]), threshold)[0]:
                    break
            token = sampling.pick(logits, generator)
            count += 1
            is_end = token in self.ends
            text = "" if is_end else stream.push(token)
            stopped = "boundary" if is_end else "max_tokens" if count == max_tokens else None
            if stopped is not None:
                text += stream.push().rstrip(_INCOMPLETE)
            if stream.stopped:
                stopped = "stop"
            yield TextPiece(token, loop, text, stopped)
            if stopped is not None:
                return
            unread = [token]


class TextStream:
    """Decodes tokens behind a ``prompt`` piece by piece, and never returns a part of a character.

    The stream ends in front of the texts ``stop``; what may be the beginning of one is held back. ``stopped``: one of
    them occurred, after which nothing is returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._decoded = len(self._ids)
        self._start = max(0, self._decoded - _CONTEXT)
        self._stop, self._held, self.stopped = tuple(stop), "", False

    def push(self, *tokens: int) -> str:
        """Add a token; return the text that is complete now, often a word, sometimes nothing yet.

        Without a token: return the rest, where bytes that are no whole character are the replacement character.
        """
        if self.stopped:
            return ""
        self._ids += tokens
        windows = [self._ids[self._start : self._decoded], self._ids[self._start :]]
        previous, text = (str(self._tokenizer.decode(window, skip_special_tokens=True)) for window in windows)
        if tokens and text.endswith(_INCOMPLETE):
            return ""
        self._decoded = len(self._ids)
        self._start = max(self._start, self._decoded - _CONTEXT)
        text = self._held + text[len(previous) :]
        places = [place for place in map(text.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = 0
        if tokens:  # the longest end of the text that a stop text may begin with
            longest = max(map(len, self._stop), default=1) - 1
            lengths = range(min(longest, len(text)), 0, -1)
            held = next((n for n in lengths if any(end.startswith(text[-n:]) for end in self._stop)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
