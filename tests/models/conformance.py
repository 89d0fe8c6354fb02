"""Conformance suite of models: checks that every model passes, built in or from another package."""

import copy
import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.export.audit import audit_sharing
from edgeformer.export.graphs import ALIGNMENT, weights_file, write_graph
from edgeformer.models import REGISTRY, model_spec_of
from edgeformer.models.adapter import FittedAdapter, count_parameters, run_scorer
from edgeformer.models.blocks.layers import fp16_copy
from edgeformer.models.blocks.tracing import Exits, Graphs, extract_outputs, state_name
from edgeformer.models.distillation import Losses
from edgeformer.models.weights import load_model, save_model
from edgeformer.runtimes.decoder import Decoder, StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.torch.session import TorchEngine
from edgeformer.tasks import Prepared, get_task
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.training.plan.memory import predict_peak
from edgeformer.training.plan.plan import count_offline

Arrays = Mapping[str, NDArray[Any]]

HEAVY = ("torch", "onnx", "onnxruntime", "transformers", "safetensors")
FP32_TOLERANCE = 1e-4
"""Largest difference between the logits of an FP32 graph and torch; export has the same limit."""
FP16_TOLERANCE = 1e-2
"""The same for FP16, relative to the logits' standard deviation."""


class Case:
    """A model with a tiny recipe and its data. ``model`` is in evaluation mode, with distinct values in all weights."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        torch.manual_seed(0)
        self.recipe, self.task, self.model_spec = recipe, get_task(recipe.task), model_spec_of(recipe)
        self.adapter = self.model_spec.adapter
        self.prepared: Prepared = self.task.rows.prepare(recipe, folder, Progress())
        if isinstance(self.adapter, FittedAdapter):
            self.recipe, self.model = self.adapter.sized(recipe, self.prepared)
            self.model.eval()
        else:
            self.model = self.adapter.build(recipe).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.exits, self.input_names = Exits(self.model).exits, self.task.golden_names[0]
        self.golden = self.task.rows.golden_inputs(self.prepared, recipe)

    def inputs(self, rows: int | None = None, length: int | None = None) -> dict[str, NDArray[np.int64]]:
        """Return golden inputs of the graphs, cut to a number of rows and tokens."""
        return {name: self.golden[name][:rows, :length] for name in self.input_names}

    @cached_property
    def graphs(self) -> Graphs:
        """All graphs, traced once for all checks."""
        return self.adapter.trace(self.model, self.input_names, steps=True)


def as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@torch.inference_mode()
def torch_outputs(case: Case, inputs: Arrays, model: nn.Module | None = None) -> dict[str, NDArray[Any]]:
    """Run the module with all exits; results by the names of the graph's outputs."""
    exits = Exits(model or case.model)
    tensors = as_tensors(inputs)
    results = exits(*(tensors[name] for name in case.input_names))
    return {name: tensor.numpy() for name, tensor in zip(exits.outputs, results, strict=True)}


def graph_digest(model: onnx_ir.Model) -> tuple[dict[str, str], Counter[str]]:
    """Return output → digest of all nodes, types and numbers that lead to it, and the number of nodes per operator.

    Equal digests mean that two graphs are equal but for names and the order of independent nodes.
    """

    def digest(*parts: object) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    digests = {value: digest("input", value.name, value.dtype) for value in model.graph.inputs}
    for value in model.graph.initializers.values():
        stored: Any = value.const_value
        digests[value] = digest("stored", stored.dtype, stored.shape.numpy(), stored.tobytes())
    for node in model.graph:
        attributes = sorted((name, attribute.value) for name, attribute in node.attributes.items())
        operands = [digests[value] if value is not None else "" for value in node.inputs]
        for index, value in enumerate(node.outputs):
            digests[value] = digest(node.domain, node.op_type, attributes, operands, index)
    outputs = {str(value.name): digest(digests[value], value.dtype) for value in model.graph.outputs}
    return outputs, Counter(node.op_type for node in model.graph)


def check_identity(case: Case) -> None:
    """The kind is unique, the task exists, and cards and hubs get their texts."""
    model_spec, card_line = case.model_spec, case.model_spec.card_line(case.recipe.model)
    assert [other.kind for other in REGISTRY.all()].count(model_spec.kind) == 1
    assert model_spec.tasks and all(get_task(name).name == name for name in model_spec.tasks)
    assert case.recipe.task in model_spec.tasks and isinstance(case.recipe.model, model_spec.config_type)
    assert card_line.strip() == card_line and card_line and "\n" not in card_line
    assert model_spec.tags and all(tag == tag.lower().strip() for tag in model_spec.tags)
    assert model_spec.model_type and model_spec.architecture


def check_configuration_without_torch(case: Case) -> None:
    """A new process validates the recipe and reads its properties without importing torch or a runtime."""
    program = (
        "import json, sys\n"
        "from edgeformer.models import model_spec_of, recipe_type\n"
        "document = json.load(sys.stdin)\n"
        "kind = recipe_type(document['task'], document['model']['kind'])\n"
        "recipe = kind.model_validate(document, strict=False)\n"
        "spec, model = model_spec_of(recipe), recipe.model\n"
        "print(spec.loops(model), *spec.trained_exits(model), spec.leaks(model), spec.card_line(model))\n"
        "assert recipe.model_dump(mode='json') == document\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    document = json.dumps(case.recipe.model_dump(mode="json"))
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, input=document, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    spec, model = case.model_spec, case.recipe.model
    properties = (spec.loops(model), *spec.trained_exits(model), spec.leaks(model), spec.card_line(model))
    assert process.stdout.splitlines() == [" ".join(map(str, properties)), ""]


def check_initial_weights(case: Case) -> None:
    """Weights depend on the seed alone and are finite; their number is known without building the model."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return case.adapter.build(case.recipe)

    first, second, other = (build(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(tensor.isfinite().all() for tensor in first.values())
    is_fitted = isinstance(case.adapter, FittedAdapter)  # from zeros: the optimum does not depend on the start
    assert is_fitted != any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    assert count_offline(case.recipe) == count_parameters(build(1))
    assert build(1).training


def check_loss(case: Case) -> None:
    """The loss is a finite sum over rows with a gradient for every parameter, and a gradient step lowers it."""
    model = copy.deepcopy(case.model)
    loss = case.adapter.loss(model, case.recipe, case.prepared)
    arrays = case.task.rows.batch(case.prepared.train, np.arange(4), case.prepared.pad)

    def loss_of(rows: slice) -> Losses:
        return loss(model, as_tensors({name: array[rows] for name, array in arrays.items()}))

    total = loss_of(slice(0, 4)).total
    assert total.ndim == 0 and total.isfinite() and total > 0
    assert all(part.isfinite() for part in loss_of(slice(0, 4)).parts.values())
    assert torch.allclose(total, loss_of(slice(0, 2)).total + loss_of(slice(2, 4)).total, rtol=1e-5)
    total.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without, f"no gradient: {without}"
    with torch.no_grad():
        squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        for parameter in model.parameters():
            parameter -= 1e-2 * float(total) / squared * parameter.grad  # type: ignore[operator]
    assert loss_of(slice(0, 4)).total < total


def check_exits(case: Case) -> None:
    """Exits rise, the last one is the full model; outputs are logits of each, then the state after every loop."""
    spec, model, exits = case.model_spec, case.recipe.model, case.exits
    module = Exits(case.model)
    loops, trained = spec.loops(model), spec.trained_exits(model)
    assert list(exits) == sorted(set(exits)) and exits[-1] == loops
    assert set(trained) <= set(exits) and (not trained or trained[-1] == loops)
    assert tuple(module.outputs) == (*map(exit_logits, exits), *(state_name(n) for n in range(1, loops + 1)))
    inputs = case.inputs(3)
    outputs = torch_outputs(case, inputs)
    assert {array.dtype for array in outputs.values()} == {np.dtype(np.float32)}
    assert len({outputs[exit_logits(exit_)].shape for exit_ in exits}) == 1
    with torch.inference_mode():
        full = case.adapter.whole(case.model).eval()(*as_tensors(inputs).values())
    assert np.abs(full.numpy() - outputs[exit_logits(loops)]).max() < FP32_TOLERANCE
    for exit_, next_exit in itertools.pairwise(exits):
        logits, next_logits = outputs[exit_logits(exit_)], outputs[exit_logits(next_exit)]
        assert not np.allclose(logits, next_logits, atol=FP32_TOLERANCE), f"exits {exit_} and {next_exit} are equal"


def check_scorer(case: Case) -> None:
    """Training and export score alike: the scorer gives the loss that follows from the exits' logits."""
    arrays = case.golden
    scorer: Any = case.adapter.scorer(case.model).eval()
    assert set(scorer.inputs) <= arrays.keys()
    with torch.inference_mode():
        outputs = {name: tensor.numpy() for name, tensor in run_scorer(scorer, as_tensors(arrays)).items()}
    meter = case.task.meter(case.model_spec.trained_exits(case.recipe.model))
    meter.add(outputs, arrays)
    last = case.exits[-1]
    logits = torch_outputs(case, arrays)[exit_logits(last)]
    labels = {name: arrays[name] for name in case.task.golden_names[1]}
    exported = case.task.golden_score(last, logits.reshape(-1, logits.shape[-1]), labels)
    scored = meter.score()
    assert scored.n == exported.n and scored.loss == pytest.approx(exported.loss, rel=1e-5)
    assert case.task.metric.of(scored) == pytest.approx(case.task.metric.of(exported), rel=1e-5)


def check_graphs(case: Case, folder: Path) -> None:
    """Graphs of all exits compute what torch does, up to ``max_positions`` tokens, and store what they need once."""
    graphs, parameters = case.graphs, case.adapter.needed(case.model)
    exits = Exits(case.model)
    assert tuple(parameters) == case.exits and max(parameters.values()) <= count_parameters(case.model)
    assert [value.name for value in graphs.exits.graph.inputs] == list(case.input_names)
    assert tuple(value.name for value in graphs.exits.graph.outputs) == tuple(exits.outputs)
    for exit_ in case.exits:
        path = folder / f"exit{exit_}.onnx"
        write_graph(extract_outputs(graphs.exits, {exit_logits(exit_): "logits"}), path)
        sharing = audit_sharing(onnx.load(str(path)), parameters[exit_])
        assert sharing.stored_parameters == sharing.unique_parameters, f"exit {exit_}"
        with OnnxSession(path, threads=1) as session:
            longest = {name: np.ones((1, case.recipe.model.max_positions), dtype=np.int64) for name in case.input_names}
            for inputs in (case.inputs(1, 1), case.inputs(1, 5), case.inputs(3), longest):
                logits = session.run(inputs)["logits"]
                assert logits.dtype == np.float32
                difference = np.abs(logits - torch_outputs(case, inputs)[exit_logits(exit_)]).max()
                assert difference < FP32_TOLERANCE, [array.shape for array in inputs.values()]
    states = {state_name(loop): state_name(loop) for loop in range(1, case.exits[-1] + 1)}
    write_graph(extract_outputs(graphs.exits, states), folder / "states.onnx")
    with OnnxSession(folder / "states.onnx", threads=1) as session:
        expected = torch_outputs(case, case.inputs())
        for name, state in session.run(case.inputs()).items():
            scale = max(1.0, np.abs(expected[name]).max())
            assert np.abs(state - expected[name]).max() < FP32_TOLERANCE * scale, name


def check_shared_weights(case: Case, folder: Path) -> None:
    """Graphs that share a weights file store no tensor twice."""
    graphs = {"exits": case.graphs.exits, **case.graphs.steps}
    if case.graphs.decode is not None:
        graphs["decode"] = case.graphs.decode
    with weights_file(folder / "weights") as weights:
        for name, graph in graphs.items():
            write_graph(graph, folder / f"{name}.onnx", weights)
    sizes = {
        value.const_value.tobytes(): value.const_value.nbytes
        for graph in graphs.values()
        for value in graph.graph.initializers.values()
        if value.const_value is not None
    }
    total = sum(sizes.values())
    assert (folder / "weights").stat().st_size <= total + ALIGNMENT * len(sizes)
    if case.graphs.shared_weights:  # a single graph may hold less than the model, all of them hold it once
        assert total < 1.1 * 4 * count_parameters(case.model) + 64 * ALIGNMENT


def check_steps(case: Case, folder: Path) -> None:
    """A host that loops the parts gets every exit's logits; together the parts store the model once."""
    if not case.graphs.steps:  # a model without a loop has no parts
        assert case.exits == (1,)
        return
    parts = {part: folder / f"{part}.onnx" for part in case.graphs.steps}
    for part, graph in case.graphs.steps.items():
        write_graph(graph, parts[part])
    stored = sum(audit_sharing(onnx.load(str(path)), 0).stored_parameters for path in parts.values())
    assert stored == count_parameters(case.model)
    longest = {name: np.ones((1, case.recipe.model.max_positions), dtype=np.int64) for name in case.input_names}
    for exit_ in case.exits:
        with StepSession(parts, case.exits[-1], exits=(exit_,)) as session:
            assert session.provider == "CPUExecutionProvider"
            for inputs in (case.inputs(1, 1), case.inputs(3), longest):
                difference = session.run(inputs)[exit_logits(exit_)] - torch_outputs(case, inputs)[exit_logits(exit_)]
                assert np.abs(difference).max() < FP32_TOLERANCE, f"exit {exit_}"


def check_fp16(case: Case, folder: Path) -> None:
    """Norms stay in FP32, other weights become FP16; outputs are float32 and logits close to FP32's."""
    inputs = case.inputs()
    expected = torch_outputs(case, inputs)
    half = fp16_copy(case.model)
    exact = {id(p) for m in half.modules() if getattr(m, "keeps_float32", False) for p in m.parameters(recurse=False)}
    assert exact, "no module has keeps_float32: x² overflows FP16"
    for (name, parameter), original in zip(half.named_parameters(), case.model.parameters(), strict=True):
        assert parameter.dtype == (torch.float32 if id(parameter) in exact else torch.float16), name
        assert id(parameter) not in exact or torch.equal(parameter, original), name
    traced = graphs = case.adapter.trace(half, case.input_names, steps=False)
    if case.graphs.pieces:
        graphs = case.adapter.trace(half, case.input_names, steps=False, base=case.graphs)
        assert graph_digest(graphs.exits) == graph_digest(traced.exits), "not the graph of tracing the FP16 model"
    assert not graphs.steps
    path = folder / "half.onnx"
    write_graph(graphs.exits, path)
    sharing = audit_sharing(onnx.load(str(path)), count_parameters(case.model))
    assert sharing.stored_parameters == sharing.unique_parameters
    with OnnxSession(path, threads=1) as session:
        outputs = session.run(inputs)
    for name, reference in expected.items():
        assert outputs[name].dtype == np.float32
        if name.startswith("logits"):
            assert 0 < np.abs(outputs[name] - reference).max() < FP16_TOLERANCE * reference.std(), name


def check_round_trip(case: Case, run: Path) -> None:
    """Export opens what training saves; config.json describes it, and clients can read a bundle's."""
    (run / "model").mkdir(parents=True)
    save_model(run / "model", case.model, case.recipe, case.prepared)
    write_text(run / "recipe.yaml", case.recipe.to_yaml())
    loaded, state = load_model(run), case.model.state_dict()
    assert not loaded.training and loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    spec, model = case.model_spec, case.recipe.model
    assert (config["model_type"], config["architectures"]) == (spec.model_type, [spec.architecture])
    for precision in ("fp32", "int8"):
        client = spec.client_config(config, precision)  # type: ignore[arg-type]
        assert json.loads(json.dumps(client)) == client and client["vocab_size"] == model.vocab_size
        if not case.task.can_write:
            assert client["iterations"] == spec.loops(model)


def check_trimming(case: Case) -> None:
    """A smaller token table gives bit-identical outputs, or the model refuses to be trimmed."""
    if case.task.can_write or isinstance(case.adapter, FittedAdapter):
        with pytest.raises(InputError, match="--vocab-trim"):
            case.adapter.trim(case.model, torch.arange(3))
        return
    inputs = case.inputs()
    kept = np.union1d(inputs["input_ids"], [case.prepared.pad])
    assert len(kept) < case.recipe.model.vocab_size
    state = copy.deepcopy(case.model.state_dict())
    trimmed = case.adapter.trim(case.model, torch.from_numpy(kept))
    assert not trimmed.training
    renumbered = {**inputs, "input_ids": np.searchsorted(kept, inputs["input_ids"])}
    expected = torch_outputs(case, inputs)
    for name, output in torch_outputs(case, renumbered, trimmed).items():
        assert np.array_equal(output, expected[name]), name
    original = {id(parameter) for parameter in case.model.parameters()}
    new = [parameter for parameter in trimmed.parameters() if id(parameter) not in original]
    assert [len(parameter) for parameter in new] == [len(kept)], "everything but the table is shared"
    assert all(torch.equal(tensor, state[name]) for name, tensor in case.model.state_dict().items())


def check_decoding(case: Case, folder: Path) -> None:
    """Decoding token by token, in torch and in the decode graph, equals the full text, or the model refuses."""
    if not case.task.can_write:
        assert case.adapter.causality(case.model) is None
        with pytest.raises(InputError):
            case.adapter.decoder(case.model)
        return
    probe = case.adapter.causality(case.model)
    assert probe is not None and probe.leaks == case.model_spec.leaks(case.recipe.model)
    inputs = case.inputs(2, 16)
    ids, expected = inputs["input_ids"], torch_outputs(case, inputs)
    for exit_ in case.exits:
        decoder: Any = Decoder(TorchEngine(case.adapter.decoder(case.model)))  # type: ignore[no-untyped-call]
        for position in range(ids.shape[1]):
            decoder.read_rows(ids[:, position : position + 1])
            decoder.advance(exit_)
            difference = np.abs(decoder.row_logits(exit_) - expected[exit_logits(exit_)][:, position]).max()
            assert difference < FP32_TOLERANCE, (exit_, position)
    write_graph(case.graphs.decode, folder / "decode.onnx")  # type: ignore[arg-type]
    with OnnxSession(folder / "decode.onnx", threads=1) as session:
        logits = decode_windows(session, ids, 5)
    assert np.abs(logits - expected[exit_logits(case.exits[-1])][:, 4:]).max() < FP32_TOLERANCE


def check_memory_plan(case: Case) -> None:
    """The memory of a training step can be predicted without data, also for a GPU."""
    if isinstance(case.adapter, FittedAdapter):
        size, larger = (case.adapter.fit_size(case.recipe, rows, 20 * rows) for rows in (1000, 2000))
        plan = size.memory
        assert plan.peak_bytes < larger.memory.peak_bytes
    else:
        plan = predict_peak(case.recipe, device_kind="cuda", precision="fp32")
    assert plan.weights >= 4 * count_parameters(case.model) and plan.peak_bytes > plan.weights
