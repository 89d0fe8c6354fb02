"""A run's own weights in torch, opened to be scored or to write. torch is imported when one of them is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.formats.errors import MissingDependencyError, install_hint
from edgeformer.formats.recipe import Recipe
from edgeformer.tasks import task_named
from edgeformer.tasks.early_exit import exit_logits

if TYPE_CHECKING:
    from edgeformer.backends.decoder import Decoder
    from edgeformer.backends.session import Session
    from edgeformer.families.network import Network


def computed_by(runtime: str) -> bool:
    """Whether ``--runtime`` names what the weights can be computed with: torch on one kind of device."""
    from edgeformer.backends.torch import BACKEND  # like torch itself, only for those who ask for it

    return BACKEND.provider_facts(runtime) is not None


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
    model, network = _load(folder, recipe, "scoring", provider)
    from edgeformer.backends.torch.session import TorchSession

    if exits:
        names = task_named(recipe.task).golden_names[0]
        return TorchSession(network.exits(model), names, outputs=tuple(map(exit_logits, exits)))
    scorer: Any = network.scorer(model)
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
    model, network = _load(folder, recipe, "writing with", provider)
    from edgeformer.backends.torch.session import torch_decoder

    return torch_decoder(network.decoder(model))


def _load(folder: Path, recipe: Recipe, purpose: str, provider: str | None) -> tuple[Any, Network]:
    from edgeformer.backends.torch import BACKEND

    try:
        from edgeformer.families import family_of
        from edgeformer.families.saving import load_model

        device = BACKEND.device(provider)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{purpose} the run's own weights needs {error.name}: {install_hint('train')}; or export it where that is "
            f"installed (edgeformer export {folder.name}), and choose an artifact of its bundle with --artifact"
        ) from None
    return load_model(folder).to(device), family_of(recipe).network
