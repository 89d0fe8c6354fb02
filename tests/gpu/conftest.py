"""Every test here needs a CUDA card: `pytest -m gpu`. They were written without one, and have run on none yet."""

from collections.abc import Iterator

import pytest

from edgeformer.system import cuda_driver, nvidia


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    """Of the session, so that it comes before others that train something for minutes."""
    if (reason := cuda_driver.problem()) is not None:
        pytest.skip(f"needs a CUDA card: {reason}")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA card: torch {torch.__version__} sees none")


@pytest.fixture(autouse=True)
def card(cuda: None) -> Iterator[str]:
    """The card's name; the test is skipped where there is none, and gives the card's memory back."""
    import torch

    torch.manual_seed(0)
    yield torch.cuda.get_device_name()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture
def gpu(card: str) -> nvidia.Gpu:
    """The same card as NVML knows it."""
    gpus = [gpu for gpu in nvidia.gpus() if gpu.name == card]
    if not gpus:
        pytest.skip(f"NVML knows no {card}")
    return gpus[0]
