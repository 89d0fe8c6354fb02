"""Training binds its threads to cores, unless it was given a part of them."""

import os

import pytest


@pytest.mark.parametrize(("threads", "bound"), [(None, "true"), ("1", None)])
def test_only_a_training_with_all_cores_is_bound_to_them(threads, bound, monkeypatch, edgeformer):
    """Two trainings of one thread each would otherwise share the first core."""
    for name, value in (("OMP_PROC_BIND", None), ("OMP_NUM_THREADS", threads)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    edgeformer("train", "no_such_recipe", code=2)
    assert os.environ.get("OMP_PROC_BIND") == bound
