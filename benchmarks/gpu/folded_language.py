"""Row 13: SmolLM2 folded into a half and a third of its layers, and trained on its own answers on WikiText-2."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.gpu.recipes import TINY_DECODER, WIKITEXT_2, recipe_for, trained
from benchmarks.gpu.session import Column, Figures, Row, Session
from edgeformer.artifacts.recipe import Recipe
from edgeformer.run import Run

RECIPE, SOURCE = "smollm2_folded", "models/SmolLM2-135M-Instruct"
FOLDS = {"15 layers × 2": (15, 2), "10 layers × 3": (10, 3)}
TINY_DEPTH = 30


def measure(session: Session) -> None:
    """The teacher is read from a folder of Hugging Face below the data; each fold is gone on with from call to call."""
    teacher = _teacher(session)
    for name, (layers, iterations) in FOLDS.items():
        session.case(name, partial(_fold, session, teacher, layers, iterations))


def _teacher(session: Session) -> Path:
    from edgeformer.imports.language import import_causal_lm
    from edgeformer.imports.run import ImportOptions
    from edgeformer.models import load_recipe

    folder = session.work / "smollm2"
    if (folder / "run.json").is_file():
        return folder
    if session.tiny:
        depth = (f"model.layers={TINY_DEPTH}", "model.iterations=1", "model.exits=[]", "training.exit_weight=0")
        return _train(session, load_recipe("looped_mini", [*TINY_DECODER, *depth]), folder.name)
    return import_causal_lm(str(session.options.data / SOURCE), ImportOptions(session.work, folder.name))  # type: ignore[operator]


def _train(session: Session, recipe: Recipe, name: str) -> Path:
    from edgeformer.training.train import TrainOptions, train

    folder = session.work / name
    begun = (folder / "run.json").is_file()
    if begun and Run.open(folder).status == "finished":
        return folder
    return train(recipe, TrainOptions(session.work, name=name, resume=begun, ignore_memory=session.tiny))


def _fold(session: Session, teacher: Path, layers: int, iterations: int) -> Figures:
    tokenizer = f"tokenizer={{kind: file, path: {teacher / 'model' / 'tokenizer.json'}}}"
    sizes = (f"model.layers={layers}", f"model.iterations={iterations}", f"training.teacher={teacher}", tokenizer)
    large = ("training.batch_size=32", "training.epochs=3", "training.checkpoint_minutes=2")
    recipe = recipe_for(session, RECIPE, [WIKITEXT_2, *sizes, *large], sizes)
    run = Run.open(_train(session, recipe, f"folded-{layers}"))
    manifest = run.manifest
    assert manifest.validation is not None
    scores = {"validation": manifest.validation, **manifest.tests}
    perplexity = {name: score.model_dump(mode="json")["perplexity"] for name, score in scores.items()}
    return {**trained(run), "parameters": manifest.parameters, "seconds": manifest.seconds, "perplexity": perplexity}


ROW = Row(
    number=13,
    topic="folded-language",
    question="what perplexity does SmolLM2 keep when its layers are folded and trained?",
    wanted="perplexity of WikiText-2 after three epochs, beside the teacher's own",
    measure=measure,
    columns=(
        Column("parameters", "parameters", "{:,}"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("perplexity, validation", "perplexity.validation", "{:.2f}"),
        Column("perplexity, test", "perplexity.test", "{:.2f}"),
    ),
)
