"""Export of a trained run: the torch FP32 model is the reference, and its graphs are traced in every precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of, write_json, write_text
from edgeformer.artifacts.golden import Golden, write_golden
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import BUNDLE_FOLDER, CONFIG_FILE, MODEL_FOLDER, TOKENIZER_CONFIG, TOKENIZER_FILE
from edgeformer.bundle import checksum_files
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import TextBounds, special_ids
from edgeformer.data.trimming import Keeping, Trimmed
from edgeformer.export.fp16 import max_abs_activation
from edgeformer.export.graphs import write_graphs
from edgeformer.export.judging import Baseline, Exportable, Judge
from edgeformer.export.previous import SOURCES, PreviousBundle
from edgeformer.export.quantize import quantized_graphs
from edgeformer.export.variants import TRIMMED_FOLDER, ExportOptions, ExportSource, Variant, requested_variants
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import count_parameters
from edgeformer.models.blocks.layers import fp16_copy
from edgeformer.models.blocks.tracing import Exits, Piece
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import GOLDEN_INPUTS, load_model
from edgeformer.run import Run
from edgeformer.runtimes import BuildJob
from edgeformer.runtimes.runtime import Calls
from edgeformer.runtimes.session import Array
from edgeformer.system.host import code_version, now
from edgeformer.tasks import Origin, TextReader, get_task
from edgeformer.tasks.scoring import Validation, open_validation

CALIBRATION_ROWS = 300
"""NNCF's default. Rows go through the model one by one, so that padding does not widen the ranges."""

_FP16_NOTE = (
    "FP16: a CPU computes FP16 graphs in FP32, so these figures show the effect of rounded weights only; run "
    "edgeformer verify on the device for the rest"
)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error while a file of a run is read into an ArtifactError that names it."""
    try:
        yield
    except EdgeformerError:
        raise
    except Exception as error:  # numpy raises many types, tokenizers plain Exceptions
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


def open_exportable(run: Run, *, allow_leak: bool = False) -> Exportable:
    """Load a run's weights and golden inputs, and probe the model for leaks. Raises ArtifactError, InputError."""
    task = get_task(run.recipe.task)
    names, answer_names = task.input_names(run.recipe.model), task.golden_names[1]
    path = run.folder / MODEL_FOLDER / GOLDEN_INPUTS
    with _reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
        arrays = {name: loaded[name] for name in (*names, *answer_names)}
    if any(array.dtype != np.int64 or 0 in array.shape for array in arrays.values()):
        raise ArtifactError(f"{path}: damaged (int64 arrays with rows are expected); train the run again")
    model = load_model(run.folder)
    try:
        causality = run.model_spec.adapter.causality(model)
    except ValueError as error:
        raise ArtifactError(
            f"{run.folder}: the causality probe cannot judge this model: {error}; train the run again"
        ) from None
    # A run whose architecture leaked stays marked, even if training shrank the leak below what the probe detects.
    leaks, evidence = run.manifest.leaks, "run.json says so"
    if causality is not None and causality.leaks:
        leaks, evidence = True, f"outputs depend on tokens up to {causality.reach} positions ahead"
    if leaks and not allow_leak:
        raise InputError(
            f"{run.folder}: this model leaks future tokens ({evidence}), so its scores are void; add --allow-leak to "
            "export it anyway, marked as leaking"
        )
    inputs = {name: arrays[name] for name in names}
    return _with_references(run.settled, model, inputs, {name: arrays[name] for name in answer_names}, leaks=leaks)


def _with_references(
    recipe: Recipe, model: nn.Module, inputs: dict[str, NDArray[np.int64]], answers: Mapping[str, Array], *, leaks: bool
) -> Exportable:
    """Compute torch FP32's answers to the inputs; the arguments are those of :class:`Exportable`."""
    task, adapter = get_task(recipe.task), model_spec_of(recipe).adapter
    exits = Exits(model)
    with torch.inference_mode():
        outputs = exits(*map(torch.from_numpy, inputs.values()))
    count = len(exits.exits)
    logits = {exit_: output.numpy() for exit_, output in zip(exits.exits, outputs[:count], strict=True)}
    states = {loop: state.numpy() for loop, state in enumerate(outputs[count:], start=1)}
    golden = inputs | {name: answers[name] for name in task.golden_names[1]} | task.golden_answers(logits)
    return Exportable(
        task=task, golden=Golden(Path(recipe.name), golden), needed=adapter.needed(model), data=recipe.data,
        exits=exits.exits, loops=len(states), max_positions=recipe.model.max_positions, recipe=recipe,
        adapter=adapter, model=model, parameters=count_parameters(model), inputs=inputs,
        answers=task.right_answers(answers, logits),
        logits={exit_: task.counted_logits(output, answers) for exit_, output in logits.items()}, states=states,
        leaks=leaks,
    )  # fmt: skip


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run's folder. Raises ArtifactError."""
    with _reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged (an object is expected); train the run again")
    return content


@dataclass(frozen=True)
class TrimmedModel:
    """A model with a trimmed vocabulary, its tokenizer, and what trimming did to the validation text."""

    subject: Exportable
    trimmed: Trimmed
    vocabulary: Vocabulary
    reader: TextReader


def write_trimmed_companions(model_folder: Path, trimmed: Trimmed, target: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json for a trimmed vocabulary. Raises ArtifactError."""
    numbers = {str(old): new for new, old in enumerate(trimmed.kept.tolist())}
    config, tokenizer_config = (_read_json(model_folder / name) for name in (CONFIG_FILE, TOKENIZER_CONFIG))
    special = {key: str(old) for key, old in config.items() if key.endswith("_token_id") and old is not None}
    added: dict[str, Any] = tokenizer_config.get("added_tokens_decoder", {})
    if removed := {*special.values(), *added} - numbers.keys():
        raise ArtifactError(
            f"{model_folder}: {CONFIG_FILE} or {TOKENIZER_CONFIG} names token {min(removed)}, which the trimmed "
            "vocabulary lacks; train the run again"
        )
    new_ids = {key: numbers[old] for key, old in special.items()}
    write_json(target / CONFIG_FILE, {**config, **new_ids, "vocab_size": len(trimmed.kept)})
    if added:
        tokenizer_config["added_tokens_decoder"] = {str(numbers[old]): token for old, token in added.items()}
    write_json(target / TOKENIZER_CONFIG, tokenizer_config)
    write_text(target / TOKENIZER_FILE, trimmed.tokenizer.to_str(pretty=True))


@dataclass(kw_only=True)
class RunSource(ExportSource):
    """A finished run. ``requested_exits`` become graphs; ``facts`` are the task's fields of bundle.json.

    ``validations``: whether the vocabulary is trimmed → scorer of the validation split.
    """

    run: Run
    subject: Exportable
    requested_exits: Sequence[int]
    reader: TextReader
    facts: dict[str, Any]
    trimmed: TrimmedModel | None
    validations: dict[bool, Validation | None] = field(default_factory=dict)
    baseline: Baseline = field(default_factory=dict)
    max_activation: float = 0.0

    @classmethod
    def open(cls, run: Run, options: ExportOptions, progress: Progress) -> RunSource:
        """Load the model, and check the options against it. Raises ArtifactError, InputError."""
        # 1. Check options and model
        for flag, size in {"--vocab-keep": options.vocab_keep, "--vocab-max": options.vocab_max}.items():
            if size is not None and not options.vocab_trim:
                raise InputError(f"{flag}: changes what --vocab-trim keeps; add --vocab-trim")
        subject = open_exportable(run, allow_leak=options.allow_leak)
        if subject.parameters != run.manifest.parameters:
            raise EdgeformerError(
                f"{run.folder}: run.json names {run.manifest.parameters:,} parameters and the weights have "
                f"{subject.parameters:,}; train the run again"
            )
        config = run.folder / MODEL_FOLDER / CONFIG_FILE
        data = subject.recipe.data
        with _reading(config):
            keys = _read_json(config)
            pad_id = int(keys["pad_token_id" if "pad_token_id" in keys else "boundary_token_id"])
        facts: dict[str, Any] = {"labels": data.classes} if data.classes else {}
        facts |= {"max_length": data.tokens_at_once, "pad_id": pad_id}
        requested = subject.exits if options.exits == "all" else options.exits
        for exit_ in requested:
            if exit_ not in subject.exits:
                names = ", ".join(map(str, subject.exits))
                raise InputError(
                    f"--exit {exit_}: {subject.recipe.name} has exits after the loops {names}; give one of them, or all"
                )

        # 2. Read the tokenizer, and trim it
        path = run.folder / MODEL_FOLDER / TOKENIZER_FILE
        with _reading(path):
            tokenizer = Tokenizer.from_file(str(path))
        bounds = TextBounds.of(tokenizer, run.tokenizer_config()) if subject.task.can_write else None
        reader = TextReader(tokenizer, pad_id, run.manifest.vocabulary, bounds)
        trimmed = None
        if options.vocab_trim:
            # Golden inputs are renumbered; a removed token becomes the unknown one. References are those of the trimmed
            # model in torch: the cost of trimming is in the validation score.
            keeping = Keeping(options.vocab_keep or 0, options.vocab_max)
            fingerprints = run.manifest.data.fingerprints
            trim, vocabulary = subject.task.rows.trim(subject.recipe.data, tokenizer, fingerprints, keeping)
            special = special_ids(trim.tokenizer)
            new_ids = np.full(vocabulary.original, special.unk, dtype=np.int64)
            new_ids[trim.kept] = np.arange(len(trim.kept))
            inputs = {**subject.inputs, "input_ids": new_ids[subject.inputs["input_ids"]]}
            model = subject.adapter.trim(subject.model, torch.from_numpy(trim.kept))
            small = _with_references(subject.recipe, model, inputs, subject.answers, leaks=subject.leaks)
            trimmed = TrimmedModel(small, trim, vocabulary, TextReader(trim.tokenizer, special.pad, vocabulary.kept))

        # 3. Describe the source
        problem = None
        if not subject.task.can_answer:
            problem = f"a {subject.task.noun} has no labelled texts"
        elif run.manifest.data.fingerprints.get("train") is None:
            problem = "run.json does not record the training set; import the model again with --data DIR"
        return cls(
            options=options, progress=progress, folder=run.folder / BUNDLE_FOLDER, target=run.recipe.target,
            made_from={name: sha256_of(run.folder / name) for name in SOURCES}, exits=subject.exits,
            calibration_problem=problem, rounds=options.joining, run=run, subject=subject, requested_exits=requested,
            reader=reader, facts=facts, trimmed=trimmed,
        )  # fmt: skip

    def begin(self, new: Path) -> None:
        model_folder, subject = self.run.folder / MODEL_FOLDER, self.subject
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
            if not (model_folder / name).is_file():
                raise ArtifactError(f"{model_folder / name}: missing; train the run again")
            shutil.copyfile(model_folder / name, new / name)
        # Like bundle.json: the recipe may say more than training did.
        path = model_folder / CONFIG_FILE
        config = _read_json(path) | subject.task.answer_config(subject.recipe.data)
        with _reading(path):
            client_config = self.run.model_spec.client_config(config)
        write_json(new / CONFIG_FILE, client_config)
        if (model_folder / CARD_FILE).is_file():  # it may have been edited by hand
            shutil.copyfile(model_folder / CARD_FILE, new / CARD_FILE)
        else:
            write_text(new / CARD_FILE, model_card(self.run.manifest, subject.recipe))
        write_golden(new, subject.golden.arrays)
        readers = {False: self.reader}
        if self.trimmed is not None:
            (new / TRIMMED_FOLDER).mkdir()
            readers[True] = self.trimmed.reader
        origin = Origin(self.run.manifest.data.fingerprints)
        for is_trimmed, reader in readers.items():
            self.validations[is_trimmed], problem = open_validation(
                subject.task, self.run.settled.data, reader, origin, self.progress
            )
            note = f"scores: on the golden inputs only, because {problem}"
            if problem is not None and note not in self.notes:
                self.notes.append(note)
        if self.options.fp16:
            self.max_activation = max_abs_activation(Exits(subject.model), *subject.inputs.values())
            self.notes.append(_FP16_NOTE)

    def judge(self, folder: Path, entry: ArtifactManifest | Variant) -> Judge:
        variant = Variant(entry.precision, entry.trimmed)
        trimmed = self.trimmed if variant.trimmed else None
        return Judge(
            folder=folder, reference=trimmed.subject if trimmed is not None else self.subject, variant=variant,
            validation=self.validations[variant.trimmed], baseline=self.baseline, max_activation=self.max_activation,
            vocabulary=trimmed.vocabulary if trimmed is not None else None,
        )  # fmt: skip

    def make_graphs(self, folder: Path, previous: PreviousBundle) -> Iterator[ArtifactManifest]:
        needs_steps = self.options.exits == "all" or any(old.role == "step" for old in previous.rebuilt.values())
        small = self.trimmed.subject if self.trimmed is not None else None
        with bar(self.progress, "Tracing the FP32 graphs", None):
            subject, inputs = self.subject, tuple(self.subject.inputs)
            traced = {False: subject.adapter.trace(subject.model, inputs, steps=needs_steps)}
        if small is not None:
            with bar(self.progress, "Tracing the trimmed FP32 graphs", None):
                traced[True] = small.adapter.trace(small.model, inputs, steps=False, base=traced[False])
        for variant in requested_variants(self.options):
            subject = small if variant.trimmed and small is not None else self.subject
            rebuilt = [old for old in previous.rebuilt.values() if old.status == "built" and old.is_graph]
            rebuilt = [old for old in rebuilt if Variant(old.precision, old.trimmed) == variant]
            again = {int(old.exit or 0) for old in rebuilt if old.role == "exit"}
            last = subject.exits[-1]
            exits = [last] if variant.trimmed else [last, *sorted({*self.requested_exits, *again} - {last})]
            has_steps = self.options.exits == "all" or any(old.role == "step" for old in rebuilt)
            try:
                graphs = traced[variant.trimmed]
                if variant.precision == "fp16":
                    with bar(self.progress, "Making the FP16 graphs", None):
                        steps = needs_steps and not variant.trimmed
                        graphs = subject.adapter.trace(fp16_copy(subject.model), inputs, steps=steps, base=graphs)
                if not has_steps:
                    graphs = replace(graphs, steps={})
                if variant.precision == "int8" or variant.precision == "int4":
                    graphs = quantized_graphs(graphs, variant.precision, folder)
                with write_graphs(folder, variant, graphs, exits) as written:
                    judge = self.judge(folder, variant)
                    for artifact in judge.judge_all(written):
                        yield judge.add_rounded(artifact) if self.rounds else artifact
            except EdgeformerError as error:
                if variant == Variant("fp32"):
                    raise  # there is no bundle without it
                yield ArtifactManifest(
                    id=variant.id(), file=None, format=ONNX, precision=variant.precision,
                    trimmed=variant.trimmed, status="rejected", reason=str(error),
                )  # fmt: skip

    def build_job(self, folder: Path, graphs: tuple[ArtifactManifest, ...]) -> BuildJob:
        subject = self.subject
        return BuildJob(
            bundle=folder, graphs=graphs, precision="fp16" if self.options.fp16 else "fp32",
            max_length=subject.recipe.data.tokens_at_once, max_positions=subject.recipe.model.max_positions,
            progress=self.progress, note=self.notes.append, module=self.module, calibration=self.calibration_calls,
            texts=self.real_texts,
        )  # fmt: skip

    def real_texts(self) -> tuple[list[str], str]:
        """Return up to 2,000 validation texts of a language model, or built-in texts if they cannot be read."""
        if self.validations.get(False) is None:
            return [*PARAGRAPHS], "built-in texts, because the validation split cannot be read"
        texts = self.subject.task.rows.set_texts(self.run.settled.data, "validation").texts
        return list(map(str, texts[:2000])), "validation texts"

    def module(self, graph: ArtifactManifest) -> nn.Module:
        """Return the torch module of one of this model's graphs, in evaluation mode, from its inputs to its logits."""
        adapter, model, exits = self.subject.adapter, self.subject.model, self.subject.exits
        model = adapter.exported(fp16_copy(model) if graph.precision == "fp16" else model)
        if graph.exit in (None, exits[-1]):
            whole: nn.Module = adapter.whole(model)
            return whole.eval()
        return Piece(model, lambda *inputs: model.every_exit(*inputs)[exits.index(graph.exit)]).eval()

    def calibration_calls(self) -> Calls:
        """Read a fixed sample of the training texts, as inputs of one row each. Raises DataError."""
        if self.calibration_problem is not None:
            raise DataError(self.calibration_problem)
        data: Any = self.run.settled.data
        try:
            texts = self.subject.task.rows.available_sets(data).get("train")
        except (InputError, MissingDependencyError) as error:
            raise DataError(f"the training split cannot be read: {error}") from None
        if texts is None or not len(texts):
            raise DataError("the training split cannot be read, because recipe.yaml names none")
        if texts.fingerprint() != self.run.manifest.data.fingerprints["train"]:
            raise DataError("the training split has changed since this model was trained; restore the data")
        sample = np.random.default_rng(0).permutation(len(texts))[:CALIBRATION_ROWS]
        encoded, _ = encode_texts(self.reader.tokenizer, texts.take(sample).texts, data.tokens_at_once)
        return [collate(encoded, np.array([row]), self.reader.pad) for row in range(len(encoded))]

    def manifest(self, folder: Path, artifacts: Sequence[ArtifactManifest], previous: PreviousBundle) -> BundleManifest:
        """Complete the trimmed repository, and describe the new folder. Raises ArtifactError."""
        run, recipe, spec = self.run.manifest, self.subject.recipe, self.run.model_spec
        trimmed_folder, model_folder = folder / TRIMMED_FOLDER, self.run.folder / MODEL_FOLDER
        built = {artifact.precision for artifact in artifacts if artifact.trimmed and artifact.status == "built"}
        if self.trimmed is not None and built:
            write_trimmed_companions(model_folder, self.trimmed.trimmed, trimmed_folder)
            config = _read_json(trimmed_folder / CONFIG_FILE) | self.subject.task.answer_config(recipe.data)
            order: tuple[Precision, ...] = ("int8", "int4", "fp16", "fp32")  # clients load the first by default
            write_json(trimmed_folder / CONFIG_FILE, spec.client_config(config, min(built, key=order.index)))
            write_golden(trimmed_folder, self.trimmed.subject.golden.arrays)
        elif self.trimmed is not None:
            shutil.rmtree(trimmed_folder)
        previous.link_kept(artifacts, folder)
        subjects = {note.partition(":")[0] for note in self.notes}
        kept_notes = (note for note in previous.notes if note.partition(":")[0] not in subjects)
        return BundleManifest(
            run=run.run, task=run.task, created=now(), **self.facts, notes=(*self.notes, *kept_notes),
            made_from=dict(self.made_from or {}), exits=spec.trained_exits(recipe.model),
            loops=spec.loops(recipe.model), leaks=self.subject.leaks, proof=run.proof, parameters=run.parameters,
            max_positions=recipe.model.max_positions, synthetic=run.data.synthetic, target=recipe.target,
            data=recipe.data, data_fingerprints=run.data.fingerprints, artifacts=tuple(artifacts),
            code_version=code_version(), files=checksum_files(folder, artifacts),
        )  # fmt: skip
