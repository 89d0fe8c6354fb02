"""Recipe: all settings of a training run. The saved recipe is the one that ran."""

import hashlib
import json
import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import (
    DataSection,
    Name,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    TokenizerConfig,
    stated,
)

_ATTENTION = "in training: sdpa with padding, flash without, or auto: flash where a kernel fits; on CPUs sdpa unpadded"
Attention = Annotated[Literal["auto", "sdpa", "flash"], Field(description=_ATTENTION)]


class Section(Frozen):
    """Base of the sections of a recipe, except ``data``."""

    folders: ClassVar[tuple[str, ...]] = ()
    """Keys that may name a folder; relative paths are resolved against the recipe's folder."""
    later: ClassVar[tuple[str, ...]] = ()
    """Keys that were added later; at their defaults, they are left out of a recipe's fingerprint."""


class OptimizerConfig(Section):
    """AdamW. Weight decay acts on matrices only, not on biases and normalisation scales."""

    later: ClassVar[tuple[str, ...]] = ("kernels",)

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = Field(description="peak learning rate")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    kernels: Literal["fused", "foreach", "loop"] = Field(
        "fused",
        description="one kernel per step (`fused`), one per operation for all weights (`foreach`), or one per "
        "operation and weight (`loop`); results differ only by rounding. With `foreach` and `loop`, a step that runs "
        "out of memory ends the run, because some weights have changed",
    )


class ConstantSchedule(Frozen):
    """Constant learning rate."""

    kind: Literal["constant"]


class PlateauSchedule(Frozen):
    """ReduceLROnPlateau on validation loss, stepped once per epoch."""

    kind: Literal["plateau"]
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="factor of a reduction")
    patience: Annotated[int, Field(ge=0)] = Field(
        2,
        description="epochs without improvement before a reduction, as in torch: with 1, the second such epoch reduces "
        "the rate",
    )


class OneCycleSchedule(Frozen):
    """OneCycle over the whole run: warm-up to the optimizer's lr, then a cosine down."""

    kind: Literal["one-cycle"]
    warmup: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.05, description="fraction of all steps")
    cycle_momentum: bool = Field(
        False, description="β1 falls from 0.95 to 0.85 in the warm-up and rises again, as by default in torch"
    )


class CosineSchedule(Frozen):
    """Linear warm-up to the optimizer's lr, then a cosine down."""

    kind: Literal["cosine"]
    warmup: Probability = Field(0.06, description="fraction of all steps")
    final: Probability = Field(0.0, description="rate of the last step, as a fraction of lr")


class LinearSchedule(Frozen):
    """Linear warm-up to the optimizer's lr, then linear down, as is usual for fine-tuning encoders."""

    kind: Literal["linear"]
    warmup: Probability = Field(0.06, description="fraction of all steps")
    final: Probability = Field(0.0, description="rate of the last step, as a fraction of lr")


Schedule = Annotated[
    ConstantSchedule | PlateauSchedule | OneCycleSchedule | CosineSchedule | LinearSchedule, Field(discriminator="kind")
]


class EarlyStopping(Frozen):
    """End training when the value by which the epoch is selected no longer improves: by default the validation loss."""

    patience: PositiveInt = Field(3, description="epochs in a row without an improvement that end training")
    min_delta: Annotated[float, Field(ge=0.0)] = Field(
        1e-3, description="smallest improvement that counts, in nats or of the metric"
    )


class CompileConfig(Frozen):
    """torch.compile for training steps; scores are computed without it."""

    shapes: PositiveInt = Field(
        8,
        description="maximum number of compiled shapes: rows are padded to one of this many lengths; a smaller last "
        "batch of an epoch is not compiled",
    )


class TrainingConfig(Section):
    """Training settings that all tasks have.

    An optimizer step sees ``batch_size`` × ``accumulation`` rows, ``batch_size`` at a time.
    """

    later: ClassVar[tuple[str, ...]] = ("tf32", "compile")

    epochs: PositiveInt = Field(description="passes over the training set")
    batch_size: PositiveInt = Field(
        description="rows per micro-batch; an optimizer step sees batch_size × accumulation rows"
    )
    accumulation: PositiveInt = Field(1, description="micro-batches per optimizer step")
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="auto: bf16 if the machine supports it, fp16 on older CUDA cards, else fp32"
    )
    optimizer: OptimizerConfig
    schedule: Schedule = Field(description="learning rate over the steps")
    clip_norm: PositiveFloat | None = Field(
        1.0, description="maximum norm of the gradient; larger ones are scaled down"
    )
    batching: Literal["shuffled", "bucketed"] = Field(
        "shuffled", description="bucketed: batches of rows of similar length, in random order"
    )
    early_stopping: EarlyStopping | None = Field(None, description="absent: all epochs are trained")
    log_every: PositiveInt = Field(50, description="optimizer steps per line of metrics.jsonl")
    checkpoint_minutes: PositiveFloat = Field(
        10.0, description="minutes between checkpoints within an epoch; does not affect the result"
    )
    tf32: bool = Field(
        False,
        description="truncate float32 inputs of matrix products to 10 bits of mantissa in training steps: faster on "
        "CUDA cards from compute capability 8.0 on; scores are computed in full precision",
    )
    pinned_memory: bool | None = Field(
        None, description="copy batches to a CUDA card from page-locked memory during computation; absent: on CUDA only"
    )
    compile: CompileConfig | None = Field(None, description="compile the training step with torch.compile")

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step."""
        return self.batch_size * self.accumulation

    def steps(self, rows: int) -> int:
        """Return the optimizer steps of an epoch of ``rows`` training rows."""
        return math.ceil(rows / self.effective_batch)

    def micro_batches(self, size: int | None = None) -> int:
        """Return the micro-batches of an optimizer step in one process, with ``size`` rows (None: ``batch_size``)."""
        return math.ceil(self.effective_batch / (size or self.batch_size))

    def share(self, processes: int) -> Self:
        """Return the settings of one of ``processes`` that share the rows of a step."""
        rows = math.ceil(self.effective_batch / processes)
        size = min(self.batch_size, rows)
        return self.model_copy(update={"batch_size": size, "accumulation": math.ceil(rows / size)})


class TextTraining(TrainingConfig):
    """Training settings of encoders that read whole texts."""

    later: ClassVar[tuple[str, ...]] = (*TrainingConfig.later, "start", "encoder_rate")

    epochs: Annotated[int, Field(ge=0)] = Field(
        description="passes over the training set; 0, with start: frozen only: the fitted head is the result"
    )
    token_dropout: Probability = Field(
        0.0, description="fraction of the input tokens replaced by [UNK] in training, special tokens excepted"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: learning rate of a layer divided by that of the next layer"
    )
    start: Literal["source", "frozen"] = Field(
        "source",
        description="pretrained encoders that classify: source: a random head; frozen: a head that is fitted to the "
        "vectors of the unchanged encoder before the first epoch, by logistic regression; select_by also chooses its C",
    )
    encoder_rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: learning rate of the encoder divided by that of the head"
    )


class FitConfig(Section):
    """Training settings of a model that is fitted to all rows at once, in float32 or better on the CPU."""

    epochs: ClassVar[int] = 1
    precision: ClassVar[Literal["fp32"]] = "fp32"
    batching: ClassVar[Literal["bucketed"]] = "bucketed"
    effective_batch: ClassVar[int] = 256  # rows that are read together
    compile: ClassVar[None] = None
    early_stopping: ClassVar[None] = None

    max_iterations: PositiveInt = Field(300, description="iterations, each a pass over all rows")


class Distillation(Frozen):
    """Distillation from a teacher in addition to the labels. Losses are sums over rows, in nats."""

    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.7,
        description="weight of the teacher's loss (KL divergence × temperature²); that of the labels has 1 − weight. "
        "Rows without a label have the teacher's loss alone, with weight 1",
    )
    temperature: PositiveFloat = Field(2.0, description="divisor of both models' logits")
    states: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="pretrained encoders: weight of the squared distance between both models' states after every "
        "iteration",
    )


class DistilledTraining(Frozen):
    """Keys of section ``training`` by which a model learns from a teacher."""

    folders: ClassVar[tuple[str, ...]] = ("teacher",)

    teacher: str | None = Field(
        None,
        description="teacher for distillation: a finished run, or its folder, of a classifier with the same labels, or "
        "of a language model with the same tokenizer",
    )
    teacher_sha256: str | None = Field(None, description="sha256 of the teacher's weights; set when training starts")
    distillation: Distillation = Distillation()

    @model_validator(mode="after")
    def _distillation_has_teacher(self) -> Self:
        if self.teacher is None and self.distillation != Distillation():
            raise ValueError(
                "distillation: has no effect without a teacher; set teacher to the folder of a finished run"
            )
        return self


class ModelConfig(Section):
    """Section ``model`` of a recipe: fields of every configuration; ``kind`` names the model."""

    derived: ClassVar[tuple[str, ...]] = ()
    """Keys that training sets, or that change no weights; they are left out of a recipe's fingerprint."""

    kind: str
    vocab_size: PositiveInt = Field(description="number of tokens; for a trained tokenizer the maximum")
    max_positions: PositiveInt = Field(description="longest input in tokens that the model accepts")

    @property
    def reads_types(self) -> bool:
        """Whether the model has the input ``token_type_ids``."""
        return False

    def check_recipe(self, data: DataSection, training: TrainingConfig) -> None:
        """Check the rest of a recipe against this model. Raises ValueError if it does not fit."""


class Recipe(Frozen):
    """Fields of every recipe. A task narrows the types of ``data`` and ``training``, a model that of ``model``."""

    per_token: ClassVar[bool] = False  # whether the model has an answer for every token, not for the text

    name: Name = Field(description="name of the recipe and prefix of its runs")
    description: str = Field("", description="one line for lists and model cards")
    task: str
    target: Name | None = Field(None, description="default device profile of plan and profile")
    seed: Seed = Field(42, description="seed of weights, row order and dropout")
    tokenizer: TokenizerConfig = Field(description="pretrained encoders have their own")
    data: DataSection
    model: ModelConfig
    training: TrainingConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.data.tokens_at_once > self.model.max_positions:
            raise ValueError(
                f"data.{self.data.length_key} {self.data.tokens_at_once} is larger than model.max_positions "
                f"{self.model.max_positions}; reduce the first or increase the second"
            )
        if getattr(self.data, "unlabelled", ()) and getattr(self.training, "teacher", None) is None:
            raise ValueError(
                "data.unlabelled: has no effect without a teacher, whose answers are its labels; set training.teacher "
                "to a finished run, or leave unlabelled out"
            )
        is_frozen = getattr(self.training, "start", "source") == "frozen"
        if not self.training.epochs and not is_frozen:
            raise ValueError("training.epochs: 0 trains nothing; set training.start: frozen, or epochs: 1")
        if is_frozen and (
            self.model.kind != "pretrained" or self.task not in ("classification", "multi-label-classification")
        ):
            raise ValueError(
                "training.start: frozen fits the head of a pretrained encoder that classifies texts; leave it out"
            )
        self.model.check_recipe(self.data, self.training)
        return self

    @property
    def classes(self) -> int | None:
        """Number of outputs for a text or token: its classes, or 1 for a number; None: neither labels nor numbers."""
        return getattr(self.data, "outputs", None)

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML, with every default written out."""
        from edgeformer.artifacts.documents import to_yaml  # predictions write no recipe

        return to_yaml(self.model_dump(mode="json"))

    def fingerprint(self) -> str:
        """Return the sha256 of the resolved recipe without keys that do not affect the weights. Equal: the same run."""
        sections: dict[str, Section] = {"training": self.training, "model": self.model}
        if isinstance(self.training, TrainingConfig):
            sections["optimizer"] = self.training.optimizer
        unsaid = {  # later keys at their defaults
            name: {key for key in section.later if getattr(section, key) == type(section).model_fields[key].default}
            for name, section in sections.items()
        }
        left_out = {
            "training": {"checkpoint_minutes", "pinned_memory", *unsaid["training"]},
            "data": {"thresholds", "expected_rows"},
            "model": {*self.model.derived, *unsaid["model"]},
        }
        decisive = self.model_dump(mode="json", exclude=left_out)
        if decisive["model"].get("attention") in ("auto", "flash"):  # changes no weights; once only sdpa
            decisive["model"]["attention"] = "sdpa"
        for key in unsaid.get("optimizer", ()):
            del decisive["training"]["optimizer"][key]
        text = json.dumps({**decisive, "data": stated(decisive["data"])}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
