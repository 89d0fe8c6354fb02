"""Predicted peak memory against torch's tracker and real tensors, free memory, measured peaks, out-of-memory errors."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.data_config import DataConfig, FileSource, SyntheticSource, TextConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe
from edgeformer.models.blocks.language_loss import chunked_loss, full_loss
from edgeformer.models.crt.model import CRT
from edgeformer.run import read_run
from edgeformer.tasks import texts, tokens
from edgeformer.tasks.language_modeling import LanguageRecipe
from edgeformer.training.init import DraftOptions, draft
from edgeformer.training.loop.distributed import is_out_of_memory
from edgeformer.training.loop.optimizer import build_optimizer, use_static_gradients
from edgeformer.training.plan import memory
from edgeformer.training.plan.memory import MemoryLedger, check_data_fits, predict_peak
from edgeformer.training.train import TrainOptions, train

SMALL = [
    *("model.vocab_size=900", "model.hidden_size=32", "model.embedding_size=16", "model.ffn_size=64"),
    *("model.attention_heads=2", "model.loops=2", "model.exits=[1]", "model.cycles=3", "model.embedding_cycles=1"),
    *("data.sequence_length=96", "training.batch_size=8"),
]


def language_recipe(*overrides: str) -> Any:
    return load_recipe("crt_deep_rtx4050", [*SMALL, *overrides])


@pytest.fixture
def little_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation batches so small that the peak is in training even for tiny models."""
    monkeypatch.setattr(memory, "_VALIDATION_PEAKS", {})
    monkeypatch.setattr(tokens, "EVALUATION_TOKENS", 1)
    monkeypatch.setattr(texts, "EVALUATION_ROWS", 1)


class RealTraining(nn.Module):
    """Training on random tokens; the loss is in a module's forward because torch's tracker needs one root."""

    def __init__(self, recipe: LanguageRecipe, precision: str = "fp32") -> None:
        super().__init__()
        self.config, self.half = recipe.training, precision == "bf16"
        self.model = CRT(recipe.model)
        self.model.checkpointing = recipe.training.checkpointing
        self.static_gradients = use_static_gradients(self.model, "cpu", recipe.training)
        self.optimizer = build_optimizer(self.model, recipe.training.optimizer)
        shape = (recipe.training.batch_size, recipe.data.sequence_length)
        self.ids = torch.randint(0, recipe.model.vocab_size, shape)
        self.targets, self.positions = self.ids.clone(), torch.arange(shape[1]).repeat(shape[0], 1)

    def forward(self) -> Tensor:
        states = self.model(self.ids, self.positions)
        loss = chunked_loss if self.config.chunked_loss else full_loss
        return loss(self.model, states, self.targets, self.config.exit_weight)[0]

    def step(self) -> None:
        for _ in range(min(2, self.config.accumulation)):
            with torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext():
                loss = self()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def predicted_tensor_bytes(recipe: Recipe, precision: str = "fp32") -> int:
    breakdown = predict_peak(recipe, device_kind="cpu", precision=precision)
    return breakdown.peak_bytes - breakdown.reserve


@pytest.mark.usefixtures("little_validation")
class TestPrediction:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize(
        "overrides",
        [
            ("training.checkpointing=none", "training.chunked_loss=false", "training.accumulation=1"),
            ("training.checkpointing=loop", "training.chunked_loss=true", "training.accumulation=2"),
            ("model.vocab_size=17000", "training.batch_size=1", "training.accumulation=2"),  # static gradients
        ],
    )
    def test_real_tensors(self, overrides: tuple[str, ...], precision: str) -> None:
        recipe = language_recipe(*overrides)
        training = RealTraining(recipe, precision)
        training.step()  # allocates the optimizer's state
        assert bool(training.static_gradients) == (recipe.model.vocab_size > 10_000)
        ledger = MemoryLedger([])
        inputs = (training.ids, training.targets, training.positions, *training.static_gradients)
        for tensor in (*training.model.parameters(), *training.model.buffers(), *inputs):
            ledger.add(tensor, "weights")
        for state in training.optimizer.state.values():
            for tensor in state.values():
                ledger.add(tensor, "optimizer")
        with ledger.recording("temporary"):
            training.step()
        assert predicted_tensor_bytes(recipe, precision) == pytest.approx(sum(ledger.all.worst.values()), rel=0.01)

    def test_torchs_own_tracker(self) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        recipe = language_recipe("training.checkpointing=none", "training.accumulation=1")
        training = RealTraining(recipe)
        training.step()
        tracker = MemTracker()
        tracker.track_external(training, training.optimizer, training.ids, training.targets, training.positions)
        with tracker:
            training.step()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        assert predicted_tensor_bytes(recipe) == pytest.approx(snapshot["Total"], rel=0.01)

    def test_breakdown_and_accumulated_gradients(self) -> None:
        recipe = language_recipe("training.accumulation=2")
        parameters = sum(parameter.numel() for parameter in CRT(recipe.model).parameters())
        breakdown = predict_peak(recipe, device_kind="cuda", precision="bf16")
        assert breakdown.weights == breakdown.gradients == 4 * parameters
        assert 8 * parameters <= breakdown.optimizer <= 8 * parameters + 1024  # two moments and the number of steps
        assert breakdown.activations > 2 * parameters and breakdown.temporary > 0  # with the weights in bf16
        assert breakdown.reserve >= 2**26
        assert breakdown.peak_bytes == sum(breakdown.model_dump().values())
        without = predicted_tensor_bytes(language_recipe("training.accumulation=1"))
        assert without < predicted_tensor_bytes(recipe) <= without + 4 * parameters


@pytest.mark.parametrize("length", [128, 256])
def test_cuda_does_not_store_attention_weights(length: int) -> None:
    """Only the mask grows with the square of the length, with one byte a pair, or two in bf16."""
    overrides = ["training.batch_size=128", "model.layers=1", f"data.max_length={length}"]
    recipe: Any = load_recipe("quickstart", overrides)
    on_card, on_host = (predict_peak(recipe, device_kind=kind, precision="bf16") for kind in ("cuda", "cpu"))
    weights = recipe.training.batch_size * recipe.model.heads * length**2
    layers = recipe.model.layers * recipe.model.iterations - 1  # the last has one query only
    assert on_host.activations - on_card.activations > 2 * layers * weights


def test_share_of_a_process_and_peak_of_shards() -> None:
    recipe = load_recipe("crt_mini", ["training.batch_size=8", "training.accumulation=3"])
    for processes, expected in ((1, (8, 3)), (2, (8, 2)), (4, (6, 1)), (25, (1, 1))):
        share = recipe.training.share(processes)
        assert (share.batch_size, share.accumulation) == expected
    options: dict[str, Any] = {"device_kind": "cpu", "precision": "fp32"}
    single = predict_peak(language_recipe(), **options)
    shards = predict_peak(language_recipe(), **options, processes=4, sharded=True)
    assert shards.weights == single.weights * 5 // 4, "a shard, and all weights during a step"
    assert shards.optimizer == single.optimizer // 4


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("OutOfResources: out of resource: shared memory, Required: 132096"), False),
    ],
    ids=str,
)
def test_out_of_memory_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)


def test_files_need_twice_their_size_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streamed training set needs no memory, and neither do sources that are no files or do not exist."""
    parts: dict[str, Any] = {"test": (FileSource(kind="file", path=str(tmp_path / "missing")),)}
    for name, size in (("train", 100), ("validation", 30)):
        (tmp_path / name).write_bytes(b"x" * size)
        parts[name] = (FileSource(kind="file", path=str(tmp_path / name)),)
    parts["train"] += (SyntheticSource(kind="synthetic-reviews", rows=9),)
    for stream, processes, required, remedy in (
        (False, 3, 6 * 130, "for 3 processes.*--set data.stream=true"),
        (True, 1, 2 * 30, "use smaller validation and test sets"),
    ):
        data = TextConfig(parts=parts, mode="packed", sequence_length=8, stream=stream)
        monkeypatch.setattr(memory, "host_free_bytes", lambda required=required: (required, "free"))
        check_data_fits(data, processes)
        monkeypatch.setattr(memory, "host_free_bytes", lambda required=required: (required - 1, "free"))
        message = f"at least {required} B of memory.*, and {required - 1} B are free"
        with pytest.raises(InputError, match=f"(?=.*{remedy}).*{message}"):
            check_data_fits(data, processes)


def test_remedy_for_a_recipe_of_init_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each --set value of the refusal is followed, until the recipe with one file trains."""
    rows = "".join(f"{row.text},{'good' if row.label else 'bad'}\n" for row in synthetic_reviews(400, 1))
    (tmp_path / "reviews.csv").write_text("text,label\n" + rows.replace(" ,", ""), encoding="utf-8")
    out = tmp_path / "reviews.yaml"
    draft(tmp_path / "reviews.csv", DraftOptions(out))
    size = (tmp_path / "reviews.csv").stat().st_size
    settings = ["training.epochs=1", "model.hidden_size=16"]
    for free, count in ((size, 1), (size // 4, 2), (size // 4, 0)):
        monkeypatch.setattr(memory, "host_free_bytes", lambda free=free: (free, "free"))
        if not count:
            check_data_fits(load_recipe(str(out), settings).data)
            break
        with pytest.raises(InputError) as error:
            check_data_fits(load_recipe(str(out), settings).data)
        changes = re.findall(r"--set ([^\s,]+)", str(error.value))
        assert len(changes) == count
        settings += [change.replace("5000", "20") for change in changes]
    monkeypatch.undo()
    manifest = read_run(train(load_recipe(str(out), settings), TrainOptions(tmp_path / "runs", accelerator="cpu")))
    assert manifest.data.rows == {"train": 320, "validation": 20, "test": 20}


def test_files_of_a_recipe_that_cannot_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.tsv").write_text("text\tlabel\n" * 9, encoding="utf-8")
    monkeypatch.setattr(memory, "host_free_bytes", lambda: (1, "free"))
    sources = ({"kind": "file", "path": str(tmp_path / "train.tsv")},)
    data = DataConfig.model_validate({"parts": {"train": sources}, "split": "random-split", "labels": ("a", "b")})
    with pytest.raises(InputError, match=r"data.stream=true \(also change the recipe: .*use split: stratified, or"):
        check_data_fits(data)
