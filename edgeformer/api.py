"""The Python API: the functions that the commands call, as methods of the two things that they are about.

Offered as ``edgeformer.train``, ``edgeformer.open``… Nothing heavy is imported before it is needed: training and
exporting import torch, everything on a bundle does without.
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
    from edgeformer.artifacts.verification import Verification
    from edgeformer.data.rows import Text
    from edgeformer.inference.generate import Generation

__all__ = ["Bundle", "Run", "open", "plan", "train", "wrap"]

ARTIFACTS = "artifacts"
"""The folder that holds the runs, where nobody names another."""


class Bundle(bundles.Bundle):
    """An opened bundle, and what can be done with it. None of it needs torch."""

    def predict(
        self, texts: Sequence[Text], *, artifact: str | None = None, confidence: float | Literal["auto"] | None = None
    ) -> list[Any]:
        """What the model answers to each text, as ``edgeformer predict``.

        Args:
            texts: raw, as many as there are: a session is opened for each call; of a classifier also pairs of texts.
            artifact: an id; None: the first that runs here.
            confidence: leave a step artifact's loop at this top probability; ``auto``: as `edgeformer exits` chose.

        Returns:
            Of a classifier a :class:`~edgeformer.tasks.classification.LabelPrediction` per text: label and
            probability; of an embedding model a :class:`~edgeformer.tasks.embedding.TextVector`. Of a text
            with nothing in it, or whose answer is no number, an :class:`~edgeformer.tasks.task.Unanswered`.

        Raises:
            InputError: no text, an unknown artifact, or a language model.
        """
        from edgeformer.inference.predict import predict

        if isinstance(texts, str):
            raise InputError("predict takes a list of texts; put the one text into brackets")
        return predict(self._location, texts, artifact, confidence)[1]

    def generate(self, prompt: str, on_text: Callable[[str], None] | None = None, **options: Any) -> Generation:
        """Go on writing where ``prompt`` ends, as ``edgeformer generate``.

        Args:
            prompt: may be empty.
            on_text: called with each piece of new text as soon as it is there.
            options: of :class:`~edgeformer.inference.generate.GenerateOptions`.

        Raises:
            InputError: not a language model, or options that do not go together.
        """
        from edgeformer.inference.generate import GenerateOptions, generate

        return generate(self._location, prompt, GenerateOptions(**options), on_text)

    def evaluate(self, **options: Any) -> Evaluation:
        """Scores at every exit and with early exit, as ``edgeformer evaluate``.

        Args:
            options: of :class:`~edgeformer.inference.evaluate.EvaluateOptions`: artifact, split, data…

        Raises:
            InputError: an unknown artifact or split, or unusable data.
        """
        from edgeformer.inference.evaluate import EvaluateOptions, evaluate

        return evaluate(self._location, EvaluateOptions(**options))

    def verify(self, artifact: str | None = None) -> Verification:
        """Checksums of all files, and the golden inputs through every artifact that runs here.

        Args:
            artifact: run this one only.

        Raises:
            ArtifactError: the manifest names a file outside the bundle.
        """
        from edgeformer.inference.verify import verify

        # Of its own: what was hashed when this bundle was opened may have changed since.
        return verify(bundles.Bundle.open(self.folder), artifact)

    def profile(self, device: str | DeviceProfile | None = None, **options: Any) -> Report:
        """Measure the artifacts on this machine and judge them for a device, as ``edgeformer profile``.

        Args:
            device: a profile, its path, or a shipped name; None: what the recipe was made for.
            options: of :class:`~edgeformer.benchmark.profile.ProfileOptions`: batches, seqs, artifacts, search…
                Limits are also taken with their units, as the flags take them: ``max_latency="20ms"``,
                ``max_size="30MiB"``, ``max_vram="1GiB"`` and ``max_energy="10mJ"``.

        Raises:
            InputError: no device, an unknown artifact, a limit without its unit, or a shape that the model cannot take.
        """
        from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
        from edgeformer.estimate.rates import known_error

        run = runs.run_around(self.folder)
        artifacts = run.parent if run is not None else Path(ARTIFACTS)
        profile = _device(device or self.manifest.target, artifacts)
        options.setdefault("estimate_error", known_error(profile, _device("host", artifacts)))
        return profile_bundle(self._location, profile, ProfileOptions(**_with_limits(options)))

    def export(self, **options: Any) -> Bundle:
        """Add precisions and engines to the bundle of a wrapped file, as ``edgeformer export``. Needs the extra train.

        Args:
            options: of :class:`~edgeformer.export.variants.ExportOptions`: fp16, int8, build, target…

        Returns:
            The bundle with them; one that was rejected says so in its ``status``.

        Raises:
            InputError: a bundle of a run, which is exported by its run; unusable options.
            ArtifactError: it is damaged.
        """
        if self.manifest.wrapped is None:
            raise InputError(f"{self.folder}: was exported from a run; export that again")
        with needs_extra("train", "exporting"):
            from edgeformer.export.variants import ExportOptions
            from edgeformer.export.wrapped import export_wrapped
        export_wrapped(self.folder, ExportOptions(**options))
        return Bundle.open(self.folder)

    @property
    def _location(self) -> runs.Location:
        return runs.Location(runs.run_around(self.folder), self.folder, opened=self)


class Run(runs.Run):
    """An opened run, and what can be done with it."""

    @property
    def bundle(self) -> Bundle | None:
        """What was exported of it; None before that. Raises ArtifactError where that is damaged."""
        folder = runs.bundle_in(self.folder)
        return Bundle.open(folder) if folder is not None else None

    def export(self, **options: Any) -> Bundle:
        """Write its bundle, or add to it, as ``edgeformer export``. Needs torch.

        Args:
            options: of :class:`~edgeformer.export.variants.ExportOptions`: fp16, int8, exits, replace…

        Returns:
            The bundle; an artifact that was rejected says so in its ``status``.

        Raises:
            InputError: unusable options, a model that leaks, or artifacts would be lost and ``replace`` is not set.
            ArtifactError: an unfinished or damaged run.
            MissingDependencyError: torch is not installed.
        """
        with needs_extra("train", "exporting"):
            from edgeformer.export.export import export
            from edgeformer.export.variants import ExportOptions
        export(self.folder, ExportOptions(**{"joining": True, **options}))
        return Bundle.open(self.folder / BUNDLE_FOLDER)

    def evaluate(self, **options: Any) -> Evaluation:
        """Scores of its bundle's artifacts, or of its own weights, as ``edgeformer evaluate``.

        Args:
            options: of :class:`~edgeformer.inference.evaluate.EvaluateOptions`.

        Raises:
            InputError: an unknown artifact or split, or unusable data.
        """
        from edgeformer.inference.evaluate import EvaluateOptions, evaluate

        location = runs.Location(self.folder, runs.bundle_in(self.folder))
        return evaluate(location, EvaluateOptions(**options))


def open(path: str | Path) -> Bundle | Run:
    """Open a run's folder or a bundle's.

    Raises:
        ArtifactError: there is neither, or it is damaged.
    """
    folder = Path(path)
    restore_folder(folder)
    if (folder / RUN_FILE).is_file():
        return Run.open(folder)
    if (folder / BUNDLE_FILE).is_file():
        return Bundle.open(folder)
    raise ArtifactError(f"{folder}: is neither a run nor a bundle ({RUN_FILE} or {BUNDLE_FILE})")


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
        InputError: recipe, data or tokenizer cannot be used, or it will not fit into memory.
        MissingDependencyError: torch is not installed.
    """
    resolved = _recipe(recipe, overrides)
    with needs_extra("train", "training"):
        from edgeformer.training.train import TrainOptions
        from edgeformer.training.train import train as run_training
    return Run.open(run_training(resolved, TrainOptions(Path(artifacts), **options)))


def plan(
    recipe: str | Path | Recipe, device: str | DeviceProfile | None = None, *, overrides: Sequence[str] = ()
) -> Plan:
    """Whether a recipe's training fits a device, and what to change, as ``edgeformer plan``. Needs torch.

    Args:
        recipe: a recipe, its path, or a shipped name.
        device: a profile, its path, or a shipped name; None: the recipe's target.
        overrides: ``key.path=value``, as ``--set`` takes them.

    Raises:
        InputError: no device, or a recipe that cannot be used.
        MissingDependencyError: torch is not installed.
    """
    resolved = _recipe(recipe, overrides)
    profile = _device(device or resolved.target, Path(ARTIFACTS))
    with needs_extra("train", "planning"):
        from edgeformer.training.plan import plan as run_plan
    return run_plan(resolved, profile)


def wrap(model: str | Path, folder: str | Path, **options: Any) -> Bundle:
    """Make a bundle of somebody's ONNX file, as ``edgeformer import onnx``. Needs neither torch nor the package onnx.

    Args:
        model: the .onnx file.
        folder: of the bundle.
        options: of :class:`~edgeformer.export.foreign_graph.WrapOptions`: shapes, ranges, inputs, tokenizer…

    Raises:
        InputError: a size or a range is missing, or the graph cannot be used; the message says what to give.
        ArtifactError: no ONNX graph, a damaged or a hostile one.
    """
    from edgeformer.export.import_onnx import WrapOptions
    from edgeformer.export.import_onnx import wrap as run_wrapping

    run_wrapping(Path(model), Path(folder), WrapOptions(**options))
    return Bundle.open(Path(folder))


def _with_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Replace limits with a unit by the fields of ProfileOptions. Raises InputError for one without a unit."""
    from edgeformer.artifacts.units import parse_bytes, parse_millijoules, parse_milliseconds

    numbers = dict(options)
    limits: dict[str, tuple[str, Callable[[str], float]]] = {
        "max_latency": ("max_latency_ms", parse_milliseconds),
        "max_size": ("max_size_bytes", parse_bytes),
        "max_vram": ("max_memory_bytes", parse_bytes),
        "max_energy": ("max_energy_mj", parse_millijoules),
    }
    for name, (field, parse) in limits.items():
        value = numbers.pop(name, None)
        if value is None:
            continue
        if numbers.get(field) is not None:
            raise InputError(f"{name} and {field}: are the same limit; leave out one of them")
        try:
            numbers[field] = parse(str(value))
        except ValueError as error:
            raise InputError(f"{name}: {error}; {field} takes a number") from None
    return numbers


def _recipe(recipe: str | Path | Recipe, overrides: Sequence[str]) -> Recipe:
    if isinstance(recipe, (str, Path)):
        from edgeformer.models import load_recipe

        return load_recipe(str(recipe), [*overrides], warnings.warn)
    if overrides:
        raise InputError("overrides belong to a recipe that is named; change a loaded one with model_copy")
    return recipe


def _device(device: str | DeviceProfile | None, artifacts: Path) -> DeviceProfile:
    if device is not None and not isinstance(device, str):
        return device
    from edgeformer.artifacts.documents import load_profile, own_profiles

    return load_profile(device, own_profiles(artifacts), warnings.warn)
