"""Planning without activations: exact where it counts, unknown where it does not."""

from __future__ import annotations

from edgeformer.schema.shipped import load_profile, load_recipe
from edgeformer.stages.training.plan import plan


def test_bytes_of_the_light_model() -> None:
    found = plan(load_recipe("recurrent_sst2"), load_profile("rtx4050"))
    assert found.parameters == 10_972_162
    assert found.breakdown.weights == 4 * 10_972_162
    assert found.at_least_bytes == 16 * 10_972_162
    assert found.budget_bytes == round(5.4 * 2**30)
    assert (found.status, found.fits, found.peak_bytes) == ("unknown", None, None)


def test_what_cannot_fit_is_said() -> None:
    huge = load_recipe("baseline_sst2", ["model.layers=400"])
    found = plan(huge, load_profile("rtx4050"))
    assert (found.status, found.fits) == ("fail", False)
    assert "alone take" in found.reason
