"""Model kinds. Each has one folder here: configuration (without torch), torch module, exportable graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import create_model

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.documents import apply_overrides, find, read_yaml, resolve_paths, validate
from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.manifest import Precision, client_dtype
from edgeformer.artifacts.recipe import ModelConfig, Recipe
from edgeformer.artifacts.workspace import RECIPE_FILE
from edgeformer.registry import Registry
from edgeformer.tasks import RowSource, Task, all_tasks, get_task

if TYPE_CHECKING:
    from edgeformer.models.adapter import ModelAdapter


CLIENT_TYPE = "distilbert"
"""Clients open only a ``model_type`` that they know, and derive from it which inputs to send. DistilBERT stands for any
text encoder that needs only the inputs ``input_ids`` and ``attention_mask``; clients do not look at the layers, and
send ``token_type_ids`` where a graph has that input."""


class ModelSpec(ABC):
    """Torch-free interface of one model kind. ``config`` arguments are of its own ``config_type``.

    Attributes:
        kind: value of ``model.kind`` in a recipe, whose task is one of ``tasks`` or extends one.
        model_type, architecture: names in config.json.
        adapter_module: module that defines ``ADAPTER``, a ModelAdapter. It is imported on first use.
        training_type: section ``training`` of recipes; None: that of the task.
        completed: required keys that a recipe may omit because :meth:`complete` fills them in.
    """

    kind: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    config_type: ClassVar[type[ModelConfig]]
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    adapter_module: ClassVar[str]
    training_type: ClassVar[type[Frozen] | None] = None
    completed: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[tuple[str, ...]] = ("weight-sharing", "recurrent-depth", "edge", "onnx")

    @property
    def adapter(self) -> ModelAdapter:
        """The torch half. Raises ModuleNotFoundError if torch is not installed."""
        adapter: ModelAdapter = import_module(self.adapter_module).ADAPTER
        return adapter

    def complete(self, document: dict[str, Any]) -> None:  # noqa: B027 - most models need no completion
        """Fill in, in place, keys of a recipe, not validated yet, that follow from the model's files.

        Raises InputError or ArtifactError if a file is missing or unusable.
        """

    def serves(self, task: Task) -> bool:
        """Return whether the model does a task: one of ``tasks``, or a task that extends one of them."""
        return any(base.__dict__.get("name") in self.tasks for base in type(task).__mro__)

    @abstractmethod
    def loops(self, config: Any) -> int:
        """Return how often the shared part is applied; 1 for a model without recurrence."""

    def trained_exits(self, config: Any) -> tuple[int, ...]:
        """Return the loops after which a trained head answers, the last loop last; empty for a single head."""
        return ()

    def leaks(self, config: Any) -> bool:
        """Return whether the architecture sees the tokens that it has to predict."""
        return False

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        """Convert a run's config.json to a bundle's, which clients of Hugging Face repositories can open.

        For a classifier with a step artifact it has ``iterations``: how often a host runs the loop graph. ``precision``
        is of the graph that a client loads by default.
        """
        return dict(config)

    @abstractmethod
    def card_line(self, config: Any) -> str:
        """Describe layers, loops and widths in one line of the model card."""


REGISTRY: Registry[ModelSpec] = Registry(__name__, "MODEL", ModelSpec, lambda model_spec: (model_spec.kind,))
"""All model kinds: built-in ones first, then entry points of other packages."""


def text_client_config(config: Mapping[str, Any], precision: Precision, **sizes: int) -> dict[str, Any]:
    """Build a text encoder's config.json for clients (:data:`CLIENT_TYPE`); ``edgeformer`` keeps the original.

    ``sizes``: ``layers`` that a text passes, ``heads``, ``hidden_size``, and ``iterations`` of the loop graph.
    """
    optional = ("id2label", "label2id", "thresholds", "sentence_transformers")
    return {
        "model_type": CLIENT_TYPE,
        "architectures": config["architectures"],
        **({"problem_type": config.get("problem_type", "single_label_classification")} if "id2label" in config else {}),
        "vocab_size": config["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["layers"],
        "iterations": sizes["iterations"],
        "num_attention_heads": sizes["heads"],
        "max_position_embeddings": config["max_positions"],
        "pad_token_id": config["pad_token_id"],
        **{key: config[key] for key in optional if key in config},
        # Without it, Transformers.js looks for model_quantized.onnx in a browser.
        "transformers.js_config": {"dtype": client_dtype(precision)},
        "edgeformer": dict(config),
    }


def model_spec_of(recipe: Recipe) -> ModelSpec:
    """Return the model kind of a recipe. Raises RecipeError for an unknown one."""
    model_spec = REGISTRY.find(recipe.model.kind)
    if model_spec is None:
        available = ", ".join(model_spec.kind for model_spec in REGISTRY.all())
        raise RecipeError(f"model.kind {recipe.model.kind!r} is unknown; available models: {available}")
    return model_spec


@cache
def recipe_type(task: str, kind: str) -> Any:
    """Return the recipe class of a task with the ``model`` section of a model kind, and perhaps its ``training``."""
    base, model_spec = get_task(task).recipe_type, REGISTRY.find(kind)
    assert model_spec is not None
    sections: dict[str, Any] = {"model": (model_spec.config_type, ...)}
    if model_spec.training_type is not None:
        sections["training"] = (model_spec.training_type, model_spec.training_type())
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **sections)


def load_recipe(name: str, overrides: list[str] | None = None, note: Callable[[str], None] | None = None) -> Recipe:
    """Find, read, override and validate a recipe; its ``task`` and its model's ``kind`` select the type.

    Args:
        name: a path, or the name of a shipped recipe. Paths in it become absolute.
        overrides: ``key=value`` each.
        note: receives a message for each path that does not lie beside the recipe.

    Raises RecipeError: the recipe is missing or invalid.
    """
    path = find("recipes", name)
    document = read_yaml(path)
    apply_overrides(document, overrides or [])
    content = document.content

    # The recipe's row count belongs to its own data: drop it if an override changes which rows are read.
    keys = [override.partition("=")[0].strip() for override in overrides or []]
    changes_data = any(key.split(".")[0] in ("data", "tokenizer") or key == "model.vocab_size" for key in keys)
    if changes_data and "data.expected_rows" not in keys and isinstance(content.get("data"), dict):
        content["data"].pop("expected_rows", None)

    # What is missing is reported by the validation below.
    tasks = {task.name: task for task in all_tasks() if isinstance(task, RowSource)}
    task_name, model = content.get("task"), content.get("model")
    if task_name is not None and task_name not in [*tasks]:
        allowed = ", ".join(map(repr, tasks))
        raise RecipeError(f"{document.where(('task',))}: task must be one of {allowed}, not {task_name!r}")
    task = tasks[task_name or next(iter(tasks))]
    model_specs = {model_spec.kind: model_spec for model_spec in REGISTRY.all() if model_spec.serves(task)}
    kind = model.get("kind") if isinstance(model, dict) else None
    if kind is not None and kind not in [*model_specs]:
        where, allowed = document.where(("model", "kind")), ", ".join(map(repr, model_specs))
        raise RecipeError(f"{where}: model.kind must be one of {allowed} for {task.name}, not {kind!r}")
    model_spec = model_specs[kind or next(iter(model_specs))]

    target_type = recipe_type(task.name, model_spec.kind)
    sections = {section: target_type.model_fields[section].annotation.folders for section in ("model", "training")}
    for message in resolve_paths(document, path.parent.resolve(), sections):
        if note is not None:
            note(message)
    model_spec.complete(content)
    recipe: Recipe = validate(target_type, document)
    return recipe


def read_run_recipe(run: Path) -> Recipe:
    """Read the resolved recipe of a run's folder. Raises RecipeError."""
    return load_recipe(str(run / RECIPE_FILE))
