"""A flipped bit in any kind of file of a bundle is noticed by each command that uses it: exit code 2, and its name.

Two hundred random ones are in torture.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.bundle import Bundle
from tests.fakes.install import installed
from tests.torture.flipped_bytes import ENGINE, classifier, flipped, language_model, outcome

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
