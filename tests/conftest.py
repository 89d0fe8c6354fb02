"""Fixtures for every test folder."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from edgeformer.data.source_folder import MINILM, default_source, find_folder
from edgeformer.models import load_recipe
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.tasks.language_modeling import LanguageRecipe
from tests.cli.in_process import Edgeformer, in_process
from tests.fakes.nvml import Driver, build

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; two threads each would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background inherits it, and so would the processes that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"
"""Runs that ``python -m tests.golden.write`` wrote. Read them only."""
OLD_FORMAT = Path(__file__).parent / "old_format"
"""Runs and bundles of earlier versions, which ``tests/test_old_format.py`` describes. Read them only."""


@pytest.fixture
def edgeformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgeformer:
    """Run the command line in this process."""
    return in_process(monkeypatch, capsys)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The public test data; a test that uses it is marked ``data`` and skipped where the data is absent."""
    folder = Path(os.environ.get("EDGEFORMER_TEST_DATA", _ROOT / ".." / "shared" / "data"))
    if not (folder / "sst2" / "train.tsv").is_file():
        pytest.skip(f"no public test data in {folder}; set EDGEFORMER_TEST_DATA to its folder")
    return folder


SMALL = [
    "name=small", "data.parts.train.0.rows=3000", "training.epochs=3", "training.precision=fp32",
    "training.log_every=5", "model.hidden_size=32", "model.ffn_size=64", "training.optimizer.lr=3e-3",
    "training.batch_size=32",
]  # fmt: skip
"""The quickstart recipe, small enough to train in a second or two."""


def classifier_recipe(overrides: list[str]) -> ClassificationRecipe:
    return load_recipe("quickstart", overrides)


@pytest.fixture(scope="session")
def small_recipe() -> ClassificationRecipe:
    return classifier_recipe(SMALL)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for libnvidia-ml.so.1, in a folder of its own."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The stand-in in place of this machine's NVML, as the real pynvml loads it."""
    return Driver(nvml_library, monkeypatch)


SMALL_LANGUAGE = [
    "name=small-language",
    "data.parts={train: [{kind: synthetic-reviews, rows: 400, seed: 1}], "
    "validation: [{kind: synthetic-reviews, rows: 60, seed: 2}], test: [{kind: synthetic-reviews, rows: 60, seed: 3}]}",
    "data.min_characters=20", "data.sequence_length=32", "model.vocab_size=400", "model.hidden_size=32",
    "model.embedding_size=16", "model.ffn_size=64", "model.loops=4", "model.exits=[2]", "model.max_positions=128",
    "training.epochs=2", "training.batch_size=8", "training.precision=fp32", "training.log_every=5",
    "training.optimizer.lr=3e-3",
]  # fmt: skip
"""crt_mini on synthetic reviews as running text, small enough to train in a few seconds."""


@pytest.fixture(scope="session")
def small_language_recipe() -> LanguageRecipe:
    return load_recipe("crt_mini", SMALL_LANGUAGE)


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sentence-transformers folder, all-MiniLM-L6-v2, as the source ``minilm`` unpacks it."""
    if default_source() is None:
        pytest.skip("the extra [minilm], which brings the weights of MiniLM, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        return find_folder(MINILM)


@pytest.fixture(scope="session")
def finished_language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained language model without a bundle, from tests/golden. Read it; copy it before changing anything."""
    artifacts = tmp_path_factory.mktemp("language") / "artifacts"
    return Path(shutil.copytree(GOLDEN / "small-language", artifacts / "small-language"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with an FP32 and FP16 bundle, from tests/golden. Read it; copy it before changing anything.

    A test of what training or export writes takes ``fresh_run``: today's code did not write these files.
    """
    return Path(shutil.copytree(GOLDEN / "small", tmp_path_factory.mktemp("finished") / "artifacts" / "small"))


@pytest.fixture(scope="session")
def fresh_language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``finished_language_run``, trained by today's code on this machine. Do not change it."""
    from tests.golden.write import write_language_model

    return write_language_model(tmp_path_factory.mktemp("fresh-language") / "artifacts")


@pytest.fixture(scope="session")
def fresh_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``finished_run``, trained and exported by today's code on this machine. Do not change it."""
    from tests.golden.write import write_classifier

    return write_classifier(tmp_path_factory.mktemp("fresh") / "artifacts")
