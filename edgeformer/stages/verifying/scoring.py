"""What export would have said of an artifact's answers, said where it runs: its score, and what it loses."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from edgeformer.bundle import Bundle
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.scores import Score
from edgeformer.tasks.early_exit import exit_logits


def answering_loop(bundle: Bundle, artifact: ArtifactManifest) -> int:
    """The loop that an artifact answers after; 0: there are none."""
    manifest = bundle.manifest
    return artifact.exit or (manifest.exits[-1] if manifest.exits else manifest.loops) or 0


def golden_score(bundle: Bundle, artifact: ArtifactManifest, outputs: Any) -> Score:
    """The score of what an artifact answers to the golden inputs; ``outputs``: as :meth:`Task.golden_outputs` has them.

    Raises:
        GoldenError: golden.npz does not hold what is needed.
    """
    task, loop = bundle.task, answering_loop(bundle, artifact)
    if not task.reads_text:
        return task.golden_score(loop, outputs, bundle.golden(artifact).answers)
    known = bundle.golden().arrays
    own = known.get(exit_logits(loop))
    right = {name: known[name] for name in task.golden_names[1] if name in known}
    answers = task.right_answers(right, {} if own is None else {loop: own})
    return task.golden_score(loop, outputs.reshape(-1, outputs.shape[-1]), answers, None, bundle.data)


def lost(bundle: Bundle, artifact: ArtifactManifest, scores: Mapping[str, Any]) -> str | None:
    """What it loses against the FP32 graph on the same rows beyond its bar; None: it is within, or nobody can tell.

    Args:
        scores: ``validation`` and ``score`` as in a manifest's entry, as far as they are known.
    """
    whole = [one for one in bundle.artifacts if one.is_graph and one.precision == "fp32" and not one.trimmed]
    base = next((one for one in whole if (one.role, one.exit) == (artifact.role, artifact.exit)), None)
    for name in ("validation", "score"):
        found: Score | None = scores.get(name)
        wanted: Score | None = getattr(base, name, None)
        if found is not None and not isfinite(found.loss):
            return f"its loss is not finite ({name})"
        if found is not None and wanted is not None:
            if found.n != wanted.n:
                continue  # not the same rows
            return bundle.task.lost(found, wanted, artifact.precision, trimmed=artifact.trimmed)
    return None
