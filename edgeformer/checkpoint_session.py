"""A run's own weights in torch, opened to be scored or to write. torch is imported when one of them is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.artifacts.errors import MissingDependencyError, install_hint
from edgeformer.artifacts.recipe import Recipe
from edgeformer.tasks import task_named
from edgeformer.tasks.early_exit import exit_logits

if TYPE_CHECKING:
    from edgeformer.models.adapter import ModelAdapter
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session


def is_torch_provider(runtime: str) -> bool:
    """Return whether ``--runtime`` names a provider of torch, which is what a run's own weights need."""
    from edgeformer.runtimes.torch import RUNTIME

    return RUNTIME.provider_facts(runtime) is not None


def open_session(folder: Path, recipe: Recipe, exits: Sequence[int] = (), provider: str | None = None) -> Session:
    """The weights as a session.

    Args:
        folder: the run's.
        recipe: its own.
        exits: all loops that it can answer after, to answer with ``logits_exitN`` of each; empty: it answers as its
            family scores its models: with ``logits``, or with losses where logits would not fit.
        provider: one of torch's; None: on a CUDA card where torch sees one.

    Raises:
        InputError: the provider is not available here.
        MissingDependencyError: torch is not installed.
        ArtifactError: the weights are missing or damaged.
    """
    model, adapter = _load(folder, recipe, "scoring", provider)
    from edgeformer.runtimes.torch.session import TorchSession

    if exits:
        names = task_named(recipe.task).golden_names[0]
        return TorchSession(adapter.exits(model), names, outputs=tuple(map(exit_logits, exits)))
    scorer: Any = adapter.scorer(model)
    return TorchSession(scorer, scorer.inputs, scorer.optional)


def open_decoder(folder: Path, recipe: Recipe, provider: str | None = None) -> Decoder[Any]:
    """The weights, to write token by token.

    Args:
        folder: the run's.
        recipe: its own.
        provider: as of :func:`open_session`.

    Raises:
        InputError: its family writes no text, or the provider is not available here.
        MissingDependencyError: torch is not installed.
        ArtifactError: the weights are missing or damaged.
    """
    model, adapter = _load(folder, recipe, "writing with", provider)
    from edgeformer.runtimes.torch.session import torch_decoder

    return torch_decoder(adapter.decoder(model))


def _load(folder: Path, recipe: Recipe, purpose: str, provider: str | None) -> tuple[Any, ModelAdapter]:
    from edgeformer.runtimes.torch import RUNTIME

    try:
        from edgeformer.models import model_spec_of
        from edgeformer.models.weights import load_model

        device = RUNTIME.device(provider)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{purpose} the run's own weights needs {error.name}: {install_hint('train')}; or export it where that is "
            f"installed (edgeformer export {folder.name}), and choose an artifact of its bundle with --artifact"
        ) from None
    return load_model(folder).to(device), model_spec_of(recipe).adapter
