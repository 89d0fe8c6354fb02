"""What every model family must do, as checks that a test calls with the family at hand. See CONTRIBUTING on adding one.

Each check raises AssertionError with what is wrong. None of them knows a family's name.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.recipe import Recipe
from edgeformer.export.audit import audit_sharing
from edgeformer.export.graphs import ALIGNMENT, weights_file, write_graph
from edgeformer.models import REGISTRY, ModelSpec, model_spec_of
from edgeformer.models.adapter import Losses, ModelAdapter, Place, count_parameters, run_scorer
from edgeformer.models.layers import half_for_export
from edgeformer.models.tracing import Graphs, cut_out, state_name
from edgeformer.models.weights import load_model, save_model
from edgeformer.runtimes.onnxruntime.decode import StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.torch.session import torch_decoder
from edgeformer.tasks import Prepared, Task, task_named
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.training.memory import predict_peak
from edgeformer.training.plan import count_offline
from tests.models.same_graph import described

Arrays = Mapping[str, NDArray[Any]]

HEAVY = ("torch", "onnx", "onnxruntime", "transformers", "safetensors")
CLOSE = 1e-4
"""How far an FP32 graph's logits may be from torch's: export's own bar."""
HALF = 1e-2
"""The same for FP16, of the logits' spread."""


def as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Case:
    """A family with a recipe of a tiny model, and that recipe's data.

    Attributes:
        model: in evaluation mode; no two of its parameters hold the same numbers, as after training.
    """

    recipe: Recipe
    prepared: Prepared
    model: nn.Module

    @property
    def model_spec(self) -> ModelSpec:
        return model_spec_of(self.recipe)

    @property
    def task(self) -> Task:
        return task_named(self.recipe.task)

    @property
    def exits(self) -> Any:
        """The module with all exits."""
        return self.model_spec.adapter.exits(self.model)

    @property
    def names(self) -> tuple[str, ...]:
        """What goes into the graphs."""
        return self.task.golden_names[0]

    def golden(self) -> dict[str, NDArray[np.int64]]:
        """Real inputs with the right answers."""
        return self.task.golden_inputs(self.prepared, self.recipe)

    def inputs(self, rows: int | None = None, length: int | None = None) -> dict[str, NDArray[np.int64]]:
        """Real inputs of these graphs, cut to so many rows and tokens."""
        return {name: self.golden()[name][:rows, :length] for name in self.names}

    def batch(self, rows: int) -> dict[str, NDArray[np.int64]]:
        """A batch as training gets it."""
        return self.task.batch(self.prepared.train, np.arange(rows), self.prepared.pad)

    @cached_property
    def graphs(self) -> Graphs:
        """Everything that export makes of it, traced once for all checks."""
        return self.model_spec.adapter.trace(self.model, self.names, steps=True)


def make_case(recipe: Recipe, folder: Path) -> Case:
    """A case of ``recipe``, whose data is cached in ``folder``."""
    torch.manual_seed(0)
    model, _ = model_spec_of(recipe).adapter.build(recipe, Place(for_export=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Case(recipe, task_named(recipe.task).prepare(recipe, folder, Silent()), model.eval())


@torch.inference_mode()
def torch_answers(case: Case, inputs: Arrays, model: nn.Module | None = None) -> dict[str, NDArray[Any]]:
    """What the module with all exits computes, by the names of the graph's outputs."""
    exits: Any = case.model_spec.adapter.exits(model or case.model)
    found = exits(*(torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in case.names))
    assert len(found) == len(exits.outputs), "as many results as names"
    return {name: tensor.numpy() for name, tensor in zip(exits.outputs, found, strict=True)}


def check_identity(case: Case) -> None:
    """It is found by its kind, takes it from no other, and names a task that there is."""
    model_spec = case.model_spec
    assert [other.kind for other in REGISTRY.all()].count(model_spec.kind) == 1
    assert model_spec.tasks and all(task_named(name).name == name for name in model_spec.tasks)
    assert case.recipe.task in model_spec.tasks and isinstance(case.recipe.model, model_spec.config_type)


def check_words(case: Case) -> None:
    """What a model card and a hub are told."""
    model_spec, card = case.model_spec, case.model_spec.card_line(case.recipe.model)
    assert card.strip() == card and card and "\n" not in card
    assert model_spec.tags() and all(tag == tag.lower().strip() for tag in model_spec.tags())
    assert model_spec.model_type and model_spec.architecture


def check_configuration_is_light(case: Case) -> None:
    """A process of its own validates the recipe and asks for its facts without loading torch or a runtime."""
    program = (
        "import json, sys\n"
        "from edgeformer.models import model_spec_of, recipe_type\n"
        "document = json.load(sys.stdin)\n"
        "kind = recipe_type(document['task'], document['model']['kind'])\n"
        "recipe = kind.model_validate(document, strict=False)\n"
        "family, model = model_spec_of(recipe), recipe.model\n"
        "print(family.loops(model), *family.trained_exits(model), family.leaks(model), family.card_line(model))\n"
        "assert recipe.model_dump(mode='json') == document\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    document = json.dumps(case.recipe.model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-c", program], input=document, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    model_spec, model = case.model_spec, case.recipe.model
    facts, loaded = done.stdout.splitlines()
    wanted = (
        model_spec.loops(model),
        *model_spec.trained_exits(model),
        model_spec.leaks(model),
        model_spec.card_line(model),
    )
    assert (facts, loaded) == (" ".join(map(str, wanted)), "")


def check_build_is_a_function_of_the_seed(case: Case) -> None:
    """The same seed gives the same weights, another seed others, and all of them finite; they can be counted first."""

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return case.model_spec.adapter.build(case.recipe, Place())[0]

    one, again, other = (built(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert all(tensor.isfinite().all() for tensor in one.values())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert count_offline(case.recipe) == count_parameters(built(1))
    assert built(1).training, "a fresh model is there to be trained"


def check_loss(case: Case) -> None:
    """A finite sum over what counts, with a gradient for every parameter; training lowers it."""
    model = copy.deepcopy(case.model)
    loss = case.model_spec.adapter.loss(model, case.recipe, case.prepared)
    arrays = case.batch(4)

    def of(rows: slice) -> Losses:
        return loss(model, as_tensors({name: array[rows] for name, array in arrays.items()}))

    whole = of(slice(0, 4))
    assert whole.total.ndim == 0 and whole.total.isfinite() and whole.total > 0
    assert all(part.isfinite() for part in whole.parts.values())
    halves = of(slice(0, 2)).total + of(slice(2, 4)).total
    assert torch.allclose(whole.total, halves, rtol=1e-5), "it is a sum over rows, not a mean"
    whole.total.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without, f"no gradient: {without}"
    with torch.no_grad():
        size = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        for parameter in model.parameters():
            parameter -= 1e-2 * float(whole.total) / size * parameter.grad  # type: ignore[operator]
    assert of(slice(0, 4)).total < whole.total


def check_exits(case: Case) -> None:
    """Rising exits, the last of them the whole model; logits of each, then the state after every loop."""
    model_spec, exits = case.model_spec, case.exits
    loops = model_spec.loops(case.recipe.model)
    assert list(exits.exits) == sorted(set(exits.exits)) and exits.exits[-1] == loops
    trained = model_spec.trained_exits(case.recipe.model)
    assert set(trained) <= set(exits.exits) and (not trained or trained[-1] == loops)
    assert tuple(exits.outputs) == (*map(exit_logits, exits.exits), *(state_name(n) for n in range(1, loops + 1)))
    inputs = case.inputs(3)
    found = torch_answers(case, inputs)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    assert len({found[exit_logits(exit_)].shape for exit_ in exits.exits}) == 1
    with torch.inference_mode():
        whole = model_spec.adapter.whole(case.model).eval()(*map(torch.from_numpy, inputs.values()))
    assert np.abs(whole.numpy() - found[exit_logits(loops)]).max() < CLOSE
    assert not any(
        np.allclose(found[exit_logits(one)], found[exit_logits(two)], atol=CLOSE)
        for one, two in zip(exits.exits, exits.exits[1:], strict=False)
    ), "two exits answer the same"


def check_scorer(case: Case) -> None:
    """What training scores is what export scores: the same loss from the scorer and from the exits' logits."""
    arrays = case.golden()
    scorer: Any = case.model_spec.adapter.scorer(case.model).eval()
    assert set(scorer.inputs) <= arrays.keys()
    with torch.inference_mode():
        outputs = {name: tensor.numpy() for name, tensor in run_scorer(scorer, as_tensors(arrays)).items()}
    meter = case.task.meter(case.model_spec.trained_exits(case.recipe.model))
    meter.add(outputs, arrays)
    last = case.exits.exits[-1]
    logits = torch_answers(case, arrays)[exit_logits(last)]
    answers = {name: arrays[name] for name in case.task.golden_names[1]}
    exported = case.task.golden_score(last, logits.reshape(-1, logits.shape[-1]), answers)
    scored = meter.score()
    assert scored.n == exported.n and scored.loss == pytest.approx(exported.loss, rel=1e-5)
    assert case.task.metric.of(scored) == pytest.approx(case.task.metric.of(exported), rel=1e-5)


def check_graphs(case: Case, folder: Path) -> None:
    """The graph of every exit computes what torch does, at other shapes too, and stores what it needs, once."""
    traced, needed = case.graphs, case.model_spec.adapter.needed(case.model)
    exits = case.exits.exits
    assert tuple(needed) == tuple(exits)
    assert max(needed.values()) <= count_parameters(case.model)
    assert [value.name for value in traced.exits.graph.inputs] == list(case.names)
    assert tuple(value.name for value in traced.exits.graph.outputs) == tuple(case.exits.outputs)
    for exit_ in exits:
        path = folder / f"exit{exit_}.onnx"
        write_graph(cut_out(traced.exits, {exit_logits(exit_): "logits"}), path)
        sharing = audit_sharing(onnx.load(str(path)), needed[exit_])
        assert sharing.stored_parameters == sharing.unique_parameters, f"exit {exit_}"
        with OnnxSession(path, threads=1) as session:
            for rows, length in ((1, 1), (1, 5), (3, None), (8, None)):
                inputs = case.inputs(rows, length)
                found = session.run(inputs)["logits"]
                assert found.dtype == np.float32
                assert np.abs(found - torch_answers(case, inputs)[exit_logits(exit_)]).max() < CLOSE, (rows, length)
    states = {state_name(loop): state_name(loop) for loop in range(1, exits[-1] + 1)}
    write_graph(cut_out(traced.exits, states), folder / "states.onnx")
    with OnnxSession(folder / "states.onnx", threads=1) as session:
        wanted = torch_answers(case, case.inputs())
        for name, found in session.run(case.inputs()).items():
            assert np.abs(found - wanted[name]).max() < CLOSE * max(1.0, np.abs(wanted[name]).max()), name


def check_longest_input(case: Case, folder: Path) -> None:
    """``max_positions`` is what it takes."""
    longest = case.recipe.model.max_positions
    inputs = {name: np.ones((1, longest), dtype=np.int64) for name in case.names}
    write_graph(cut_out(case.graphs.exits, {case.exits.outputs[0]: "logits"}), folder / "long.onnx")
    with OnnxSession(folder / "long.onnx", threads=1) as session:
        found = session.run(inputs)["logits"]
    assert np.abs(found - torch_answers(case, inputs)[case.exits.outputs[0]]).max() < CLOSE


def check_shared_weights(case: Case, folder: Path) -> None:
    """Graphs that share a file of weights store no tensor twice."""
    traced = case.graphs
    graphs = {"exits": traced.exits, **traced.steps}
    if traced.decode is not None:
        graphs["decode"] = traced.decode
    with weights_file(folder / "weights") as weights:
        for name, graph in graphs.items():
            write_graph(graph, folder / f"{name}.onnx", weights)
    tensors = {
        value.const_value.tobytes(): value.const_value.nbytes
        for graph in graphs.values()
        for value in graph.graph.initializers.values()
        if value.const_value is not None
    }
    assert (folder / "weights").stat().st_size <= sum(tensors.values()) + ALIGNMENT * len(tensors)
    if traced.shared_weights:  # each graph by itself may hold less than the model, together they hold it once
        assert sum(tensors.values()) < 1.1 * 4 * count_parameters(case.model) + 64 * ALIGNMENT


def check_steps(case: Case, folder: Path) -> None:
    """A host that loops the parts by itself gets every exit's logits; together the parts store the model once."""
    traced, exits = case.graphs, case.exits.exits
    parts = {part: folder / f"{part}.onnx" for part in traced.steps}
    for part, graph in traced.steps.items():
        write_graph(graph, parts[part])
    stored = sum(audit_sharing(onnx.load(str(path)), 0).stored_parameters for path in parts.values())
    assert stored == count_parameters(case.model)
    inputs = case.inputs(3)
    for exit_ in exits:
        with StepSession(parts, exits[-1], exits=(exit_,)) as session:
            found = session.run(inputs)[exit_logits(exit_)]
        assert np.abs(found - torch_answers(case, inputs)[exit_logits(exit_)]).max() < CLOSE, f"exit {exit_}"


def check_half_precision(case: Case, folder: Path) -> None:
    """Norms keep their FP32 weights, the rest is FP16, logits stay float32 and close; FP32 states on the way out."""
    inputs = case.inputs()
    expected = torch_answers(case, inputs)
    half = half_for_export(copy.deepcopy(case.model))
    kept = {id(p) for m in half.modules() if getattr(m, "keeps_float32", False) for p in m.parameters(recurse=False)}
    assert kept, "no module says keeps_float32: x² overflows FP16"
    for (name, parameter), original in zip(half.named_parameters(), case.model.parameters(), strict=True):
        assert parameter.dtype == (torch.float32 if id(parameter) in kept else torch.float16), name
        assert id(parameter) not in kept or torch.equal(parameter, original), name
    adapter = case.model_spec.adapter
    traced = made = adapter.trace(half, case.names, steps=False)
    if type(adapter).trace_half is not ModelAdapter.trace_half:
        made = adapter.trace_half(half, case.names, case.graphs, steps=False)
        assert described(made.exits) == described(traced.exits), "not the graph that is traced of the halved model"
    assert not made.steps
    path = folder / "half.onnx"
    write_graph(made.exits, path)
    needed = audit_sharing(onnx.load(str(path)), count_parameters(case.model))
    assert needed.stored_parameters == needed.unique_parameters
    with OnnxSession(path, threads=1) as session:
        found = session.run(inputs)
    for name, reference in expected.items():
        assert found[name].dtype == np.float32
        if name.startswith("logits"):
            assert 0 < np.abs(found[name] - reference).max() < HALF * reference.std(), name


def check_round_trip(case: Case, run: Path) -> None:
    """What training saves is what export opens; its config.json says what it is, and clients can read a bundle's."""
    (run / "model").mkdir(parents=True)
    save_model(run / "model", case.model, case.recipe, case.prepared)
    write_text(run / "recipe.yaml", case.recipe.to_yaml())
    loaded = load_model(run)
    assert not loaded.training
    own = case.model.state_dict()
    assert loaded.state_dict().keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    model_spec, model = case.model_spec, case.recipe.model
    assert (config["model_type"], config["architectures"]) == (model_spec.model_type, [model_spec.architecture])
    for precision in ("fp32", "int8"):
        told = model_spec.client_config(config, precision)  # type: ignore[arg-type]
        assert json.loads(json.dumps(told)) == told and told["vocab_size"] == model.vocab_size
        if not case.task.writes_text:
            assert told["iterations"] == model_spec.loops(model), "how often a host runs the loop graph"


def check_trimming(case: Case) -> None:
    """With fewer tokens in its table it answers as before, to the last bit; or it says that this cannot be."""
    if not case.task.can_trim:
        with pytest.raises(InputError, match="--vocab-trim"):
            case.model_spec.adapter.trim(case.model, torch.arange(3))
        return
    inputs = case.inputs()
    kept = np.union1d(inputs["input_ids"], [case.prepared.pad])
    assert len(kept) < case.recipe.model.vocab_size
    before = case.model.state_dict()
    small = case.model_spec.adapter.trim(case.model, torch.from_numpy(kept))
    assert not small.training
    renumbered = {**inputs, "input_ids": np.searchsorted(kept, inputs["input_ids"])}
    wanted = torch_answers(case, inputs)
    for name, found in torch_answers(case, renumbered, small).items():
        assert np.array_equal(found, wanted[name]), name
    own = {id(parameter) for parameter in case.model.parameters()}
    new = [parameter for parameter in small.parameters() if id(parameter) not in own]
    assert [len(parameter) for parameter in new] == [len(kept)], "one new table, everything else is shared"
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())


def check_writing(case: Case, folder: Path) -> None:
    """Token by token, in torch and in the decode graph, it computes what the whole text gives; or says it cannot."""
    adapter, task = case.model_spec.adapter, case.task
    if not task.writes_text:
        assert adapter.causality(case.model) is None
        with pytest.raises(InputError):
            adapter.decoder(case.model)
        return
    probed = adapter.causality(case.model)
    assert probed is not None and probed.leaks == case.model_spec.leaks(case.recipe.model)
    inputs = case.inputs(2, 16)
    ids, wanted = inputs["input_ids"], torch_answers(case, inputs)
    for exit_ in case.exits.exits:
        decoder: Any = torch_decoder(adapter.decoder(case.model))  # type: ignore[no-untyped-call]
        for place in range(ids.shape[1]):
            decoder.read_rows(ids[:, place : place + 1])
            decoder.advance(exit_)
            error = np.abs(decoder.row_logits(exit_) - wanted[exit_logits(exit_)][:, place]).max()
            assert error < CLOSE, (exit_, place)
    graph = case.graphs.decode
    assert graph is not None
    write_graph(graph, folder / "decode.onnx")
    with OnnxSession(folder / "decode.onnx", threads=1) as session:
        found = decode_windows(session, ids, 5)
    assert np.abs(found - wanted[exit_logits(case.exits.exits[-1])][:, 4:]).max() < CLOSE


def check_memory_can_be_planned(case: Case) -> None:
    """Its step is traced without data, for a card too."""
    found = predict_peak(case.recipe, device_kind="cuda", precision="fp32")
    assert found.weights >= 4 * count_parameters(case.model) and found.peak_bytes > found.weights
