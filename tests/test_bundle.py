from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeformer.backends import OpenOptions, default_provider
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.formats.files import sha256_of
from tests.backends.tiny_bundle import artifact_of, write_bundle, write_manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def test_opens_what_the_manifest_lists(bundle: Path) -> None:
    artifact = Bundle.open(bundle).artifacts[0]
    ids = np.ones((1, 4), np.int64)
    with Bundle.open(bundle).session(artifact, OpenOptions(threads=1)) as session:
        assert session.provider == default_provider()
        assert session.run({"input_ids": ids, "attention_mask": ids})["logits"].shape == (1, 2)
        with pytest.raises(InputError, match="at most 24"):
            session.run({"input_ids": np.ones((1, 25), np.int64), "attention_mask": np.ones((1, 25), np.int64)})


def test_a_truncated_file_says_how_much_is_there(bundle: Path) -> None:
    artifact = Bundle.open(bundle).artifacts[0]
    file = bundle / "onnx" / "model.onnx"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"model\.onnx: truncated: 1,000 of [0-9,]+ bytes.*export the run again"):
        Bundle.open(bundle).session(artifact)


def test_a_changed_file_of_the_same_size_is_noticed(bundle: Path) -> None:
    artifact = Bundle.open(bundle).artifacts[0]
    file = bundle / "onnx" / "model.onnx"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=r"model\.onnx: changed since it was exported.*copy the whole bundle"):
        Bundle.open(bundle).session(artifact)


def test_a_missing_file_is_named(bundle: Path) -> None:
    artifact = Bundle.open(bundle).artifacts[0]
    (bundle / "onnx" / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"model\.onnx: cannot be read"):
        Bundle.open(bundle).session(artifact)


def test_changed_weights_beside_the_graph_are_noticed(bundle: Path) -> None:
    weights = bundle / "onnx" / "weights.bin"
    weights.write_bytes(b"shared")
    files = {"onnx/weights.bin": sha256_of(weights)}
    manifest = write_manifest(bundle, [artifact_of(bundle, "onnx/model.onnx")], files=files)
    Bundle.open(bundle).check(manifest.artifacts[0])
    weights.write_bytes(b"Shared")
    with pytest.raises(ArtifactError, match=r"weights\.bin: changed"):
        Bundle.open(bundle).check(manifest.artifacts[0])


def test_a_manifest_cannot_point_outside_its_bundle(bundle: Path) -> None:
    outside = bundle.parent / "outside.onnx"
    outside.write_bytes(b"")
    artifact = artifact_of(bundle, "onnx/model.onnx", file="../outside.onnx")
    with pytest.raises(ArtifactError, match="outside the bundle"):
        Bundle.open(bundle).check(artifact)


def test_what_was_not_built_is_refused_with_its_reason(bundle: Path) -> None:
    artifact = artifact_of(bundle, "onnx/model.onnx", status="rejected", reason="parity 0.4 above 0.05", file=None)
    with pytest.raises(ArtifactError, match=r"not built \(rejected: parity 0\.4"):
        Bundle.open(bundle).session(artifact)


def test_an_engine_is_refused_with_what_it_was_built_for(bundle: Path) -> None:
    built_for = {"compute_capability": "8.9"}
    artifact = artifact_of(bundle, "onnx/model.onnx", format="tensorrt-rtx", built_for=built_for)
    with pytest.raises(
        MissingDependencyError, match=r"engine was built for compute capability 8\.9 and cannot run here"
    ):
        Bundle.open(bundle).session(artifact)


def test_a_companion_that_the_manifest_lists_is_checked(bundle: Path) -> None:
    Bundle.open(bundle).companion("golden.npz")
    with (bundle / "golden.npz").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"golden\.npz: changed"):
        Bundle.open(bundle).companion("golden.npz")


def test_importing_the_runtime_loads_neither_torch_nor_onnxruntime() -> None:
    program = (
        "import sys, edgeformer.bundle, edgeformer.backends.session; edgeformer.backends.all_backends()\n"
        "print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
