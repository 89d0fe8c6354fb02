"""Model card of a run: protocol, scores of every exit, leaks first."""

from pathlib import Path
from typing import Any

from edgeformer.artifacts.manifest import LEAKS, RunManifest
from edgeformer.bundle import Bundle
from edgeformer.inference.verify import verify
from edgeformer.models import load_recipe, read_run_recipe
from edgeformer.models.card import artifact_section, model_card
from edgeformer.run import read_run

OLD = Path(__file__).resolve().parents[1] / "old_format" / "classifier-v1"


def card_of(run: Path, manifest: RunManifest | None = None) -> str:
    return model_card(manifest or read_run(run), load_recipe(str(run / "recipe.yaml")))


def leaking(manifest: RunManifest) -> RunManifest:
    causality = manifest.causality.model_copy(update={"leaks": True, "reach": 17})
    return manifest.model_copy(update={"leaks": True, "causality": causality})


def test_card_is_in_the_model_and_with_the_artifacts_in_the_bundle(fresh_run: Path) -> None:
    card, bundle = card_of(fresh_run), Bundle.open(fresh_run / "bundle")
    texts = [(fresh_run / folder / "README.md").read_text(encoding="utf-8") for folder in ("model", "bundle")]
    assert texts == [card, f"{card}\n{artifact_section(bundle.manifest)}"]
    assert not verify(bundle).damaged  # the manifest has this card's checksum
    for entry in bundle.built():
        assert f"| {entry.id} " in texts[1] and f"{entry.parity.max_abs_error:.1e}" in texts[1]
        low, high = entry.drift.loops[-1].rms_interval or (0, 0)
        assert f"({low:.1e}–{high:.1e})" in texts[1] and f"{entry.sharing.stored_parameters:,}" in texts[1]


def test_protocol_scores_and_overlap(finished_run: Path) -> None:
    manifest = read_run(finished_run)
    card = card_of(finished_run)
    assert manifest.test is not None and f"{manifest.test.accuracy:.4f}" in card
    assert "random-split" in card and "also training texts" in card
    real = manifest.model_copy(update={"data": manifest.data.model_copy(update={"synthetic": False})})
    assert "Synthetic data" not in card_of(finished_run, real)


def test_language_model_has_every_exit_and_a_leak_comes_first(finished_language_run: Path) -> None:
    card, score = card_of(finished_language_run), read_run(finished_language_run).test
    for loop, exit_score in score.exits.items():
        assert f"| loop {loop} " in card and f"{exit_score.perplexity:,.2f}" in card
    assert f"{score.word_perplexity:,.2f}" in card
    assert "later tokens change no output" in card and "pipeline_tag: text-generation" in card
    assert "Synthetic data" in card and "LEAKS" not in card
    card = card_of(finished_language_run, leaking(read_run(finished_language_run)))
    assert card.index(LEAKS) < card.index("**Model:**") < card.index("## Scores")
    assert "tokens up to 17 positions later" in card
    changes: dict[str, Any] = {"steps": 0, "validation": None, "test": None, "tests": {}, "reason": "imported from x"}
    manifest = leaking(read_run(finished_language_run)).model_copy(update=changes)
    card = card_of(finished_language_run, manifest)
    assert "**Training:** not here; imported from x" in card
    assert "## Scores\n\nNone yet." in card


def test_stop_in_mid_epoch() -> None:
    changes = {"epochs": 0, "best_epoch": None, "reason": "stopped by --max-steps 7", "steps": 7}
    for update, words in (
        (changes, "weights of the last step, stopped in mid-epoch, chosen by"),
        ({}, "weights of epoch"),
    ):
        card = model_card(read_run(OLD).model_copy(update=update), read_run_recipe(OLD))
        assert words in card and "None" not in card
