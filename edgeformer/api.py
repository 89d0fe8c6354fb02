"""The Python API, offered as ``edgeformer.train``, ``edgeformer.open`` …: the commands as functions and methods.

Heavy packages are imported when they are needed: training and exporting import torch, everything on a bundle does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeformer import bundle as bundles
from edgeformer import run as runs
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER, RUN_FILE
from edgeformer.system.leftovers import restore_folder

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.plan import Plan
    from edgeformer.artifacts.recipe import Recipe
    from edgeformer.artifacts.report import Report
    from edgeformer.artifacts.scores import Evaluation
    from edgeformer.data.rows import Text
    from edgeformer.inference.generate import Generation
    from edgeformer.inference.rank import RankedDocument
    from edgeformer.inference.verification import Verification

__all__ = ["Bundle", "Run", "import_onnx", "open", "plan", "train"]

ARTIFACTS = "artifacts"
"""Default folder of the runs."""


class Bundle(bundles.Bundle):
    """An opened bundle with the commands that work on it, none of which needs torch, except :meth:`export`."""

    def predict(
        self, texts: Sequence[Text], *, artifact: str | None = None, confidence: float | Literal["auto"] | None = None
    ) -> list[Any]:
        """Answer raw texts, as ``edgeformer predict``.

        Args:
            texts: many texts in one call, because every call opens a session; classifiers also take pairs of texts.
            artifact: an id; None: the first that runs on this machine.
            confidence: stop a step artifact's loop at this top probability; ``auto``: at the thresholds of
                ``edgeformer exits``.

        Returns:
            For each text a ``LabelPrediction``, a ``TextVector`` of an embedding model, a ``ScorePrediction`` of a
            regression model, or an ``Unanswered``.

        Raises:
            InputError: no text, an unknown artifact, or a language model.
        """
        from edgeformer.inference.predict import predict

        if isinstance(texts, str):
            raise InputError("predict takes a list of texts; put a single text in brackets")
        return predict(self._location, texts, artifact, confidence)[1]

    def rank(
        self, query: str, documents: Sequence[str], top: int = 10, *, artifact: str | None = None
    ) -> list[RankedDocument]:
        """Return the best documents for a query, best first, as ``edgeformer predict --query``.

        Raises InputError: neither an embedding model nor a reranker, or an empty text.
        """
        from edgeformer.inference.predict import open_predictor
        from edgeformer.inference.rank import rank_documents, scoring_inputs

        texts = scoring_inputs(self.task, self.data, query, documents)
        with open_predictor(self._location, artifact, texts=texts) as model:
            return rank_documents(documents, model.answer(texts), top, self.data)

    def generate(self, prompt: str, on_text: Callable[[str], None] | None = None, **options: Any) -> Generation:
        """Continue ``prompt``, which may be empty, as ``edgeformer generate``.

        ``on_text`` is called with each piece of new text as soon as it is complete; ``options`` are those of
        :class:`~edgeformer.inference.generate.GenerateOptions`.
        Raises InputError: no language model, or incompatible options.
        """
        from edgeformer.inference.generate import GenerateOptions, generate

        return generate(self._location, prompt, GenerateOptions(**options), on_text)

    def evaluate(self, **options: Any) -> Evaluation:
        """Compute scores at every exit and with early exit, as ``edgeformer evaluate``.

        ``options`` are those of :class:`~edgeformer.inference.evaluate.EvaluateOptions`: artifact, split, data…
        Raises InputError: an unknown artifact or split, or unusable data.
        """
        from edgeformer.inference.evaluate import EvaluateOptions, evaluate

        return evaluate(self._location, EvaluateOptions(**options))

    def verify(self, artifact: str | None = None) -> Verification:
        """Check all files, and run the golden inputs through one artifact, or every artifact that runs here.

        Raises ArtifactError: the manifest names a file outside the bundle.
        """
        from edgeformer.inference.verify import verify

        # Opened again, because files that this bundle has hashed may have changed since.
        return verify(bundles.Bundle.open(self.folder), artifact)

    def profile(self, device: str | DeviceProfile | None = None, **options: Any) -> Report:
        """Measure the artifacts on this machine and judge them for a device, as ``edgeformer profile``.

        ``device``: a profile, its path, or a shipped name; None: the recipe's target. ``options`` are those of
        :class:`~edgeformer.benchmark.profile.ProfileOptions`: batches, seqs, artifacts, choose…
        Raises InputError: no device, an unknown artifact, or a shape that the model cannot take.
        """
        from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
        from edgeformer.estimate.roofline import known_error

        location = self._location
        artifacts = location.run.parent if location.run is not None else Path(ARTIFACTS)
        profile = _load_device(device or self.manifest.target or "host", artifacts)
        options.setdefault("estimate_error", known_error(profile, _load_device("host", artifacts)))
        return profile_bundle(location, profile, ProfileOptions(**options))

    def export(self, **options: Any) -> Bundle:
        """Add precisions and engines to the bundle of an ONNX file, as ``edgeformer export``. Needs the extra train.

        Raises as :meth:`Run.export`, and InputError for the bundle of a run, which is exported with that.
        """
        if self.manifest.wrapped is None:
            raise InputError(f"{self.folder}: belongs to a run; export the run instead")
        return _export(self.folder, self.folder, options)

    @property
    def _location(self) -> runs.Location:
        return runs.Location(runs.find_enclosing_run(self.folder), self.folder, opened=self)


class Run(runs.Run):
    """An opened run with the commands that work on it."""

    @property
    def bundle(self) -> Bundle | None:
        """The exported bundle; None: not exported yet. Raises ArtifactError if it is damaged."""
        folder = runs.find_bundle(self.folder)
        return Bundle.open(folder) if folder is not None else None

    def export(self, **options: Any) -> Bundle:
        """Write the run's bundle, or add to it, as ``edgeformer export``; a rejected artifact has this ``status``.

        ``options`` are those of :class:`~edgeformer.export.variants.ExportOptions`: fp16, int8, exits, replace…

        Raises InputError: unusable options, a model that leaks, or artifacts would be lost and ``replace`` is not set;
        ArtifactError: an unfinished or damaged run; MissingDependencyError: torch is not installed.
        """
        return _export(self.folder, self.folder / BUNDLE_FOLDER, {"joining": True, **options})

    def evaluate(self, **options: Any) -> Evaluation:
        """Compute scores of the bundle's artifacts, or of the run's own weights; see :meth:`Bundle.evaluate`."""
        from edgeformer.inference.evaluate import EvaluateOptions, evaluate

        location = runs.Location(self.folder, runs.find_bundle(self.folder))
        return evaluate(location, EvaluateOptions(**options))


def _export(source: Path, bundle: Path, options: dict[str, Any]) -> Bundle:
    with needs_extra("train", "exporting"):
        from edgeformer.export.export import export
        from edgeformer.export.variants import ExportOptions
    export(source, ExportOptions(**options))
    return Bundle.open(bundle)


def open(path: str | Path) -> Bundle | Run:
    """Open the folder of a run or of a bundle. Raises ArtifactError if it is neither, or damaged."""
    folder = Path(path)
    restore_folder(folder)
    if (folder / RUN_FILE).is_file():
        return Run.open(folder)
    if (folder / BUNDLE_FILE).is_file():
        return Bundle.open(folder)
    raise ArtifactError(f"{folder}: neither a run nor a bundle ({RUN_FILE} or {BUNDLE_FILE})")


def train(
    recipe: str | Path | Recipe, *, overrides: Sequence[str] = (), artifacts: str | Path = ARTIFACTS, **options: Any
) -> Run:
    """Train a recipe, as ``edgeformer train``. Needs torch.

    Args:
        recipe: a recipe, its path, or a shipped name.
        overrides: ``key.path=value``, as ``--set`` takes them.
        artifacts: the folder that holds the runs.
        options: of :class:`~edgeformer.training.train.TrainOptions`: name, resume, max_steps…

    Raises:
        InputError: unusable recipe, data or tokenizer, or too little memory.
        MissingDependencyError: torch is not installed.
    """
    resolved = _load_recipe(recipe, overrides)
    with needs_extra("train", "training"):
        from edgeformer.training.train import TrainOptions
        from edgeformer.training.train import train as run_training
    return Run.open(run_training(resolved, TrainOptions(Path(artifacts), **options)))


def plan(
    recipe: str | Path | Recipe, device: str | DeviceProfile | None = None, *, overrides: Sequence[str] = ()
) -> Plan:
    """Check whether a recipe's training fits a device, and what to change, as ``edgeformer plan``. Needs torch.

    Takes a recipe as :func:`train` and a device as :meth:`Bundle.profile`. Raises InputError: no device, or an unusable
    recipe; MissingDependencyError: torch is not installed.
    """
    resolved = _load_recipe(recipe, overrides)
    profile = _load_device(device or resolved.target, Path(ARTIFACTS))
    with needs_extra("train", "planning"):
        from edgeformer.training.plan.plan import plan as run_plan
    return run_plan(resolved, profile)


def import_onnx(model: str | Path, folder: str | Path, **options: Any) -> Bundle:
    """Make a bundle of an ONNX file, as ``edgeformer import onnx``. Needs neither torch nor the package onnx.

    ``options`` are those of :class:`~edgeformer.imports.onnx.OnnxImportOptions`: shapes, ranges, inputs, tokenizer…
    Raises InputError: a missing size or range, or an unusable graph; the message says what to give; ArtifactError: no
    ONNX graph, or a damaged or hostile one.
    """
    from edgeformer.imports.onnx import OnnxImportOptions
    from edgeformer.imports.onnx import import_onnx as run_import

    run_import(Path(model), Path(folder), OnnxImportOptions(**options))
    return Bundle.open(Path(folder))


def _load_recipe(recipe: str | Path | Recipe, overrides: Sequence[str]) -> Recipe:
    from edgeformer.models import load_recipe

    if isinstance(recipe, (str, Path)):
        return load_recipe(str(recipe), [*overrides], warnings.warn)
    if overrides:
        raise InputError("overrides apply to a recipe that is given by name; change a loaded recipe with model_copy")
    return recipe


def _load_device(device: str | DeviceProfile | None, artifacts: Path) -> DeviceProfile:
    from edgeformer.artifacts.documents import load_profile, own_profiles

    if device is not None and not isinstance(device, str):
        return device
    return load_profile(device, own_profiles(artifacts), warnings.warn)
