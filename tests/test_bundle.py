"""Bundle: only files that the manifest lists are opened, after a comparison with their checksums, to the last bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, helper

from edgeformer.artifacts import bundle_files
from edgeformer.artifacts.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.bundle import Bundle
from edgeformer.runtimes import OpenOptions, cannot_run, default_provider
from tests.cli.run_cli import edgeformer as edgeformer_command
from tests.conftest import OLD_FORMAT
from tests.fakes.install import installed
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest
from tests.torture.flipped_bytes import ENGINE, classifier, flipped, language_model, outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def test_listed_artifacts_open(folder: Path) -> None:
    bundle, ids = Bundle.open(folder), np.ones((1, 4), np.int64)
    with bundle.session(bundle.artifact("model"), OpenOptions(threads=1)) as session:
        assert session.provider == default_provider()
        assert session.run({"input_ids": ids, "attention_mask": ids})["logits"].shape == (1, 2)
        with pytest.raises(InputError, match="at most 24"):
            session.run({"input_ids": np.ones((1, 25), np.int64), "attention_mask": np.ones((1, 25), np.int64)})
    with pytest.raises(InputError, match=r"--artifact absent: .*bundle has model"):
        bundle.artifact("absent")


def test_a_damaged_file_is_refused(folder: Path) -> None:
    file = folder / "onnx" / "model.onnx"
    content = file.read_bytes()
    for damaged, message in (
        (content[:1000], r"model\.onnx: truncated: 1,000 of [0-9,]+ bytes.*export the run again"),
        (content[:-1] + b"\xff", r"model\.onnx: changed since it was exported.*copy the whole bundle"),
    ):
        file.write_bytes(damaged)
        bundle = Bundle.open(folder)
        with pytest.raises(ArtifactError, match=message):
            bundle.session(bundle.artifact("model"))
    file.unlink()
    bundle = Bundle.open(folder)
    with pytest.raises(ArtifactError, match=r"model\.onnx: cannot be read"):
        bundle.session(bundle.artifact("model"))


def test_changed_weights_and_golden_inputs_are_noticed(folder: Path) -> None:
    assert len(Bundle.open(folder).golden()) == 5
    with (folder / "golden.npz").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match=r"golden\.npz: changed"):
        Bundle.open(folder).golden()
    weights = folder / "onnx" / "weights.bin"
    weights.write_bytes(b"shared")
    files = {"onnx/weights.bin": sha256_of(weights)}
    write_manifest(folder, [artifact_of(folder, "onnx/model.onnx")], files=files)
    Bundle.open(folder).check(Bundle.open(folder).artifact("model"))
    weights.write_bytes(b"Shared")
    with pytest.raises(ArtifactError, match=r"weights\.bin: changed"):
        Bundle.open(folder).check(Bundle.open(folder).artifact("model"))


@pytest.mark.parametrize("place", ["file", "weights_file", "parts", "link"])
def test_a_manifest_cannot_point_outside_its_bundle(folder: Path, place: str) -> None:
    file, outside = folder / "onnx" / "model.onnx", folder.parent / "outside.onnx"
    outside.write_bytes(file.read_bytes())
    if place == "link":
        file.unlink()
        file.symlink_to(outside)
    else:
        changes = {place: {"loop": "../outside.onnx"} if place == "parts" else "../outside.onnx"}
        entry = artifact_of(folder, "onnx/model.onnx", **changes, sha256=sha256_of(outside))
        write_manifest(folder, [entry], files={"../outside.onnx": sha256_of(outside)})
    bundle = Bundle.open(folder)
    with pytest.raises(ArtifactError, match="outside the bundle"):
        bundle.files(bundle.artifact("model"))


def test_files_without_a_checksum_are_not_opened(folder: Path) -> None:
    write_manifest(folder, [artifact_of(folder, "onnx/model.onnx", sha256=None)], files={})
    bundle = Bundle.open(folder)
    with pytest.raises(ArtifactError, match=r"model needs onnx/model\.onnx, which is not listed with a checksum"):
        bundle.session(bundle.artifact("model"))
    with pytest.raises(ArtifactError, match=r"golden\.npz is needed, which is not listed"):
        bundle.golden()


FOR_A_CARD = {"format": "tensorrt-rtx", "built_for": {"compute_capability": "8.9"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "rejected", "reason": "parity 0.4 above 0.05", "file": None}, r"not built \(rejected: parity 0\.4"),
        (FOR_A_CARD, r"engine was built for compute capability 8\.9 and cannot run here"),
        ({"format": "abacus"}, "opens the format 'abacus', only .*onnx"),
    ],
    ids=["rejected", "another GPU", "unknown format"],
)
def test_what_cannot_run_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    artifact = artifact_of(folder, "onnx/model.onnx", **changes)
    write_manifest(folder, [artifact])
    assert cannot_run(artifact) or changes.get("status")
    with pytest.raises((ArtifactError, MissingDependencyError), match=message):
        Bundle.open(folder).session(artifact)


def test_every_file_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(bundle_files, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    bundle = Bundle.open(OLD_FORMAT / "language-v1" / "bundle")
    for id_ in ("onnx-fp32", "onnx-fp32-exit2", "onnx-fp32"):
        bundle.check(bundle.artifact(id_))
    assert sorted(hashed) == ["model.onnx", "model.onnx_data", "model_exit2.onnx"]


def test_exits_and_loops() -> None:
    classifier, language = (Bundle.open(OLD_FORMAT / name / "bundle") for name in ("classifier-v1", "language-v1"))
    assert (classifier.loops, language.loops) == (2, 4)
    exits = {"onnx-fp32": (), "onnx-fp32-exit1": (1,), "onnx-fp32-step": (1, 2)}
    assert {a.id: classifier.exits(a) for a in classifier.built() if a.precision == "fp32"} == exits
    exits, roles = {"onnx-fp32": (4,), "onnx-fp32-exit2": (2,), "onnx-fp32-step": (2, 4)}, ("full", "exit", "step")
    assert {a.id: language.exits(a) for a in language.built(*roles) if a.precision == "fp32"} == exits


def test_trimmed_artifacts_have_their_own_tokenizer_and_golden_inputs() -> None:
    bundle = Bundle.open(OLD_FORMAT / "classifier-v1" / "bundle")
    untrimmed, trimmed = bundle.artifact("onnx-fp16"), bundle.artifact("onnx-fp16-trim")
    assert bundle.reader(trimmed).vocabulary < bundle.reader(untrimmed).vocabulary
    assert bundle.reader(untrimmed) is bundle.reader() is not bundle.reader(trimmed)
    assert int(bundle.golden(trimmed).arrays["input_ids"].max()) < bundle.reader(trimmed).vocabulary


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", tmp_path / "bundle"))
    (folder / "config.json").write_text('{"iterations": "many"}', encoding="utf-8")
    manifest = Bundle.open(folder).manifest
    files = {**manifest.files, "config.json": sha256_of(folder / "config.json")}
    bundle = Bundle(folder, manifest.model_copy(update={"files": files}))
    with pytest.raises(ArtifactError, match=r"config\.json: damaged \(iterations: "):
        _ = bundle.loops
    with pytest.raises(ArtifactError, match=r"config\.json: damaged \(vocab_size: "):
        bundle.reader()


def graph_with(location: str, *, inside: bool = False) -> onnx.ModelProto:
    """Return the tiny classifier with its head in another file; ``inside``: named by a subgraph of a node."""
    model = classifier_graph()
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    foreign = onnx.TensorProto()
    foreign.CopyFrom(head)
    external_data_helper.set_external_data(foreign, location, offset=0, length=len(head.raw_data))
    foreign.ClearField("raw_data")
    if inside:
        branch = helper.make_graph([], "branch", [], [], [foreign])
        model.graph.node.append(helper.make_node("If", ["input_ids"], [], then_branch=branch, else_branch=branch))
    else:
        head.CopyFrom(foreign)
    return model


def weights_of_head() -> bytes:
    return next(bytes(t.raw_data) for t in classifier_graph().graph.initializer if t.name == "head")


class TestExternalData:
    """A graph can name files for the runtime to read; only unchanged files of the manifest are allowed."""

    def bundle(self, folder: Path, location: str, files: dict[str, bytes], *, inside: bool = False) -> Bundle:
        (folder / "onnx" / "model.onnx").write_bytes(graph_with(location, inside=inside).SerializeToString())
        for name, content in files.items():
            (folder / name).write_bytes(content)
        listed = {name: sha256_of(folder / name) for name in files}
        write_manifest(folder, [artifact_of(folder, "onnx/model.onnx")], files=listed)
        return Bundle.open(folder)

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_file_that_is_not_listed(self, folder: Path, inside: bool) -> None:
        """ONNX Runtime would read it: it checks the folder, not the manifest."""
        bundle = self.bundle(folder, "secret.bin", {}, inside=inside)
        (folder / "onnx" / "secret.bin").write_bytes(weights_of_head())
        with pytest.raises(ArtifactError, match=r"reads weights from onnx/secret\.bin, which is not listed"):
            bundle.session(bundle.artifact("model"))

    @pytest.mark.parametrize(
        "location",
        ["../../secret.bin", "../golden.npz/../../secret.bin", "ABSOLUTE", "C:/secret.bin", "C:secret.bin",
         "\\\\server\\secret.bin", "..\\secret.bin", "./secret.bin", "", "*/_ORT_MEM_ADDR_/*", "a\0b"],
    )  # fmt: skip
    def test_outside_of_the_bundle(self, folder: Path, location: str) -> None:
        secret = folder.parent / "secret.bin"
        secret.write_bytes(weights_of_head())
        bundle = self.bundle(folder, str(secret) if location == "ABSOLUTE" else location, {})
        with pytest.raises(ArtifactError, match=r"outside the bundle|no file name|not listed"):
            bundle.session(bundle.artifact("model"))
        (folder / "onnx" / "link.bin").symlink_to(secret)
        bundle = self.bundle(folder, "link.bin", {"onnx/link.bin": weights_of_head()})
        with pytest.raises(ArtifactError, match="outside the bundle"):
            bundle.session(bundle.artifact("model"))
        secret.unlink()

    def test_code_compiled_for_a_provider(self, folder: Path) -> None:
        model = classifier_graph()
        model.graph.node.append(helper.make_node("EPContext", [], [], domain="com.microsoft", ep_cache_context="x"))
        (folder / "onnx" / "model.onnx").write_bytes(model.SerializeToString())
        write_manifest(folder, [artifact_of(folder, "onnx/model.onnx")])
        with pytest.raises(ArtifactError, match="EPContext"):
            Bundle.open(folder).session(Bundle.open(folder).artifact("model"))

    @pytest.mark.slow
    def test_every_command_refuses(self, tmp_path: Path) -> None:
        folder = tmp_path / "bundle"
        shutil.copytree(OLD_FORMAT / "classifier-v1" / "bundle", folder)
        path = folder / "onnx" / "model.onnx"
        model, original_sha256 = onnx.load(path), sha256_of(path)
        table = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        (folder / "onnx" / "secret.bin").write_bytes(table.raw_data)
        external_data_helper.set_external_data(table, "secret.bin", offset=0, length=len(table.raw_data))
        table.ClearField("raw_data")
        path.write_bytes(model.SerializeToString())
        manifest = folder / "bundle.json"
        listed = manifest.read_text(encoding="utf-8").replace(original_sha256, sha256_of(path))
        manifest.write_text(listed, encoding="utf-8")
        (tmp_path / "data.tsv").write_text("label\ttext\nnegative\tx\npositive\ty\n", encoding="utf-8")
        arguments = {
            "evaluate": ["--data", "data.tsv", "--artifact", "onnx-fp32"],
            "predict": ["text", "--artifact", "onnx-fp32"],
            "profile": ["--device", "host", "--batch", "1", "--seq", "8"],
            "verify": ["--json"],
        }
        for command, options in arguments.items():
            outcome = edgeformer_command(command, str(folder), *options, cwd=tmp_path)
            assert outcome.code in (2, 3), outcome
            assert "secret.bin, which is not listed" in (outcome.out + outcome.err), outcome


def test_locations_are_those_that_the_onnx_package_sees() -> None:
    for path in OLD_FORMAT.glob("*/bundle/onnx/*.onnx"):
        model = onnx.load(path, load_external_data=False)
        tensors = [tensor for tensor in model.graph.initializer if external_data_helper.uses_external_data(tensor)]
        expected = {external_data_helper.ExternalDataInfo(tensor).location for tensor in tensors}
        assert external_files(path) == expected, path


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x3a\xff\xff\xff\xff\x0f", b"\x3b\x3c", b"\x3a\x05abc", b"\x08"]
)
def test_invalid_graphs_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="not an ONNX graph"):
        external_files(path)


WEIGHTS = "onnx/model.onnx_data"
USED = [
    ("onnx/model.onnx", "onnx-fp32", "verify predict evaluate profile"),
    ("onnx/step_readout.onnx", "onnx-fp32-step", "verify predict evaluate profile"),
    ("trimmed/tokenizer.json", "onnx-int8-trim", "verify predict evaluate"),
    (ENGINE, "onnx-reference-fp32", "verify predict evaluate profile"),
    ("tokenizer.json", "onnx-fp32", "verify predict evaluate"),
    ("config.json", "onnx-fp32", "verify predict evaluate"),
    ("golden.npz", "onnx-fp32", "verify profile"),
    ("bundle.json", "onnx-fp32", "verify predict evaluate profile"),
    (WEIGHTS, "onnx-fp32", "verify evaluate profile"),
    (WEIGHTS, "onnx-fp32-decode", "verify generate profile"),
]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("flipped")
    with installed("reference_runtime"):
        yield classifier(folder), language_model(folder)


@pytest.mark.parametrize("bit", range(8))
def test_every_flip_of_a_manifest_is_noticed(bundles: tuple[Path, Path], bit: int) -> None:
    """Also of a blank, of a figure, and of the checksum by which it is noticed."""
    path = bundles[0] / "bundle.json"
    content = path.read_bytes()
    own = content.index(b'"manifest_sha256"')
    places = {*range(own, len(content), 3), *range(0, own, own // 40)}
    for place in sorted(places):
        with flipped(path, place, bit), pytest.raises(ArtifactError, match=r"bundle\.json"):
            Bundle.open(bundles[0])


@pytest.mark.parametrize(("name", "artifact", "commands"), USED)
def test_it_is_noticed_and_named(bundles: tuple[Path, Path], name: str, artifact: str, commands: str) -> None:
    bundle = bundles[name == WEIGHTS]
    assert outcome("verify", bundle, artifact) == (0, "")
    with flipped(bundle / name, 0 if name == "bundle.json" else (bundle / name).stat().st_size // 2):
        for command in commands.split():
            code, message = outcome(command, bundle, artifact)
            assert code == 2 and name in message, (command, code, message)
