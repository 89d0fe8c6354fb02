"""May an artifact's answers be trusted on this machine? One fixed rule per precision."""

from __future__ import annotations

from edgeformer.formats.manifest import ArtifactManifest, Parity
from edgeformer.tasks.parity import FP16_RELATIVE, out_of_tolerance

INT8_ERROR_FACTOR = 2.0
"""INT8 kernels round differently on other processors: the largest error may be this many times export's, …"""

INT8_AGREEMENT_LOSS = 0.02
"""… and top-1 agreement may be this much, or two rows, lower."""

_ROWS = 2.5  # two rows, whatever the division rounds to


def judge(parity: Parity, artifact: ArtifactManifest) -> tuple[str | None, str | None]:
    """What the artifact is held to, and what is wrong with it (None: nothing).

    FP32 and FP16 have export's own tolerances. INT8 has none of its own: export judged it by its task score, which
    needs the data set; here it has to be about as close to torch as it was at export.
    """
    if parity.tolerance is not None:
        return f"{parity.tolerance_kind} error ≤ {parity.tolerance:.0e}", out_of_tolerance(parity)
    recorded = artifact.parity
    if recorded is None or recorded.max_abs_error is None or recorded.top1_agreement is None:
        return None, out_of_tolerance(parity) or "bundle.json does not say how close it was at export"
    if parity.max_abs_error is None or parity.top1_agreement is None:
        return None, out_of_tolerance(parity)
    spread = parity.max_abs_error / parity.relative_error if parity.relative_error else 0.0
    error = INT8_ERROR_FACTOR * recorded.max_abs_error + FP16_RELATIVE * spread
    agreement = recorded.top1_agreement - max(INT8_AGREEMENT_LOSS, _ROWS / parity.n)
    held = f"error ≤ {error:.1e}, agreement ≥ {agreement:.1%}"
    if parity.max_abs_error > error:
        return held, f"error {parity.max_abs_error:.2g} is above {error:.2g} ({recorded.max_abs_error:.2g} at export)"
    if parity.top1_agreement < agreement:
        return held, f"top-1 agreement {parity.top1_agreement:.1%} is below {agreement:.1%}"
    return held, None
