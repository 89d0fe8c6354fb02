"""Linear classifier: TF-IDF of n-grams of words or characters, and their weights, fitted in seconds on a CPU."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataSection, PositiveFloat, PositiveInt
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.recipe import DistilledTraining, FitConfig, ModelConfig
from edgeformer.models import ModelSpec, text_client_config

Order = Annotated[int, Field(ge=1, le=8)]


class LinearConfig(ModelConfig):
    """Weights of n-grams of tokens: ``ngrams`` [1, 2] are tokens and pairs of neighbours."""

    derived: ClassVar[tuple[str, ...]] = ("slots",)
    later: ClassVar[tuple[str, ...]] = ("crossing", "max_ngrams", "max_weights")

    kind: Literal["linear"]
    vocab_size: PositiveInt = Field(30_000, description="number of tokens; the maximum for a trained tokenizer")
    max_positions: PositiveInt = Field(4096, description="longest input in tokens")
    ngrams: Annotated[tuple[Order, Order], Field(strict=False)] = Field(
        (1, 2), description="fewest and most tokens of an n-gram"
    )
    minimum_count: PositiveInt = Field(2, description="training texts that an n-gram must occur in to get a weight")
    crossing: Order = Field(
        4, description="most characters of an n-gram with a word boundary inside; longer ones are parts of a word"
    )
    max_ngrams: PositiveInt = Field(180_000, description="most n-grams with weights; those in most texts are kept")
    max_weights: PositiveInt = Field(1_400_000, description="most weights; an n-gram has one or more for each label")
    slots: PositiveInt | None = Field(None, description="rows of the table of weights; set when training starts")

    @model_validator(mode="after")
    def _orders_rise(self) -> Self:
        if self.ngrams[0] > self.ngrams[1]:
            raise ValueError(f"ngrams: from {self.ngrams[0]} to {self.ngrams[1]} is empty; write the smaller one first")
        return self

    def check_recipe(self, data: DataSection, training: Any) -> None:
        if training.teacher is not None and getattr(data, "separator", None) is not None:
            raise ValueError("training.teacher: teaches one label per text, and these have several; leave it out")
        if training.distillation.states:
            raise ValueError("training.distillation.states: a linear model has no states; set it to 0")


class LinearTraining(DistilledTraining, FitConfig):
    """Settings of the fit, which L-BFGS solves over all rows, for each candidate of ``auto``."""

    later: ClassVar[tuple[str, ...]] = ("teacher", "teacher_sha256", "distillation", "svm_share")

    max_iterations: PositiveInt = Field(1000, description="iterations of all fits together, each a pass over all rows")
    regularization: PositiveFloat | Literal["auto"] = Field(
        "auto",
        description="C of scikit-learn: inverse strength of the penalty on squared weights; auto: of 1, 4, 16, 64 and "
        "256, that with the lowest loss on the validation rows, on which logits are then calibrated by a factor",
    )
    svm_share: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = Field(
        "auto",
        description="share of a support vector machine (squared hinge, C of 0.3, 1 or 3, labels weigh equally) in the "
        "weights; the rest is logistic regression; auto: of 0, 0.5 and 1, that with the best accuracy on the "
        "validation rows, and 0 for a stated C; without effect with several labels per text or a teacher",
    )
    tolerance: PositiveFloat = Field(1e-6, description="relative decrease of the loss at which a fit ends")


class Linear(ModelSpec):
    """TF-IDF, and logistic regression or a support vector machine."""

    kind = "linear"
    tasks = ("classification", "multi-label-classification")
    config_type = LinearConfig
    training_type = LinearTraining
    model_type = "edgeformer-linear"
    architecture = "LinearClassifier"
    adapter_module = "edgeformer.models.linear.adapter"
    tags = ("linear", "tf-idf", "edge", "onnx")

    def loops(self, config: LinearConfig) -> int:
        return 1

    def client_config(self, config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
        return text_client_config(config, precision, layers=1, heads=1, hidden_size=1, iterations=1)

    def card_line(self, config: LinearConfig) -> str:
        shortest, longest = config.ngrams
        orders = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        return f"linear classifier of n-grams of {orders} that occur in {config.minimum_count} texts or more"


MODEL = Linear()
