"""generate: a prompt becomes a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.data.language_tokenizer import PlainText, load_language_tokenizer
from edgeformer.schema.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.schema.language_recipe import LanguageRecipe
from edgeformer.schema.shipped import load_recipe
from edgeformer.schema.sources import FileTokenizer
from edgeformer.schema.workspace import RECIPE_FILE, Location, read_run
from edgeformer.stages.generating.decoding import Decoded, DecodingSession, decode
from edgeformer.stages.generating.text_stream import TextStream
from edgeformer.tasks.language_modeling import exit_thresholds
from edgeformer.tasks.sampling import Sampler, Sampling


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
    """How much is written and how. Without ``exit`` and ``early`` every token takes all loops."""

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    exit: int | None = None
    early: EarlyExit | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.exit is not None and self.early is not None:
            raise InputError("either a fixed exit or exit by confidence, not both")


@dataclass(frozen=True)
class Generation:
    """What was written, and what it took.

    Attributes:
        text: the new text, without the prompt.
        tokens: the drawn tokens; the last one ends the text where ``stopped`` is ``boundary``.
        loops: the loop that answered, for each of ``tokens``.
        prompt_seconds: time until the first new token, loading the model not counted.
        tokens_per_s: new tokens after the first, per second; None where there is only one.
        notes: what the reader should know.
    """

    run: str
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
    """Go on writing where ``prompt`` ends, with the run's own weights in torch.

    Args:
        on_text: called with each piece of new text as soon as it is there.

    Raises:
        InputError: not a language model, one that sees later tokens, no such exit, or a text that gets too long.
        ArtifactError: an unfinished or damaged run.
        MissingDependencyError: torch is not installed.
    """
    run = location.require_run()
    recipe = _recipe(run)
    thresholds = _thresholds(recipe, options)
    tokenizer = _tokenizer(run, recipe)
    plain = PlainText(tokenizer)
    ids = [plain.boundary, *_encoded(plain, prompt)]
    notes = _check_length(len(ids), options.max_tokens, recipe)
    session = _open(run, recipe)
    stream, pieces = TextStream(tokenizer, ids), list[str]()

    def show(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    decoded = decode(
        session,
        ids,
        (plain.boundary, options.max_tokens),
        Sampler(options.sampling),
        thresholds,
        lambda token: show(stream.push(token)),
    )
    show(stream.finish())
    loops = tuple(step.loop for step in decoded.steps)
    return Generation(
        run=location.name,
        prompt=prompt,
        text="".join(pieces),
        prompt_tokens=len(ids),
        tokens=tuple(step.token for step in decoded.steps),
        loops=loops,
        mean_loops=sum(loops) / len(loops),
        stopped="boundary" if decoded.steps[-1].token == plain.boundary else "max_tokens",
        provider=session.provider,
        prompt_seconds=decoded.prompt_seconds,
        seconds=decoded.seconds,
        tokens_per_s=_speed(decoded),
        notes=notes,
    )


def _recipe(run: Path) -> LanguageRecipe:
    """The recipe of a run that can write. Raises InputError or ArtifactError."""
    manifest, recipe = read_run(run), load_recipe(str(run / RECIPE_FILE))
    if not isinstance(recipe, LanguageRecipe):
        raise InputError(f"{run.name}: is a classifier and writes no text; use: edgeformer predict {run.name} TEXT")
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    if manifest.leaks or not recipe.model.causal:
        raise InputError(
            f"{run.name}: leaks future tokens, so it cannot write: a token's state depends on the tokens after it, "
            "which are not there yet, and nothing computed for it could be kept. Train it with model.causal: true"
        )
    return recipe


def _thresholds(recipe: LanguageRecipe, options: GenerateOptions) -> dict[int, float]:
    """Loop → smallest top probability that lets it answer; the last of them always may."""
    config = recipe.model
    exits = (*config.exits, config.loops)
    if options.exit is not None:
        if options.exit not in exits:
            raise InputError(f"--exit {options.exit}: {recipe.name} has exits after the loops {_listed(exits)}")
        return {options.exit: 0.0}
    if options.early is None:
        return {config.loops: 0.0}
    if not config.exits:
        raise InputError(f"--confidence: {recipe.name} has no exit before its last loop")
    early = options.early
    return {**exit_thresholds(config.exits, early.start, early.floor, early.decay), config.loops: 0.0}


def _listed(exits: tuple[int, ...]) -> str:
    return ", ".join(map(str, exits))


def _tokenizer(run: Path, recipe: LanguageRecipe) -> Tokenizer:
    path = run / "model" / "tokenizer.json"
    if not path.is_file():
        raise ArtifactError(f"{path}: missing; train the run again")
    config = FileTokenizer(kind="file", path=str(path))
    return load_language_tokenizer(config, vocab_size=recipe.model.vocab_size, training_texts=None)


def _encoded(plain: PlainText, prompt: str) -> list[int]:
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise InputError(f"the prompt is not valid Unicode: {prompt.encode('utf-8', 'replace').decode()[:60]!r}")
    ids: list[int] = plain.encode(prompt).ids
    return ids


def _check_length(prompt_tokens: int, max_tokens: int, recipe: LanguageRecipe) -> tuple[str, ...]:
    """Refuse what does not fit; say when it goes beyond what the model has seen in training."""
    most, trained = recipe.model.max_positions, recipe.data.sequence_length
    longest = prompt_tokens + max_tokens - 1  # the last new token is never read
    if prompt_tokens > most:
        raise InputError(f"the prompt has {prompt_tokens} tokens; the model takes at most {most}")
    if longest > most:
        raise InputError(
            f"--max-tokens {max_tokens}: the prompt has {prompt_tokens} tokens and the model takes at most {most}, "
            f"so at most {most - prompt_tokens + 1} can be written"
        )
    if longest > trained:
        return (f"trained on {trained} tokens at a time; what comes behind that is guesswork",)
    return ()


def _open(run: Path, recipe: LanguageRecipe) -> DecodingSession:
    try:
        from edgeformer.models.build import load_crt
        from edgeformer.models.crt_cache import Decoder
        from edgeformer.runtime.torch_decoder import TorchDecoder
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"writing with the run's own weights needs {error.name}: pip install 'edgeformer[train]'"
        ) from None
    return TorchDecoder(Decoder(load_crt(recipe.model, run / "model" / "model.safetensors")))


def _speed(decoded: Decoded) -> float | None:
    after_first, seconds = len(decoded.steps) - 1, decoded.seconds - decoded.prompt_seconds
    return after_first / seconds if after_first and seconds > 0 else None
