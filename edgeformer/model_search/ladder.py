"""The models of a search, from the cheapest to the most expensive, each as the sections of a recipe."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from edgeformer.artifacts.documents import read_yaml
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import DistilledTraining, Recipe
from edgeformer.data.data_warnings import load_with_findings
from edgeformer.data.sources import Columns
from edgeformer.data.splits import split
from edgeformer.models.pretrained.source import open_source
from edgeformer.training import init

_FROZEN, _TEACHER = "frozen", "pretrained"
_SPANS = "token-classification"
_WIDTHS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "layers": 2, "iterations": 2, "heads": 4, "ffn_size": 512},
    "light": {"hidden_size": 256, "layers": 3, "iterations": 2, "heads": 4, "ffn_size": 1024},
}
_ENCODER = {"kind": "encoder", "vocab_size": 8000, "residual_scale": 0.5}
_SOFT_LABELS = {"weight": 1.0, "temperature": 2.0}
_DISTILLATION = {"weight": 0.7, "temperature": 2.0}
_ITERATIONS = 2
_FOLD = {
    "iterations": _ITERATIONS, "init": "stepwise", "order": "immediate", "own": "norms", "weights": "teacher",
}  # fmt: skip


@dataclass(frozen=True)
class LadderModel:
    """A model that the search may train."""

    name: str  # in tables, and the end of its run's name
    description: str  # for people
    sections: Mapping[str, Any]  # of its recipe, without name and teacher; paths are absolute
    teachers: tuple[str, ...] = ()  # models of which the best one teaches it; of those that are not trained, the first
    untaught: str | None = None  # the same model without a teacher, which it must surpass
    smaller: str | None = None  # of the same kind; if it is far below the best one, this is not expected to be better


def ladder_of_file(
    data: Path, columns: Columns, source: str | None, progress: Progress, test: Path | None = None
) -> list[LadderModel]:
    """Return the models for a file of labelled texts as for ``init``; ``test``: further rows for the test.

    Raises InputError: unusable data or source, or labels of a task without a ladder.
    """
    with TemporaryDirectory() as folder:

        def drafted(family: Literal["linear", "encoder"], start: str | None = None) -> dict[str, Any]:
            options = init.DraftOptions(
                Path(folder) / f"{family}-{start is None}.yaml", columns, start, family, "search", False, test
            )
            sections = dict(read_yaml(init.draft(data, options, progress).path).content)
            for part, file in sections["data"]["parts"].items():
                file[0]["path"] = str((data if part == "train" or test is None else test).resolve())
            return sections

        scratch = drafted("encoder")
        _require_classifier(scratch["task"], str(data), f"edgeformer init {data}, then edgeformer train RECIPE.yaml")
        pretrained = None
        if source is not None:
            pretrained = drafted("encoder", source)
            pretrained["model"]["source"] = _absolute(source)
        return _ladder(None if scratch["task"] == _SPANS else drafted("linear"), scratch, pretrained)


def _require_classifier(task: str, place: str, remedy: str) -> None:
    if task not in ("classification", "multi-label-classification", _SPANS):
        message = f"is data of the task {task}, and search trains classifiers; train one model"
        raise InputError(f"{place}: {message}: {remedy}")


def ladder_of_recipe(recipe: Recipe, source: str | None) -> list[LadderModel]:
    """Return the models for the data of a recipe, whose own tokenizer and training stay where they fit.

    Raises InputError: the recipe does not train a classifier.
    """
    _require_classifier(recipe.task, recipe.name, "edgeformer train RECIPE")
    data: Any = recipe.data
    train = split(data, load_with_findings(data)[0])["train"]
    labels = Counter(np.atleast_1d(train.labels).ravel().tolist()) if recipe.task == "classification" else {}
    select_by = "f1" if recipe.task != "classification" or init.is_uneven(labels) else "accuracy"
    content = recipe.model_dump(mode="json", exclude_unset=True)
    content["training"] = _without(content["training"], *DistilledTraining.model_fields)
    shared = _without(content, "name", "description", "target")
    scratch = shared
    if recipe.model.kind != "encoder":
        training = init.encoder_training(len(train), select_by, is_pretrained=False)
        scratch = {**shared, "tokenizer": {"kind": "trained"}, "model": _ENCODER, "training": training}
    linear = None
    if recipe.task != _SPANS:
        shorter = {**shared["data"], "max_length": init.LINEAR_LENGTH}
        linear = {**shared, "data": shorter, "tokenizer": init.LINEAR_TOKENIZER}
        linear |= {"model": init.linear_model(len(data.labels)), "training": {}}
    pretrained = None
    if recipe.model.kind == "pretrained":
        pretrained = {**shared, "model": _without(content["model"], "fold")}
    if source is not None:
        model = {"kind": "pretrained", "source": _absolute(source)}
        if (pooling := open_source(model["source"]).pooling) is not None:  # as its embeddings are made
            model["pooling"] = pooling
        training = init.encoder_training(len(train), select_by, is_pretrained=True)
        pretrained = {**shared, "data": {**shared["data"], "cleaning": "none"}, "model": model, "training": training}
        pretrained.pop("tokenizer", None)
    return _ladder(linear, scratch, pretrained)


def _ladder(
    linear: Mapping[str, Any] | None, scratch: Mapping[str, Any], pretrained: Mapping[str, Any] | None
) -> list[LadderModel]:
    """Return all models; those that need a pretrained encoder only if there is one. ``linear``: None for spans."""
    sizes = {name: f"{width['layers']} layers × 2, width {width['hidden_size']}" for name, width in _WIDTHS.items()}
    encoders = {name: {**scratch, "model": {**scratch["model"], **width}} for name, width in _WIDTHS.items()}
    ladder = []
    if linear is not None:
        ladder.append(LadderModel("linear", "n-grams of characters, a linear model", _without_unlabelled(linear)))
    plain = None if pretrained is None else _without_unlabelled(pretrained)
    if plain is not None and linear is not None and "pooling" in plain["model"]:
        training = {**_without(plain["training"], "early_stopping"), "epochs": 0, "start": "frozen"}
        frozen = {**plain, "training": training}
        ladder.append(LadderModel(_FROZEN, "logistic regression on the pretrained encoder's vectors", frozen))
    ladder += [
        LadderModel(name, f"encoder of {sizes[name]}", _without_unlabelled(sections), smaller=smaller)
        for (name, sections), smaller in zip(encoders.items(), (None, "small"), strict=True)
    ]
    if pretrained is None or plain is None:
        return ladder
    if linear is not None and "pooling" in plain["model"]:
        plain = {**plain, "training": {**plain["training"], "start": "frozen"}}
    # For spans there is no frozen model, and encoders without pretraining take more time to find fewer: they come last.
    place = len(ladder) if linear is not None else 0
    ladder.insert(place, LadderModel(_TEACHER, "the pretrained encoder, fine-tuned", plain))
    if scratch["task"] != "classification" or linear is None:
        return ladder

    def taught(sections: Mapping[str, Any], distillation: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        return {**sections, "training": {**sections.get("training", {}), **changes, "distillation": distillation}}

    layers = int(open_source(pretrained["model"]["source"]).config["num_hidden_layers"]) // _ITERATIONS
    fold = {**pretrained, "model": {**pretrained["model"], "fold": {"layers": max(1, layers), **_FOLD}}}
    fold = taught(fold, {**_DISTILLATION, "states": 1.0}, optimizer={"lr": 1.5e-4})
    teachers, light = (_FROZEN, _TEACHER), taught(encoders["light"], _DISTILLATION)
    return [
        *ladder,
        LadderModel("folded", "the pretrained encoder folded into shared layers × 2", fold, (_TEACHER,)),
        LadderModel("linear-distilled", "characters, taught", taught(linear, _SOFT_LABELS), teachers, "linear"),
        LadderModel("light-distilled", "the light encoder, taught", light, teachers, "light"),
    ]


def _without_unlabelled(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections without further texts, which only a model with a teacher learns from."""
    return {**sections, "data": _without(sections["data"], "unlabelled", "unlabelled_unit")}


def _without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _absolute(source: str) -> str:
    """Return a folder as an absolute path; a name on the hub stays."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source
