"""A model's weights on disk: plain safetensors with the names of the module's parameters."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import replacing


def save_weights(model: nn.Module, path: Path) -> None:
    """``model.safetensors``; every tensor on the CPU and contiguous."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    # Through `replacing`, because safetensors makes files that only their owner can read.
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})


def load_weights(model: nn.Module, path: Path) -> None:
    """Load ``path`` into ``model`` and put it into evaluation mode.

    Raises:
        ArtifactError: the file is missing, damaged, or holds other tensors than the model has.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}; copy or train it again") from None
    problems = misfits(model.state_dict(), state)
    if problems:
        raise ArtifactError(f"{path}: does not fit the recipe beside it: {'; '.join(problems[:5])}")
    model.load_state_dict(state)
    model.eval()


def misfits(expected: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    """What keeps ``state`` from being loaded: missing, unexpected and misshapen tensors, by name."""
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} is {list(state[name].shape)}, not {list(expected[name].shape)}"
        for name in expected.keys() & state.keys()
        if state[name].shape != expected[name].shape
    ]
    return sorted(problems)


def count_parameters(model: nn.Module) -> int:
    """Parameters, each shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
