from __future__ import annotations

import pytest

from edgeformer.runtime import nvidia
from edgeformer.schema.device import DeviceProfile, Fact
from edgeformer.schema.shipped import load_profile, shipped_names
from edgeformer.stages.profiling.target import find_target

GIB = 2**30


@pytest.mark.parametrize("name", shipped_names("profiles"))
def test_every_shipped_profile_is_valid_and_honest(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    facts = [getattr(profile, field) for field in DeviceProfile.model_fields]
    for fact in facts:
        assert not isinstance(fact, Fact) or len(fact.source) > 10
    assert profile.budgets.classification.size_bytes is not None


def test_the_budgets_of_the_rtx4050() -> None:
    profile = load_profile("rtx4050")
    assert profile.usable_memory_bytes is not None
    assert profile.usable_memory_bytes.value == round(5.4 * GIB)
    classification, language = profile.budgets.classification, profile.budgets.language_modeling
    assert (classification.latency_p50_ms, classification.batch, classification.seq) == (5, 1, 128)
    assert classification.size_bytes == 100 * 2**20
    assert (language.latency_p50_ms, language.size_bytes) == (20, 512 * 2**20)
    assert profile.compute_capability is not None and profile.compute_capability.value == "8.9"


def test_the_cpu_profile_is_this_host() -> None:
    assert find_target(load_profile("host")).present


def card(name: str) -> nvidia.Gpu:
    return nvidia.Gpu(index=0, name=name, uuid=f"GPU-{name}", memory_bytes=6 * GIB, compute_capability="8.9")


def test_a_card_is_recognised_by_the_name_that_its_driver_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    laptop, server = card("NVIDIA GeForce RTX 4050 Laptop GPU"), card("NVIDIA H200")
    profile = load_profile("rtx4050")
    monkeypatch.setattr(nvidia, "gpus", lambda: [server, laptop])
    found = find_target(profile)
    assert (found.present, found.gpu) == (True, laptop)
    monkeypatch.setattr(nvidia, "gpus", lambda: [server])
    other = find_target(profile)
    assert (other.present, other.gpu) == (False, server)
    assert "NVIDIA H200" in other.reason
    monkeypatch.setattr(nvidia, "gpus", list)
    nothing = find_target(profile)
    assert (nothing.present, nothing.gpu) == (False, None)
    assert "not present on this host (no NVIDIA card)" in nothing.reason


def test_a_cpu_profile_with_a_name_is_only_that_processor() -> None:
    other = load_profile("host").model_copy(update={"match": "No Such Processor"})
    assert not find_target(other).present
