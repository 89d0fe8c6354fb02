"""Builders that convert torch modules say why they cannot build something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.executorch.builder import ExecuTorchBuilder
from edgeformer.runtimes.module_builder import ModuleBuilder
from edgeformer.runtimes.runtime import Target, Unavailable
from tests.runtimes.looped_module import Branching, graph, job_for


@pytest.mark.parametrize(
    ("builder", "problem"),
    [
        (CoreMLBuilder(), "coremltools cannot convert this model"),
        (ExecuTorchBuilder(), "ExecuTorch cannot lower this model"),
    ],
    ids=["coreml", "executorch"],
)
def test_what_cannot_be_built_says_why(
    builder: ModuleBuilder, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_module(graph: ArtifactManifest) -> Any:
        raise EdgeformerError("an imported graph has no torch module")

    if (missing := builder.package.missing()) is not None:
        pytest.skip(missing)
    target = Target(builder.name, precision=next(iter(builder.endings)))
    job = job_for(tmp_path, "fp32", module=no_module)
    (imported,) = builder.build(target, job)
    assert (imported.status, imported.reason) == ("unavailable", "an imported graph has no torch module")
    (branching,) = builder.build(target, replace(job, module=lambda graph: Branching().eval()))
    assert branching.status == "rejected" and problem in str(branching.reason)
    (refused,) = builder.build(target, replace(job, graphs=(graph(id="onnx-fp32-decode", role="decode"),)))
    assert refused.status == "rejected" and "caches of earlier tokens are not supported" in str(refused.reason)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = builder.plan(None)
    assert isinstance(plan, Unavailable) and f"[{builder.name}]" in plan.reason
