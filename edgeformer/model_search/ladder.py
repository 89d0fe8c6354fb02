"""The models of a search, from the cheapest to the most expensive, each as the sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgeformer.artifacts.documents import read_yaml
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import DistilledTraining, Recipe
from edgeformer.data.sources import Columns
from edgeformer.models.pretrained.source import open_source
from edgeformer.training.init import DraftOptions, draft

TEACHER = "pretrained"
"""Model that teaches the others."""

_CHARACTERS = {"kind": "trained", "algorithm": "characters"}
_CHARACTERS_OF_TEXT = 4096
_NGRAMS = [1, 8]
_WIDTHS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "layers": 2, "iterations": 2, "heads": 4, "ffn_size": 512},
    "light": {"hidden_size": 256, "layers": 3, "iterations": 2, "heads": 4, "ffn_size": 1024},
}
_ENCODER = {"kind": "encoder", "vocab_size": 8000, "residual_scale": 0.5}
_ENCODER_TRAINING = {
    "epochs": 5, "batch_size": 64, "precision": "auto", "optimizer": {"lr": 6e-4, "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup": 0.06},
}  # fmt: skip
_FINE_TUNING = {
    "epochs": 2, "batch_size": 32, "precision": "auto", "optimizer": {"lr": 6e-5}, "schedule": {"kind": "linear"},
}  # fmt: skip
_SOFT_LABELS = {"weight": 1.0, "temperature": 2.0}
_DISTILLATION = {"weight": 0.7, "temperature": 2.0}
_ITERATIONS = 2
_FOLD = {
    "iterations": _ITERATIONS, "init": "stepwise", "order": "immediate", "own": "norms", "weights": "teacher",
}  # fmt: skip


@dataclass(frozen=True)
class LadderModel:
    """A model that the search may train.

    Attributes:
        name: in tables, and the end of its run's name.
        description: for people.
        sections: of its recipe, without name and teacher; paths are absolute.
        has_teacher: whether it learns from the run of :data:`TEACHER`.
    """

    name: str
    description: str
    sections: Mapping[str, Any]
    has_teacher: bool = False


def ladder_of_file(data: Path, columns: Columns, source: str | None, progress: Progress) -> list[LadderModel]:
    """Return the models for a file of labelled texts as for ``init``.

    Raises InputError: unusable data or source, or labels that are no classes of whole texts.
    """
    with TemporaryDirectory() as folder:

        def drafted(name: str, start: str | None) -> dict[str, Any]:
            out = Path(folder) / f"{name}.yaml"
            sections = dict(read_yaml(draft(data, DraftOptions(out, columns, start, "search"), progress).path).content)
            sections["data"]["parts"]["train"][0]["path"] = str(data.resolve())
            return sections

        scratch = drafted("scratch", None)
        pretrained = None
        if source is not None:
            pretrained = drafted("pretrained", source)
            pretrained["model"]["source"] = _absolute(source)
    _require_classifier(scratch["task"], str(data), f"edgeformer init {data}, then edgeformer train RECIPE.yaml")
    return _ladder(scratch, pretrained)


def _require_classifier(task: str, place: str, remedy: str) -> None:
    """Raise InputError if a model of that task has no ladder."""
    if task not in ("classification", "multi-label-classification"):
        raise InputError(
            f"{place}: is data of the task {task}, and search trains classifiers of whole texts only; train one model: "
            f"{remedy}"
        )


def ladder_of_recipe(recipe: Recipe, source: str | None) -> list[LadderModel]:
    """Return the models for the data of a recipe, whose own tokenizer and training stay where they fit.

    Raises InputError: the recipe does not train a classifier.
    """
    _require_classifier(recipe.task, recipe.name, "edgeformer train RECIPE")
    content = recipe.model_dump(mode="json", exclude_unset=True)
    for key in DistilledTraining.model_fields:
        content["training"].pop(key, None)
    shared = {key: value for key, value in content.items() if key not in ("name", "description", "target")}
    if recipe.model.kind == "encoder":
        scratch = shared
    else:
        smoothing = {"label_smoothing": 0.05} if recipe.task == "classification" else {}
        training = {**_ENCODER_TRAINING, **smoothing}
        scratch = {**shared, "tokenizer": {"kind": "trained"}, "model": _ENCODER, "training": training}
    pretrained = None
    if recipe.model.kind == "pretrained":
        model = {key: value for key, value in content["model"].items() if key != "fold"}
        pretrained = {**shared, "model": model}
    if source is not None:
        data = {**shared["data"], "cleaning": "none"}
        model = {"kind": "pretrained", "source": _absolute(source)}
        if (pooling := open_source(model["source"]).pooling) is not None:  # as its embeddings are made
            model["pooling"] = pooling
        pretrained = {**shared, "data": data, "model": model, "training": _FINE_TUNING}
        pretrained.pop("tokenizer", None)
    return _ladder(scratch, pretrained)


def _ladder(scratch: Mapping[str, Any], pretrained: Mapping[str, Any] | None) -> list[LadderModel]:
    """Return all models; those that need a pretrained encoder only if there is one, or that have a teacher."""
    data = {**scratch["data"], "max_length": _CHARACTERS_OF_TEXT}
    linear = {
        **scratch, "data": data, "tokenizer": _CHARACTERS, "model": {"kind": "linear", "ngrams": _NGRAMS},
        "training": {},
    }  # fmt: skip
    can_distil = pretrained is not None and scratch["task"] == "classification"

    def models(
        name: str, title: str, sections: Mapping[str, Any], distillation: Mapping[str, Any]
    ) -> list[LadderModel]:
        """Return a model, and the same taught by the pretrained encoder."""
        training = {**sections["training"], "distillation": distillation}
        taught = LadderModel(f"{name}-distilled", f"{title}, taught", {**sections, "training": training}, True)
        return [LadderModel(name, title, _without_unlabelled(sections)), *([taught] if can_distil else [])]

    ladder = models("linear", "n-grams of characters, logistic regression", linear, _SOFT_LABELS)
    for name, width in _WIDTHS.items():
        title = f"encoder of {width['layers']} shared layers × {width['iterations']}, width {width['hidden_size']}"
        encoder = {**scratch, "model": {**scratch["model"], **width}}
        encoders = models(name, title, encoder, _DISTILLATION)
        ladder += encoders if name == "light" else encoders[:1]
    if pretrained is not None:
        if can_distil:
            layers = int(open_source(pretrained["model"]["source"]).config["num_hidden_layers"]) // _ITERATIONS
            folded = {
                **pretrained,
                "model": {**pretrained["model"], "fold": {"layers": max(1, layers), **_FOLD}},
                "training": {
                    **pretrained["training"],
                    "optimizer": {"lr": 1.5e-4},
                    "distillation": {**_DISTILLATION, "states": 1.0},
                },
            }
            ladder.append(LadderModel("folded", "the pretrained encoder folded into shared layers × 2", folded, True))
        ladder.append(LadderModel(TEACHER, "the pretrained encoder, fine-tuned", _without_unlabelled(pretrained)))
    return ladder


def _without_unlabelled(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections without further texts, which only a model with a teacher learns from."""
    data = {key: value for key, value in sections["data"].items() if key not in ("unlabelled", "unlabelled_unit")}
    return {**sections, "data": data}


def _absolute(source: str) -> str:
    """Return a folder as an absolute path; a name on the hub stays."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source
