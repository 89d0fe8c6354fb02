"""Interface of a model's torch half: building, loss, scoring, and what training and export need."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import Causality
from edgeformer.artifacts.plan import MemoryBreakdown
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.models.blocks.causal import attention, probe_causality
from edgeformer.models.blocks.language_loss import Taught, TokenLosses, chunked_loss, full_loss
from edgeformer.models.blocks.tracing import Graphs, Piece
from edgeformer.models.distillation import Batch, Loss, Losses, classification_loss, load_teacher
from edgeformer.tasks import Prepared

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ParameterSettings:
    """Optimizer settings of a parameter: factor on the learning rate, and whether weight decay applies."""

    parameter: nn.Parameter
    rate: float = 1.0
    decays: bool = True


class ModelAdapter(ABC):
    """Torch half of a model kind. ``model`` arguments are modules that :meth:`build` returned.

    A module has ``exits``, the loops after which it can answer, and ``every_exit``: graph inputs → logits of each of
    them, then the state after every loop.
    """

    @abstractmethod
    def build(self, recipe: Any) -> nn.Module:
        """Build the model with fresh weights from torch's global generator."""

    def pinned(self, recipe: Any) -> Any:
        """Return the recipe with the checksum of the weights that training starts from, for reproducible runs."""
        return recipe

    def start(self, model: Any, recipe: Any) -> tuple[str, ...]:
        """Load pretrained weights into a new model, if the recipe names some; return the names that stay fresh.

        Raises InputError or ArtifactError if the weights are missing or do not fit.
        """
        return ()

    def learning(self, model: Any, training: TrainingConfig) -> Iterator[ParameterSettings]:
        """Yield every parameter once with its optimizer settings; by default weight decay applies to matrices only."""
        for parameter in model.parameters():
            yield ParameterSettings(parameter, decays=parameter.ndim >= 2)

    def loss(self, model: Any, recipe: Any, prepared: Prepared | None) -> Loss:
        """Return the training loss, by default a classifier's, and apply settings that change the model's training.

        ``prepared`` is None if memory is planned without data.
        """
        return classification_loss(recipe, prepared)

    def scorer(self, model: Any) -> Any:
        """Return a module on the same weights for scoring: it returns logits, or a dict with losses.

        Its ``inputs`` are its required arguments, int64 [B, S] each, its ``optional`` the other ones.
        """
        return model

    def needed(self, model: Any) -> dict[int, int]:
        """Return exit → number of parameters in its graph, each counted once; by default every exit uses all."""
        return dict.fromkeys(model.exits, count_parameters(model))

    @abstractmethod
    def trace(self, model: Any, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None) -> Graphs:
        """Convert the model, in FP32 or FP16, to ONNX graphs. Raises EdgeformerError if torch cannot.

        Args:
            inputs: input names, in the order of ``every_exit``.
            steps: also return the parts that a host can loop.
            base: graphs to derive these from, if that is faster: of an FP16 copy the model's in FP32; of a trimmed
                one before :meth:`trim` in the same precision, where the results must be bit-identical.
        """

    def exported(self, model: Any) -> Any:
        """Return a model on the same weights in the operators that :meth:`trace` writes; ``model`` is not changed."""
        return model

    def whole(self, model: Any) -> Any:
        """Return the model as one module from inputs to the last exit's logits."""
        return model

    def causality(self, model: Any, seed: int = 0) -> Causality | None:
        """Probe whether outputs depend on later tokens; None for a bidirectional model.

        Raises ValueError if the probe is blind because no output depends on any token.
        """
        return None

    def decoder(self, model: Any) -> Any:
        """Return the model as :class:`~edgeformer.runtimes.torch.session.TorchEngine` takes it. Raises InputError."""
        raise InputError("this model reads whole texts and does not write text")

    def trim(self, model: Any, kept: Tensor) -> nn.Module:
        """Return a model with the rows ``kept`` (int64 [n]) of the token table; other tensors are shared."""
        raise InputError("--vocab-trim: the vocabulary of this model cannot be trimmed")

    def match_cuda_memory(self, model: Any) -> None:
        """Change, in place, modules that need another amount of memory on CUDA than on the CPU, to plan memory.

        By default attention loses its dropout: with it, the CPU's kernel stores all weights [B, H, S, S].
        """
        for module in model.modules():
            if "Attention" in type(module).__name__:
                for name in ("dropout", "attention_dropout"):
                    dropout = getattr(module, name, None)
                    if isinstance(dropout, float):
                        setattr(module, name, 0.0)
                    elif isinstance(dropout, nn.Dropout):
                        dropout.p = 0.0


class FitSize(NamedTuple):
    """Size of a fit, as far as it is known: weights, and memory without reserve."""

    parameters: int
    memory: MemoryBreakdown


class FittedAdapter(ModelAdapter):
    """Torch half of a model kind that is fitted to all training rows at once, on the CPU, instead of in steps."""

    @abstractmethod
    def sized(self, recipe: Any, prepared: Prepared) -> tuple[Any, nn.Module]:
        """Return the recipe with sizes that follow from the training rows, and the unfitted model of these sizes."""

    @abstractmethod
    def fit(
        self, model: Any, recipe: Any, prepared: Prepared, iterations: int, advance: Callable[[float], bool]
    ) -> dict[str, float]:
        """Set the weights, after at most so many iterations, and return the values of training keys that are ``auto``.

        ``advance`` gets the mean loss with penalties after each; the fit ends where it returns False.
        """

    @abstractmethod
    def fit_size(self, recipe: Any, rows: int, tokens: int) -> FitSize:
        """Predict the size of :meth:`fit` for ``rows`` training rows of ``tokens`` tokens together."""


class LanguageAdapter(ModelAdapter):
    """Torch half of a :class:`~edgeformer.models.blocks.causal.LanguageModel`."""

    def loss(self, model: Any, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit.

        With ``training.teacher`` it is mixed with the divergence from the teacher's answers. Raises RecipeError: the
        teacher has another tokenizer, or accepts shorter texts.
        """
        training = recipe.training
        model.checkpointing = training.checkpointing
        compute = chunked_loss if training.chunked_loss else full_loss
        teacher: Any = None if training.teacher is None else load_teacher(recipe, prepared)

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            inputs, taught = (batch["input_ids"], batch.get("positions")), None
            states = wrapped(*inputs)
            if teacher is not None:
                with torch.no_grad():
                    known = teacher.to(inputs[0].device)(*inputs)[teacher.loops].flatten(0, 1)
                config = training.distillation
                taught = Taught(known, teacher.head_of(teacher.loops).weight, config.weight, config.temperature)
            total, losses = compute(model, states, batch["targets"], training.exit_weight, taught)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != model.loops}
            return Losses(total, {**parts, "loss_final": losses[model.loops]})

        return loss

    def scorer(self, model: Any) -> TokenLosses:
        return TokenLosses(model)

    def whole(self, model: Any) -> nn.Module:
        return Piece(model, model.logits)

    def match_cuda_memory(self, model: Any) -> None:
        """Attention in the matrices' type, which a CPU computes in float32."""
        for module in model.modules():
            if hasattr(module, "attend"):
                module.attend = attention

    def causality(self, model: Any, seed: int = 0) -> Causality:
        return probe_causality(model, seed)


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, each shared one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def sharing_copy(model: M) -> M:
    """Copy the modules; parameters and buffers of the copy are the same tensors."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def run_scorer(scorer: Any, batch: Batch) -> dict[str, Tensor]:
    """Call a module from :meth:`ModelAdapter.scorer` with its inputs; a single result becomes ``logits``."""
    outputs = scorer(**{name: batch[name] for name in (*scorer.inputs, *scorer.optional) if name in batch})
    return dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
