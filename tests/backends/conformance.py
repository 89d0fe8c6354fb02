"""What every backend must do, as checks that a test calls with the backend at hand. See CONTRIBUTING on adding one.

Each check raises AssertionError with what is wrong. None of them knows a runtime's name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgeformer.backends import (
    ROOM,
    ArtifactFiles,
    Backend,
    Builder,
    BuildJob,
    OpenOptions,
    Target,
    Unavailable,
    all_backends,
    all_builders,
    backend_of,
    builder_named,
    builder_of,
)
from edgeformer.backends.backend import ENGINES_FOLDER
from edgeformer.backends.session import Array, Session
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest

HEAVY = ("torch", "onnx", "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "torch_tensorrt")
DEVICES = ("rtx4050", "h200", "jetson-orin-nano-8gb", "intel-n100")


def check_identity(backend: Backend) -> None:
    """It is found by its name and by each of its formats, and takes neither from another."""
    assert isinstance(backend.name, str) and backend.name
    assert ROOM.find(backend.name) is backend
    assert [other.name for other in all_backends()].count(backend.name) == 1
    for format_ in backend.formats:
        assert backend_of(format_) is backend
        assert [format_ in other.formats for other in all_backends()].count(True) == 1


def check_light(backend: Backend) -> None:
    """Importing it, in a process of its own, loads no runtime."""
    program = (
        "import sys\nfrom edgeformer.backends import ROOM\n"
        f"ROOM.find({backend.name!r}).provider_facts('nobody')\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def check_capabilities(backend: Backend) -> None:
    """At least one line of `doctor`; what does not work says why."""
    lines = backend.capabilities(timeout_s=60)
    names = [line.name for line in lines]
    assert lines and len(set(names)) == len(names)
    silent = [line.name for line in lines if line.status == "unavailable" and not line.detail]
    assert not silent, f"unavailable without a reason: {silent}"


def check_providers(backend: Backend) -> None:
    """It knows what it names, whatever asks; and is silent about what is not its own."""
    computing = [*backend.providers(), *(backend.provider(entry(format_)) for format_ in backend.formats)]
    for provider in computing:
        facts = backend.provider_facts(provider)
        assert facts is not None and facts.label, f"{provider}: its own backend does not know it"
    assert backend.provider_facts("nobody's provider") is None
    for format_ in backend.formats:
        for kind in ("cpu", "cuda"):
            assert backend.provider(entry(format_), kind=kind)  # type: ignore[arg-type]


def check_estimable(backend: Backend) -> None:
    """Of every format and device it says whether something can be estimated, or why not."""
    for format_ in backend.formats:
        for name in DEVICES:
            reason = backend.estimable(entry(format_), load_profile(name))
            assert reason is None or len(reason) > 10
        assert backend.fuses(entry(format_)) in (True, False)


def check_builders(backend: Backend) -> None:
    """Its builders are found by name and format, make what a backend opens, and say what that would be, or why not."""
    for builder in backend.builders:
        assert builder_named(builder.name) is builder
        assert [other.flag for other in all_builders()].count(builder.flag) == 1
        for format_ in builder.formats:
            assert builder_of(format_) is builder
            assert format_ in backend_of(format_).formats
        for device in map(load_profile, DEVICES):
            plan = builder.plan(device)
            assert isinstance(plan, Target | Unavailable) and plan.format in builder.formats
            assert isinstance(plan, Target) or plan.reason
        if not builder.needs_device:
            assert isinstance(builder.plan(None), Target | Unavailable)


def check_refusals(backend: Backend, files: ArtifactFiles, folder: Path) -> None:
    """A missing or damaged file, an impossible provider, rows that cannot leave, texts that cannot be written.

    Args:
        backend: opens ``files``.
        files: of a full artifact in one of its formats.
        folder: for a damaged copy.
    """
    wrong = (ArtifactError, MissingDependencyError)
    damaged = folder / f"damaged{files.file.suffix}"
    damaged.write_bytes(files.file.read_bytes()[:100])
    for path in (damaged, folder / f"absent{files.file.suffix}"):
        with pytest.raises(wrong, match=path.name):
            backend.open(ArtifactFiles(files.artifact, path), OpenOptions())
    early = OpenOptions(early={1: 0.5})
    with pytest.raises(InputError, match="always runs all of its loops"):
        backend.open(files, early)
    with pytest.raises((InputError, MissingDependencyError), match=files.artifact.id):
        backend.open_decoder(files, None, OpenOptions())


def check_session(session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Everything that :class:`Session` promises. Returns the outputs; the session is closed afterwards.

    Args:
        session: an opened full artifact.
        inputs: some that it takes, int64 [batch, seq].
    """
    assert isinstance(session.provider, str) and session.provider
    outputs = session.run(inputs)
    assert "logits" in outputs and len(outputs["logits"]) == len(inputs["input_ids"])
    assert outputs["logits"].dtype == np.float32
    again = session.run({**inputs, "not_an_input": inputs["input_ids"]})
    np.testing.assert_array_equal(outputs["logits"], again["logits"])
    one = session.run({name: np.ascontiguousarray(array[:1]) for name, array in inputs.items()})
    np.testing.assert_allclose(one["logits"], outputs["logits"][:1], atol=1e-4)
    for broken in ({}, {**inputs, "input_ids": inputs["input_ids"].astype(np.float64)}, _empty(inputs)):
        with pytest.raises(InputError, match="input_ids"):
            session.run(broken)
    device_ms, memory, placement = session.device_ms(inputs), session.memory_by_name(), session.placement()
    assert device_ms is None or device_ms > 0
    assert all(isinstance(size, int) and size >= 0 for size in memory.values())
    assert placement is None or all(nodes > 0 for nodes in placement.values())
    assert all(isinstance(note, str) and note for note in session.caveats())
    session.close()
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run(inputs)
    return outputs


def check_build(builder: Builder, target: Target, job: BuildJob) -> list[ArtifactManifest]:
    """What it builds is where and what it says. Returns it.

    Args:
        builder: under test.
        target: from its ``plan``.
        job: with at least one full graph in FP32.
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
            assert artifact.inputs == job.graphs[0].inputs and artifact.parity is not None
    return built


def entry(format_: str) -> ArtifactManifest:
    """A full artifact of a format, as a manifest would list it."""
    return ArtifactManifest(
        id=f"{format_}-fp32", file=f"{ENGINES_FOLDER}/model.engine", format=format_, precision="fp32", status="built"
    )


def _empty(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array[:0] for name, array in inputs.items()}
