"""One flipped bit in a file of a bundle, and what each command that opens bundles makes of it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.report import MeasureRules
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import verify
from edgeformer.run import Location

OLD = Path(__file__).resolve().parents[1] / "old_format"
ENGINE = "engines/model.reference.onnx"
_FAST = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.1, min_s=0.01, max_s=0.2, idle_s=0.01, energy_s=0.01)


def classifier(folder: Path) -> Path:
    """A bundle with an artifact of another runtime too, which the package in tests/fakes/reference_runtime opens."""
    bundle = Path(shutil.copytree(OLD / "classifier-v1" / "bundle", folder / "classifier"))
    (bundle / "engines").mkdir()
    shutil.copy(bundle / "onnx" / "model.onnx", bundle / ENGINE)
    opened = Bundle.open(bundle)
    update = {"id": "onnx-reference-fp32", "format": "onnx-reference", "file": ENGINE}
    engine = opened.artifact("onnx-fp32").model_copy(update={**update, "sha256": sha256_of(bundle / ENGINE)})
    seal(bundle, opened.manifest.model_copy(update={"artifacts": (*opened.artifacts, engine)}))
    return bundle


def language_model(folder: Path) -> Path:
    """A bundle whose graphs share a file of weights."""
    return Path(shutil.copytree(OLD / "language-v1" / "bundle", folder / "language"))


@contextmanager
def flipped(path: Path, place: int, bit: int = 0) -> Iterator[None]:
    """A file with one bit of the byte at ``place`` changed, for as long as the context lasts."""
    content = path.read_bytes()
    harmed = bytearray(content)
    harmed[place] ^= 1 << bit
    path.write_bytes(harmed)
    try:
        yield
    finally:
        path.write_bytes(content)


def _verify(bundle: Path, artifact: str) -> None:
    results = verify(Bundle.open(bundle), artifact)
    bad = [file.file for file in results.files if file.status != "intact"]
    if bad:
        error = EdgeformerError(", ".join(bad))
        error.exit_code = results.exit_code
        raise error


def _profile(bundle: Path, artifact: str) -> None:
    options = ProfileOptions(batches=(1,), seqs=(8,), artifacts=(artifact,), rules=_FAST, threads=(1,))
    profile_bundle(Location(None, bundle), load_profile("host"), options)


COMMANDS: dict[str, Callable[[Path, str], object]] = {
    "verify": _verify,
    "predict": lambda bundle, artifact: predict(Location(None, bundle), ["the food was good"], artifact),
    "generate": lambda bundle, artifact: generate(
        Location(None, bundle), "a good", GenerateOptions(artifact=artifact, max_tokens=2)
    ),
    "evaluate": lambda bundle, artifact: evaluate(Location(None, bundle), EvaluateOptions(artifact=artifact)),
    "profile": _profile,
}
"""What does something with an artifact of a bundle, and raises EdgeformerError."""


def outcome(command: str, bundle: Path, artifact: str) -> tuple[int, str]:
    """Exit code and message of a command; anything but an EdgeformerError goes through."""
    try:
        COMMANDS[command](bundle, artifact)
    except EdgeformerError as error:
        return error.exit_code, str(error)
    return 0, ""
