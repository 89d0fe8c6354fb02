"""Command generate: continue a prompt with a language model."""

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt


def command(
    words: list[str] | None = Argument(
        None, metavar="[RUN] PROMPT", help="An optional run, then the text to continue. Default: standard input."
    ),
    max_tokens: int | None = Option(
        None, min=1, help="Largest number of new tokens. Default: 64, or fewer if the context is full."
    ),
    temperature: float = Option(1.0, min=0.0, help="Sampling temperature; 0: always the most probable token."),
    top_k: int | None = Option(None, min=1, help="Sample from the K most probable tokens. Default: all."),
    top_p: float | None = Option(
        None, help="Sample from the most probable tokens that together have this probability, up to 1. Default: all."
    ),
    seed: int = Option(0, min=0, help="Seed of the random choice of tokens: the same seed gives the same text."),
    exit_: int | None = Option(
        None, "--exit", metavar="N", help="Exit after loop N for every token. Default: last loop."
    ),
    confidence: bool = Option(
        False, "--confidence", help="Exit each token at the first exit whose top probability reaches its own threshold."
    ),
    threshold: float | None = Option(
        None, min=0.0, max=1.0, help="With --confidence: threshold after loop 1, a probability. Default: 0.92."
    ),
    floor: float | None = opt.advanced(
        None, min=0.0, max=1.0, help="With --confidence: lowest threshold, a probability. Default: 0.8."
    ),
    decay: float | None = opt.advanced(
        None, min=0.0, max=1.0, help="With --confidence: factor of the threshold per loop. Default: 0.98."
    ),
    cosine: opt.Cosine = None,
    artifact: str | None = Option(
        None, metavar="ID|torch", help="Artifact to run; torch: the weights of the run. Default: FP32."
    ),
    runtime: str | None = Option(
        None, metavar="NAME", help="Runtime or provider, e.g. torch-cpu. Default: the artifact's first."
    ),
    run: opt.NamedRun = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Continue a prompt with a language model.

    Stops at the end of the text or after --max-tokens. Without --exit, --confidence and --cosine every token runs all
    loops, with the bundle's decode graph. Those three need the step artifact
    ([b]edgeformer export RUN --exit all[/b]).
    Without a bundle, the run's own weights generate, with torch.

    Examples:
      edgeformer generate "The history of the town begins"
      edgeformer generate crt_mini-001 "In 1912 the" --temperature 0.8 --top-p 0.9 --seed 7
      edgeformer generate "The album was" --confidence --json
      edgeformer generate path/to/bundle "The album was" --exit 4 --artifact onnx-fp16-step
    """
    from edgeformer.inference.generate import GenerateOptions, generate
    from edgeformer.inference.sampling import Sampling
    from edgeformer.tasks.early_exit import EarlyExit

    location, prompts = opt.split_run_and_texts([*(words or ())], artifacts, run, "generate")
    if len(prompts) > 1:
        raise InputError(f"there are {len(prompts)} prompts; put one prompt in quotes: {' '.join(prompts)!r}")
    prompt = prompts[0] if prompts else "" if sys.stdin.isatty() else opt.stdin().rstrip("\n")
    if not prompts and not prompt:
        raise InputError("there is no prompt; give it as an argument, or on standard input")
    thresholds = {"start": threshold, "floor": floor, "decay": decay}
    settings = {name: value for name, value in thresholds.items() if value is not None}
    if settings and not confidence:
        raise InputError("--threshold, --floor, --decay: have no effect without --confidence; add --confidence")
    early = EarlyExit(**settings) if confidence else None
    sampling = Sampling(temperature, top_k, top_p, seed)
    options = GenerateOptions(max_tokens, sampling, exit_, early, artifact, runtime, cosine)
    streaming = sys.stdout.isatty() and not as_json
    if streaming:
        opt.say(prompt, end="")
    generation = generate(location, prompt, options, (lambda piece: opt.say(piece, end="")) if streaming else None)
    if as_json:
        opt.print_json(asdict(generation))
        return
    typer.echo("" if streaming else prompt + generation.text)  # in a pipe the text is the result, as it is
    speed = f", {generation.tokens_per_s:.1f} tokens/s" if generation.tokens_per_s is not None else ""
    counts = sorted(Counter(generation.loops).items())
    exits = f" ({', '.join(f'{count} after loop {loop}' for loop, count in counts)})" if len(counts) > 1 else ""
    figures = f"{len(generation.tokens)} tokens, {generation.mean_loops:.2f} loops per token{exits}{speed}"
    opt.say(f"[{generation.run}: {figures} on {generation.provider}, {generation.artifact}]", err=True)
    for note in generation.notes:
        opt.say(f"note: {note}", err=True)
