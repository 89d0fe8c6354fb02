"""What a recipe's task brings to training: prepared data, a model, an objective, and how the model is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import set_seed
from torch import nn

from edgeformer.data.language import prepare_text
from edgeformer.data.prepare import prepare
from edgeformer.families.build import build_crt, build_encoder
from edgeformer.families.crt.causality import probe_causality
from edgeformer.families.saving import save_language_model
from edgeformer.formats.errors import InputError
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.manifest import AttentionUse, Causality, DataSummary
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import ClassificationRecipe
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.stages.training.classification import ClassificationObjective
from edgeformer.stages.training.language import LanguageObjective
from edgeformer.stages.training.model_folder import save_classifier
from edgeformer.stages.training.objective import Objective


@dataclass(frozen=True)
class Job:
    """One recipe, ready to be trained."""

    model: nn.Module
    objective: Objective
    data: DataSummary
    attention: AttentionUse
    save: Callable[[Path, nn.Module], None]
    causality: Causality | None = None


def prepare_job(recipe: AnyRecipe, cache: Path, device_type: str, precision: str, progress: Progress) -> Job:
    """Data and model of ``recipe``; the model's weights depend on the recipe's seed alone.

    Raises:
        InputError: recipe, data or tokenizer cannot be used; a model that leaks without ``allow_leak``.
    """
    if isinstance(recipe, LanguageRecipe):
        return _language(recipe, cache, progress)
    return _classification(recipe, cache, (device_type, precision), progress)


def _classification(recipe: ClassificationRecipe, cache: Path, where: tuple[str, str], progress: Progress) -> Job:
    data = prepare(recipe, cache, progress)
    set_seed(recipe.seed)
    model, why_not = build_encoder(recipe.model, recipe.classes, device_type=where[0], precision=where[1])
    if why_not:
        progress.message(f"model.attention: flash is not used, torch SDPA instead: {why_not}")
    requested = recipe.model.attention
    return Job(
        model=model,
        objective=ClassificationObjective(recipe, data),
        data=data.summary,
        attention=AttentionUse(requested=requested, used="sdpa" if why_not else requested, reason=why_not),
        save=lambda folder, trained: save_classifier(folder, trained, recipe, data),
    )


def _language(recipe: LanguageRecipe, cache: Path, progress: Progress) -> Job:
    set_seed(recipe.seed)
    model = build_crt(recipe.model)
    causality = probe_causality(model, seed=recipe.seed)  # before the data: it takes a second and may end the run
    if causality.leaks and not recipe.allow_leak:
        raise InputError(
            f"{recipe.name}: the model sees the tokens it is asked to predict (outputs depend on at least "
            f"{causality.reach} positions ahead), so its loss would mean nothing; set model.causal: true, or train it "
            "all the same with allow_leak: true (--allow-leak), and everything made of it will say so"
        )
    data = prepare_text(recipe, cache, progress)
    return Job(
        model=model,
        objective=LanguageObjective(recipe, data, model),
        data=data.summary,
        attention=AttentionUse(requested="sdpa", used="sdpa"),
        save=lambda folder, trained: save_language_model(
            folder, trained, recipe, data.tokenizer, data.boundary, data.validation.ids
        ),
        causality=causality,
    )
