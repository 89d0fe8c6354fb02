"""Checks that every runtime must pass; a test calls them with a runtime. See CONTRIBUTING on adding one.

Each check raises AssertionError with what is wrong. None of them knows a runtime's name.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes import REGISTRY, OpenOptions, all_builders, all_runtimes, find_builder, runtime_of
from edgeformer.runtimes.runtime import ENGINES_FOLDER, ArtifactFiles, Builder, BuildJob, Runtime, Target, Unavailable
from edgeformer.runtimes.session import Array, Session

HEAVY = ("torch", "onnx", "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "ai_edge_litert")
DEVICES = ("rtx4050", "h200", "jetson-orin-nano-8gb", "intel-n100")


def check_identity(runtime: Runtime) -> None:
    """It is found by its name and by each of its formats, and takes neither from another."""
    assert isinstance(runtime.name, str) and runtime.name
    assert REGISTRY.find(runtime.name) is runtime
    assert [other.name for other in all_runtimes()].count(runtime.name) == 1
    for format_ in runtime.formats:
        assert runtime_of(format_) is runtime
        assert [format_ in other.formats for other in all_runtimes()].count(True) == 1


def check_light(runtime: Runtime) -> None:
    """Importing it, in a separate process, imports no runtime library."""
    program = (
        "import sys\nfrom edgeformer.runtimes import REGISTRY\n"
        f"REGISTRY.find({runtime.name!r}).provider_facts('unknown')\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def check_capabilities(runtime: Runtime) -> None:
    """At least one line of `doctor`; what does not work says why."""
    lines = runtime.capabilities(timeout_s=60)
    names = [line.name for line in lines]
    assert lines and len(set(names)) == len(names)
    silent = [line.name for line in lines if line.status == "unavailable" and not line.detail]
    assert not silent, f"unavailable without a reason: {silent}"


def check_providers(runtime: Runtime) -> None:
    """It knows what it names, whatever asks; and is silent about what is not its own."""
    computing = [runtime.provider(entry(format_)) for format_ in runtime.formats]
    computing += [provider for format_ in runtime.formats for provider in runtime.offers(entry(format_))]
    for provider in computing:
        facts = runtime.provider_facts(provider)
        assert facts is not None and facts.label, f"{provider}: its runtime does not know it"
    assert runtime.provider_facts("unknown provider") is None
    for format_ in runtime.formats:
        for kind in ("cpu", "cuda"):
            assert runtime.provider(entry(format_), kind=kind)  # type: ignore[arg-type]


def check_estimable(runtime: Runtime) -> None:
    """Of every format and device it says whether something can be estimated, or why not."""
    for format_ in runtime.formats:
        for name in DEVICES:
            reason = runtime.estimable(entry(format_), load_profile(name))
            assert reason is None or len(reason) > 10
        assert runtime.fuses in (True, False)


def check_builders(runtime: Runtime) -> None:
    """Builders are registered by name and format, build what a runtime opens, and plan a target or a reason."""
    for builder in runtime.builders:
        assert find_builder(builder.name) is builder
        assert [other.flag for other in all_builders()].count(builder.flag) == 1
        for format_ in builder.formats:
            assert [format_ in other.formats for other in all_builders()].count(True) == 1
            assert format_ in runtime_of(format_).formats
        for device in map(load_profile, DEVICES):
            plan = builder.plan(device)
            assert isinstance(plan, Target | Unavailable) and plan.format in builder.formats
            assert isinstance(plan, Target) or plan.reason
        if not builder.needs_device:
            assert isinstance(builder.plan(None), Target | Unavailable)


def check_refusals(runtime: Runtime, files: ArtifactFiles, folder: Path) -> None:
    """A missing or damaged file, an impossible provider, rows that cannot leave, texts that cannot be written.

    ``files`` are of a full artifact in one of its formats; a damaged copy goes into ``folder``.
    """
    wrong = (ArtifactError, MissingDependencyError)
    damaged = folder / f"damaged{files.file.suffix}"
    damaged.write_bytes(files.file.read_bytes()[:100])
    for path in (damaged, folder / f"absent{files.file.suffix}"):
        with pytest.raises(wrong, match=path.name):
            runtime.open(ArtifactFiles(files.artifact, path), OpenOptions())
    early = OpenOptions(early={1: 0.5})
    with pytest.raises(InputError, match="always runs all loops"):
        runtime.open(files, early)
    with pytest.raises((InputError, MissingDependencyError), match=files.artifact.id):
        runtime.open_decoder(files, None, OpenOptions())


def check_session(session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Everything that :class:`Session` promises, of an opened full artifact and inputs int64 [batch, seq].

    Returns the outputs; the session is closed afterwards.
    """
    assert isinstance(session.provider, str) and session.provider
    outputs = session.run(inputs)
    assert "logits" in outputs and len(outputs["logits"]) == len(inputs["input_ids"])
    assert outputs["logits"].dtype == np.float32
    repeated = session.run({**inputs, "not_an_input": inputs["input_ids"]})
    np.testing.assert_array_equal(outputs["logits"], repeated["logits"])
    first_row = session.run({name: np.ascontiguousarray(array[:1]) for name, array in inputs.items()})
    np.testing.assert_allclose(first_row["logits"], outputs["logits"][:1], atol=1e-4)
    empty = {name: array[:0] for name, array in inputs.items()}
    for broken in ({}, {**inputs, "input_ids": inputs["input_ids"].astype(np.float64)}, empty):
        with pytest.raises(InputError, match="input_ids"):
            session.run(broken)
    device_ms, memory, settings = session.device_ms(inputs), session.memory_by_name(), session.settings()
    assert device_ms is None or device_ms > 0
    assert all(isinstance(size, int) and size >= 0 for size in memory.values())
    assert all(nodes > 0 for nodes in settings.get("nodes_by_provider", {}).values())
    assert all(isinstance(note, str) and note for note in session.caveats())
    session.close()
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run(inputs)
    return outputs


def check_build(builder: Builder, target: Target, job: BuildJob) -> list[ArtifactManifest]:
    """What it builds for a target of its ``plan`` is where and what it says. Returns it.

    The job has at least one full graph in FP32.
    """
    built = list(builder.build(target, job))
    assert built and len({artifact.id for artifact in built}) == len(built)
    for artifact in built:
        assert artifact.id not in {graph.id for graph in job.graphs}
        assert artifact.format == target.format
        assert artifact.status == "built" or (artifact.status == "rejected" and artifact.reason)
        if artifact.status == "built":
            assert artifact.file is not None and artifact.file.startswith(f"{ENGINES_FOLDER}/")
            assert artifact.size_bytes == (job.bundle / artifact.file).stat().st_size
            assert artifact.sha256 == sha256_of(job.bundle / artifact.file)
            assert artifact.inputs.keys() == job.graphs[0].inputs.keys() and artifact.parity is not None
    return built


def entry(format_: str) -> ArtifactManifest:
    """A full artifact of a format, as a manifest would list it."""
    return ArtifactManifest(
        id=f"{format_}-fp32", file=f"{ENGINES_FOLDER}/model.engine", format=format_, precision="fp32", status="built"
    )
