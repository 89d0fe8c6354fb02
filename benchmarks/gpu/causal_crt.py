"""Row 5: the causal CRT-Deep, trained on WikiText-2 for real; its perplexity at every exit, per token and per word."""

from __future__ import annotations

from benchmarks.gpu.recipes import WIKITEXT_2, recipe_for, trained
from benchmarks.gpu.session import Column, Figures, Row, Session
from edgeformer.run import Run

RECIPE = "crt_deep_rtx4050"
SETTINGS = (
    WIKITEXT_2,
    "data.first_n=null",
    # A large card needs neither small batches nor recomputation: the same 16 rows a step, at once.
    "training.batch_size=16",
    "training.accumulation=1",
    "training.checkpointing=none",
    "training.epochs=4",
    # What is stopped goes on from the last checkpoint, which SIGTERM writes as well.
    "training.checkpoint_minutes=2",
)


def measure(session: Session) -> None:
    """One training, gone on with from call to call until its epochs are through."""
    session.case("train", lambda: _train(session))


def _train(session: Session) -> Figures:
    from edgeformer.training.train import TrainOptions, train

    recipe = recipe_for(session, RECIPE, SETTINGS, ("training.batch_size=8", "training.epochs=1"))
    folder = session.work / "causal"
    begun = (folder / "run.json").is_file()
    if not (begun and Run.open(folder).status == "finished"):
        train(recipe, TrainOptions(session.work, name="causal", resume=begun, ignore_memory=session.tiny))
    run = Run.open(folder)
    manifest = run.manifest
    assert manifest.validation is not None
    scores = {"validation": manifest.validation, **manifest.tests}
    text = {name: score.model_dump(mode="json") for name, score in scores.items()}
    first = text["test"]
    return {
        **trained(run),
        "epochs": manifest.epochs,
        "seconds": manifest.seconds,
        "parameters": manifest.parameters,
        "leaks": manifest.leaks,
        "causality": manifest.causality.model_dump(mode="json") if manifest.causality is not None else None,
        "perplexity": first["perplexity"],
        "word_perplexity": first["word_perplexity"],
        "exits": {loop: score["perplexity"] for loop, score in first["exits"].items()},
        "scores": text,
    }


ROW = Row(
    number=5,
    topic="causal-crt",
    question="what perplexity does the causal CRT-Deep reach on WikiText-2, at every exit?",
    wanted="honest figures per token and per word; the probe finds no leak",
    measure=measure,
    columns=(
        Column("epochs", "epochs"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        *(Column(f"perplexity per token, loop {loop}", f"exits.{loop}", "{:.2f}") for loop in (2, 4, 6, 8)),
        Column("per word", "word_perplexity", "{:.1f}"),
        Column("leaks", "leaks"),
    ),
)
