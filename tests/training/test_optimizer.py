"""Precision, optimizer groups, learning-rate schedules, and embedding gradients that stay allocated."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from edgeformer.artifacts import recipe as recipes
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import CompileConfig, OptimizerConfig, Schedule
from edgeformer.models import load_recipe
from edgeformer.models.adapter import ParameterSettings
from edgeformer.training.loop import optimizer as optimizers
from edgeformer.training.loop.optimizer import build_optimizer, build_schedule, resolve_precision


def scheduled(
    schedule: Schedule, total_steps: int = 10, config: OptimizerConfig | None = None
) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = build_optimizer(nn.Linear(2, 2), config or OptimizerConfig(lr=1.0))
    return optimizer, build_schedule(optimizer, schedule, total_steps)


def rates(schedule: Schedule, steps: int) -> list[float]:
    optimizer, scheduler = scheduled(schedule, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class TestSchedules:
    def test_cosine_and_linear(self) -> None:
        values = rates(recipes.CosineSchedule(kind="cosine", warmup=0.1, final=0.2), 100)
        assert (values[0], values[4]) == pytest.approx((1 / 11, 5 / 11))
        assert max(values) == values[10] == pytest.approx(1.0)
        assert values[55] == pytest.approx(0.2 + 0.8 * 0.5)
        assert values[-1] == pytest.approx(0.2, abs=2e-3)
        values = rates(recipes.LinearSchedule(kind="linear", warmup=0.2, final=0.1), 10)
        assert values == pytest.approx([1 / 3, 2 / 3, *(0.1 + 0.9 * (1 - step / 8) for step in range(8))])

    @pytest.mark.parametrize("steps", [1, 2, 20, 100])
    def test_one_cycle(self, steps: int) -> None:
        values = rates(recipes.OneCycleSchedule(kind="one-cycle", warmup=0.05), steps)
        assert len(values) == steps
        assert steps == 1 or values[-1] < 1e-3, "the last step has the smallest rate"
        if steps == 100:
            assert max(values) == pytest.approx(1.0) and values.index(max(values)) in (4, 5)

    def test_one_cycle_of_the_first_beta(self) -> None:
        """As the released code of paper B does, by a default of torch."""
        published: Any = load_recipe("crt_deep_published").training.schedule
        constant = recipes.OneCycleSchedule(kind="one-cycle")
        for schedule, ends in ((published, [0.95, 0.85, 0.95]), (constant, [0.9, 0.9, 0.9])):
            optimizer, scheduler = scheduled(schedule, total_steps=100)
            betas = []
            for step in range(100):
                betas.append(optimizer.param_groups[0]["betas"][0])
                optimizer.step()
                if step < 99:
                    scheduler.step()
            assert [betas[0], betas[4], betas[-1]] == pytest.approx(ends)

    def test_plateau(self) -> None:
        # Paper A: half the rate where two epochs in a row do not improve the validation loss, which is patience 1.
        optimizer, scheduler = scheduled(recipes.PlateauSchedule(kind="plateau", factor=0.5, patience=1))
        values = []
        for loss in (1.0, 0.9, 0.9, 0.9, 0.9, 0.9):
            scheduler.step(loss)
            values.append(optimizer.param_groups[0]["lr"])
        assert values == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_optimizer_groups() -> None:
    config = OptimizerConfig(lr=0.5, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.1)
    groups = build_optimizer(nn.Linear(3, 2), config).param_groups
    assert all((each["betas"], each["eps"], each["fused"]) == ((0.5, 0.75), 1e-3, True) for each in groups)
    decays = [([parameter.ndim for parameter in group["params"]], group["weight_decay"]) for group in groups]
    assert decays == [([2], 0.1), ([1], 0.0)], "vectors do not decay"
    full, tenth = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    learning = [ParameterSettings(tenth, rate=0.1, decays=False), ParameterSettings(full)]
    optimizer = build_optimizer(nn.Module(), config, learning)
    schedule: Any = build_schedule(optimizer, recipes.OneCycleSchedule(kind="one-cycle"), 10)
    for _ in range(3):
        first, last = (group for group in optimizer.param_groups if group["params"])
        assert first["params"] == [full] and last["params"] == [tenth], "the first group's rate is displayed"
        assert last["lr"] == pytest.approx(0.1 * first["lr"]) and last["weight_decay"] == 0.0 < first["weight_decay"]
        optimizer.step()
        schedule.step()


class TestPrecision:
    def test_on_a_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for capability, expected in (((7, 5), "fp16"), ((8, 0), "bf16")):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
            assert [resolve_precision(name, "cuda") for name in ("auto", "fp16", "fp32")] == [expected, "fp16", "fp32"]
        with pytest.raises(InputError, match=r"training\.precision: fp16 needs a CUDA card"):
            resolve_precision("fp16", "cpu")

    def test_auto_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for flags, expected in (
            ("flags : fpu avx2 avx512f\n", "fp32"),
            ("flags : fpu avx512_bf16 sse\n", "bf16"),
            ("flags : fpu amx_bf16 sse\n", "bf16"),
            ("Features : fp asimd bf16 i8mm\n", "bf16"),  # Arm
            ("flags : fpu notbf16 nobf16x\n", "fp32"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "read_text", lambda path, encoding, flags=flags: flags)
                assert resolve_precision("auto", "cpu") == expected


ROWS, WIDTH = optimizers.STATIC_MIN_BYTES // 4 // 16, 16
TEXTS = [[[1, 2, 2], [ROWS - 1, 1, 5]], [[7, 7, 7], [7, 7, 7]], [[1, 3, 4], [2, 1, 9]], [[0, 1, 2], [3, 4, 5]]]
TRAINING = load_recipe("quickstart").training


class EmbeddingModel(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS if tied else 2)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh().mean(1))  # type: ignore[no-any-return]


class TestStaticGradients:
    @pytest.mark.parametrize("pieces", [1, 2])
    @pytest.mark.parametrize("tied", [False, True])
    def test_same_steps(self, pieces: int, tied: bool) -> None:
        torch.manual_seed(0)
        plain = EmbeddingModel(tied=tied)
        static = deepcopy(plain)
        (gradient,) = optimizers.use_static_gradients(static, "cpu", TRAINING)
        assert type(static.table) is optimizers.StaticGradientTable and gradient.shape == static.table.weight.shape
        for model in (plain, static):
            optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
            for ids in TEXTS:
                for part in torch.tensor(ids).chunk(pieces):
                    model(part).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for (name, expected), actual in zip(plain.state_dict().items(), static.state_dict().values(), strict=True):
            torch.testing.assert_close(expected, actual, rtol=1e-6, atol=1e-7, msg=name)
        assert list(static.state_dict()) == list(plain.state_dict())
        with torch.inference_mode():
            plain.load_state_dict(static.state_dict())
            assert torch.equal(plain(torch.tensor(TEXTS[0])), static(torch.tensor(TEXTS[0])))

    def test_used_for_large_plain_tables_by_one_uncompiled_process_on_a_cpu(self) -> None:
        small, padded = nn.Embedding(ROWS - 1, WIDTH), nn.Embedding(ROWS, WIDTH, padding_idx=0)
        fixed = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
        assert optimizers.use_static_gradients(nn.ModuleList([small, padded, fixed]), "cpu", TRAINING) == []
        assert {type(small), type(padded), type(fixed)} == {nn.Embedding}
        compiled = TRAINING.model_copy(update={"compile": CompileConfig()})
        model = nn.ModuleList([nn.Embedding(ROWS, WIDTH)])
        for device, training, processes in (("cpu", compiled, 1), ("cuda", TRAINING, 1), ("cpu", TRAINING, 2)):
            assert optimizers.use_static_gradients(model, device, training, processes) == []
