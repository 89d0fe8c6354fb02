"""Train, export and profile the models of a search, each step as an edgeformer command in a process of its own."""

import math
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgeformer.artifacts.documents import to_yaml
from edgeformer.artifacts.errors import EdgeformerError, InputError, InterruptedRun
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.model_search import SEARCH_FILE, ModelSearch, ScoredTest, SearchedModel
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.report import Report
from edgeformer.artifacts.units import format_bytes, format_duration
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER, RUN_FILE, check_name, read_manifest
from edgeformer.benchmark.choice import CONFIDENCE, combine_choices
from edgeformer.benchmark.limits import Limit, limit_of
from edgeformer.bundle import Bundle
from edgeformer.model_search.ladder import LadderModel
from edgeformer.run import read_run
from edgeformer.system import child
from edgeformer.system.host import cpu_name, now
from edgeformer.system.lock import lock_folder
from edgeformer.system.signals import handle_signals
from edgeformer.tasks import get_task
from edgeformer.tasks.risk_control import share_interval

_EXPORTED = ("--int8", "--int4", "--onnx-only", "--keep-going", "--replace")
_PROMISING = 0.02  # a larger model of a kind is tried if the smaller one is at most this much below the best score
_RESERVE = 0.1
"""Share of the budget for scoring the recommended artifact on the test rows, and for what outlasts its prediction."""
_DONE = (0, 3)  # exit codes of a command whose result is complete: 3 means a rejected artifact, or a failed budget


class _CommandError(EdgeformerError):
    """A command of the search failed, which is a result; an interrupted one ends the search."""


@dataclass(frozen=True)
class ModelSearchOptions:
    """What is searched for.

    ``budget_s``: seconds for this call. A model is trained for as many epochs as may fit into what is left after its
    export and measurement, and skipped if not even one may; the first model is trained for one at least.
    """

    limits: tuple[Limit, ...] = ()  # what a candidate must keep
    minimize: Literal["latency", "size"] = "latency"  # quantity of which the recommended artifact has least
    budget_s: float | None = None
    tries_all: bool = False  # also train models after one that keeps the limits, or that promise no better score
    models: tuple[str, ...] = ()  # names of the ladder; empty: all


def search_models(
    name: str, data: str, ladder: Sequence[LadderModel], source: str | None, device: str, artifacts: Path,
    options: ModelSearchOptions, progress: Progress = SILENT,
    on_change: Callable[[ModelSearch, Path], object] = lambda result, folder: None,
) -> ModelSearch:  # fmt: skip
    """Search the ladder and return the result, which is also in ``<artifacts>/<name>-search/search.json``.

    Models are trained in the order of the ladder until one keeps the limits. What an earlier call has finished is used
    again; what it began is continued. Selection uses validation rows; the recommended artifact, and no other, is scored
    on the test rows. A taught model is recommended only if it scores higher than the same model without its teacher.

    Args:
        name: of the search; the runs are called ``<name>-<model>``.
        data, source: the data file or the recipe, and the pretrained encoder of the ladder, for the result.
        device: profile that the artifacts are judged for.
        on_change: called after each model with the result so far and its folder.

    Raises InputError: unknown model names, an invalid name, or a search of this name with other data; InterruptedRun:
    Ctrl-C, SIGTERM or SIGHUP; the same call goes on later.
    """
    unknown = sorted({*options.models} - {model.name for model in ladder})
    if unknown:
        available = ", ".join(model.name for model in ladder)
        hint = "" if source is not None else "; those that need a pretrained encoder need --source"
        raise InputError(f"--models: there is no {', '.join(unknown)}; available: {available}{hint}")
    check_name(name)
    folder = artifacts / f"{name}-search"
    folder.mkdir(parents=True, exist_ok=True)
    search = _ModelSearch(name, ladder, device, artifacts, folder, options, progress)
    with lock_folder(folder, "is being searched"), handle_signals(("SIGTERM", "SIGHUP"), search.interrupt):
        return search.run(data, source, on_change)


@dataclass(eq=False, repr=False)  # signal.signal may format its handler before there is a result
class _ModelSearch:
    """A search at work: ``result`` is what is known so far, and always what search.json holds."""

    name: str
    ladder: Sequence[LadderModel]
    device: str
    artifacts: Path
    folder: Path
    options: ModelSearchOptions
    progress: Progress
    result: ModelSearch = field(init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    _reports: dict[str, Report] = field(default_factory=dict, init=False)
    _commands: list[subprocess.Popen[str]] = field(default_factory=list, init=False)

    def run(self, data: str, source: str | None, on_change: Callable[[ModelSearch, Path], object]) -> ModelSearch:
        """Search the ladder; arguments as for :func:`search_models`."""
        # 1. Write the recipes, and take over what an earlier call has measured
        for model in self.ladder:
            if not model.teachers:  # the others get theirs when it is trained
                self._write_recipe(model, None)
        file = self.folder / SEARCH_FILE
        earlier = read_manifest(ModelSearch, file) if file.is_file() else None
        known = {model.name: model for model in earlier.models} if earlier is not None else {}
        for model in self.ladder:
            run = f"{self.name}-{model.name}"
            new = SearchedModel(name=model.name, description=model.description, run=run, status="waiting")
            known.setdefault(model.name, new)
        self.result = ModelSearch(
            name=self.name, data=data, source=source, device=self.device, host=cpu_name() or "unknown processor",
            created=now(), models=tuple(known[model.name] for model in self.ladder),
            tests=earlier.tests if earlier is not None else (),
        )  # fmt: skip
        for name in (model.name for model in self.ladder):
            path, bundle = self._report(name), self.artifacts / f"{self.name}-{name}" / BUNDLE_FOLDER
            report = read_manifest(Report, path) if path.is_file() and (bundle / BUNDLE_FILE).is_file() else None
            measured = report.subject.manifest_sha256 if report is not None and report.subject is not None else None
            # A report must be of the bundle that the run has now.
            if report is not None and measured and measured == Bundle.open(bundle).manifest.manifest_sha256:
                self._reports[name] = report
            elif self._searched(name).status != "waiting":
                self._update(name, status="waiting", reason=None)
        self._rank()
        on_change(self.result, self.folder)

        # 2. Train, export and measure the models
        can_stop = not self.options.tries_all and limit_of(self.options.limits, "score") is not None
        for model in self.ladder:
            if model.name in self._reports:
                continue
            if self.options.models and model.name not in self.options.models:
                self._update(model.name, status="skipped", reason="not among --models")
            elif can_stop and self.result.picked is not None:
                reason = f"not needed: {self.result.picked} keeps the limits (--all trains it too)"
                self._update(model.name, status="skipped", reason=reason)
            elif (why := self._why_unpromising(model)) is not None and not self.options.models:
                self._update(model.name, status="skipped", reason=f"{why} (--all trains it, too)")
            else:
                self._try_model(model)
                on_change(self.result, self.folder)

        # 3. Score the recommended artifact on the test rows, unless an earlier call did
        best, search = self.result.best, self.result.search
        tested = {test.candidate for test in self.result.tests}
        if search is not None and best is not None and best not in tested:
            run, (_, _, artifact) = self._searched(best.partition("/")[0]).run, best.partition("/")
            rows = self._run("evaluate", run, "--artifact", artifact)["rows"]
            row = next(row for row in rows if row["artifact"] == artifact and row["exit"] is None)
            score, count, interval = row[search.metric], row["n"], {}
            task = get_task(read_run(self.artifacts / run).task)
            if task.metric.is_share:
                low, high = share_interval(round(score * count), count, (1 - CONFIDENCE) / 2)
                interval = {"low": low, "high": high}
            test = ScoredTest(candidate=best, score=score, rows=count, unit=task.unit, **interval)
            self._save(self.result.model_copy(update={"tests": (*self.result.tests, test)}))
        on_change(self.result, self.folder)
        return self.result

    def interrupt(self, number: int, frame: object) -> None:
        """Handle a signal: the running command ends in order. A terminal sends SIGHUP to that command itself."""
        if self._commands and number == signal.SIGTERM:
            self._commands[-1].terminate()
        raise KeyboardInterrupt

    def _write_recipe(self, model: LadderModel, teacher: str | None) -> None:
        """Write the recipe of a model. Raises InputError if an earlier search wrote a different recipe."""
        sections: dict[str, Any] = {"name": f"{self.name}-{model.name}", **model.sections}
        if teacher is not None:
            folder = str((self.artifacts / f"{self.name}-{teacher}").resolve())
            sections["training"] = {**sections["training"], "teacher": folder}
        body = to_yaml(sections, inline=True)
        text, path = f"# {model.description}; written by edgeformer search\n{body}", self._recipe(model.name)
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise InputError(
                f"{path}: an earlier search of this name had another recipe (other data, or another version); "
                "choose another --name"
            )
        write_text(path, text)

    def _why_unpromising(self, model: LadderModel) -> str | None:
        """Return why a model is not expected to score higher than those that are trained; None: it may."""
        trained = {entry.name: entry.score for entry in self.result.models if entry.score is not None}
        if self.options.tries_all or not trained:
            return None
        best = max(trained, key=trained.__getitem__)
        if model.smaller is not None and trained.get(model.smaller, 1.0) < trained[best] - _PROMISING:
            gap = 100 * (trained[best] - trained[model.smaller])
            return f"{model.smaller}, of the same kind, is {gap:.1f} points below {best}"
        if model.untaught is None:
            return None
        if model.untaught not in trained:
            return f"the same model without a teacher, {model.untaught}, is not trained"
        teacher = max(trained.keys() & {*model.teachers}, key=trained.__getitem__, default=None)
        if teacher is not None and trained[teacher] <= trained[model.untaught]:
            scores = f"{trained[teacher]:.4f}, {model.untaught} {trained[model.untaught]:.4f}"
            return f"its teacher {teacher} scores {scores}"
        return None

    def _try_model(self, model: LadderModel) -> None:
        """Train, export and profile a model, and rank all candidates again. A failure is a result."""
        if model.teachers:
            scores = {name: self._searched(name).score or -1.0 for name in model.teachers}
            teacher = self._searched(model.name).teacher or max(scores, key=scores.__getitem__)
            self._train(next(each for each in self.ladder if each.name == teacher), for_model=model.name)
            if self._searched(teacher).train_s is None:
                reason = f"its teacher {teacher} is not trained: {self._searched(teacher).reason}"
                self._update(model.name, status="skipped", reason=reason)
                return
            self._write_recipe(model, teacher)
            self._update(model.name, teacher=teacher)
        self._train(model, for_model=model.name)
        searched = self._searched(model.name)
        if searched.status in ("skipped", "failed"):
            return
        started = time.monotonic()
        try:
            self._run("export", searched.run, *_EXPORTED)
            options = ("--device", self.device, "--choose", "--runtime", "onnxruntime")
            report = self._run("profile", searched.run, *options)
        except _CommandError as error:
            self._update(model.name, status="failed", reason=str(error))
            return
        write_json(self._report(model.name), report)
        self._reports[model.name] = read_manifest(Report, self._report(model.name))
        deploy_s = time.monotonic() - started
        self._update(model.name, status="measured", deploy_s=deploy_s)
        self._rank()
        if (search := self._reports[model.name].search) is not None:
            size = format_bytes(min(candidate.size_bytes for candidate in search.candidates))
            duration = format_duration((searched.train_s or 0.0) + deploy_s)
            score = "no score" if searched.score is None else f"{search.metric} {searched.score:.4f}"
            self.progress.message(f"{model.name}: {score}, {size}, {duration}")

    @property
    def _left_s(self) -> float:
        """Seconds of the budget that are left for a training, beside its export and measurement."""
        if self.options.budget_s is None:
            return math.inf
        deploy_s = max((entry.deploy_s for entry in self.result.models if entry.deploy_s), default=0.0)
        return (1 - _RESERVE) * self.options.budget_s - (time.monotonic() - self._started) - deploy_s

    def _train(self, model: LadderModel, for_model: str) -> None:
        """Train a model, or continue its training, unless it is trained. Without enough time it is skipped."""
        # 1. Is it trained? How long will it take?
        folder = self.artifacts / f"{self.name}-{model.name}"
        arguments = ["train", str(self._recipe(model.name)), "--name", folder.name]
        if (folder / RUN_FILE).is_file():
            manifest = read_run(folder)
            if manifest.status == "finished":
                self._record_training(model.name, self._searched(model.name).train_s or manifest.seconds)
                return
            arguments.append("--resume")
        elif self._left_s > 0 and self._searched(model.name).predicted_low_s is None:
            try:
                times = self._run("plan", str(self._recipe(model.name)), "--device", "host")["time"]
                self._update(model.name, predicted_low_s=times["low_s"], predicted_high_s=times["high_s"])
            except _CommandError as error:
                self.progress.message(f"{model.name}: its training time is not predicted: {error}")
        # 2. Does it fit into the budget, perhaps with fewer epochs?
        searched = self._searched(model.name)
        left_s, is_first = self._left_s, not self._reports
        if left_s <= 0 and not is_first:
            self._update(model.name, status="skipped", reason="no time is left of the budget")
            return
        reason = None
        if left_s < math.inf and searched.predicted_high_s is not None:
            epochs = model.sections.get("training", {}).get("epochs", 1)
            fewer = max(int(epochs * left_s / searched.predicted_high_s), int(is_first))
            if 1 <= fewer < epochs and "--resume" not in arguments:
                reason = f"{fewer} of {epochs} epochs, because of the budget"
                arguments += ["--set", f"training.epochs={fewer}"]
                times = {key: getattr(searched, key) for key in ("predicted_low_s", "predicted_high_s")}
                self._update(model.name, **{key: seconds * fewer / epochs for key, seconds in times.items()})
            elif searched.predicted_high_s > left_s and not is_first:
                reason = (
                    f"training may take {format_duration(searched.predicted_high_s)}, and {format_duration(left_s)} of "
                    "the budget is left beside export and measurement"
                )
                self._update(model.name, status="skipped", reason=reason)
                return
        # 3. Train
        purpose = f", which {for_model} needs" if for_model != model.name else ""
        extent = f"; {reason}" if reason is not None else ""
        self.progress.message(f"{model.name}: {model.description}{purpose}{extent}")
        started = time.monotonic()
        try:
            trained = self._run(*arguments)
        except _CommandError as error:
            self._update(model.name, status="failed", reason=str(error))
            return
        # A run's own seconds leave out what the teacher's answers took; a resumed one's include earlier parts.
        self._update(model.name, status="waiting", reason=reason)
        self._record_training(model.name, max(trained["seconds"], time.monotonic() - started))

    def _record_training(self, name: str, train_s: float) -> None:
        """Record the time, the size and the score of a finished run."""
        manifest = read_run(self.artifacts / f"{self.name}-{name}")
        score = get_task(manifest.task).metric.of(manifest.validation)
        self._update(name, train_s=train_s, parameters=manifest.parameters, score=score)

    def _rank(self) -> None:
        """Rank the candidates of all models that were measured."""
        reports = [(model.name, self._reports[model.name]) for model in self.ladder if model.name in self._reports]
        choices = {name: report.search for name, report in reports if report.search is not None}
        refused = {}
        for model in self.ladder:
            if model.name in choices and model.untaught is not None:
                score, plain = self._searched(model.name).score, self._searched(model.untaught).score
                if score is not None and plain is not None and score <= plain:
                    refused[model.name] = f"without a teacher it scores {plain:.4f}, with one {score:.4f}"
        search = None
        if choices:
            search = combine_choices(choices, self.options.limits, self.options.minimize, refused)
        self._save(self.result.model_copy(update={"search": search}))

    def _run(self, *arguments: str) -> dict[str, Any]:
        """Run a command and return its JSON. Raises EdgeformerError with its message, and InterruptedRun."""
        command = [*arguments, "--artifacts", str(self.artifacts), "--json"]
        try:
            outcome = child.run_edgeformer(command, self.progress, self._commands.append)
            code = outcome.code
        except KeyboardInterrupt:  # the command was interrupted, too
            code = InterruptedRun.exit_code
        if code == InterruptedRun.exit_code:
            raise InterruptedRun("interrupted; the same command continues the search")
        if code not in _DONE:
            raise _CommandError(f"edgeformer {arguments[0]}: {outcome.problem}")
        return outcome.document

    def _recipe(self, model: str) -> Path:
        return self.folder / "recipes" / f"{model}.yaml"

    def _report(self, model: str) -> Path:
        return self.folder / f"{model}.{self.device}.json"

    def _searched(self, name: str) -> SearchedModel:
        return next(model for model in self.result.models if model.name == name)

    def _update(self, name: str, **changes: Any) -> None:
        models = [model.model_copy(update=changes) if model.name == name else model for model in self.result.models]
        self._save(self.result.model_copy(update={"models": tuple(models)}))

    def _save(self, result: ModelSearch) -> None:
        self.result = result
        write_json(self.folder / SEARCH_FILE, result)
