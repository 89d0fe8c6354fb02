"""`calibrate`: this host's rates, and how near its operators come to them, from a bundle's graphs at shapes
that :mod:`.check` does not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgeformer.bundle import Bundle
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.documents import save_profile
from edgeformer.formats.errors import InputError
from edgeformer.formats.progress import Progress, Silent, bar
from edgeformer.machine.host import default_threads
from edgeformer.stages.profiling.estimating.held_out import left_out, with_left_out
from edgeformer.stages.profiling.estimating.host_facts import host_facts
from edgeformer.stages.profiling.estimating.listing import Listing, ListSpec, run_listing
from edgeformer.stages.profiling.estimating.probe import run_probe
from edgeformer.stages.profiling.estimating.profiled import Timed, counted
from edgeformer.stages.profiling.estimating.sweeps import SWEEPS, Repeats, in_turn, together
from edgeformer.stages.profiling.estimating.teaching import PRECISIONS, fit
from edgeformer.stages.profiling.messages import CheckedArtifact, Item, Shape
from edgeformer.stages.profiling.request import find_target

# None of batch 1 or 8 with 16, 64 or 128 tokens: those stay unseen, to check estimates at.
FIT_SHAPES: tuple[Shape, ...] = (
    (1, 8), (1, 32), (1, 48), (1, 96), (1, 192), (2, 24), (4, 8), (4, 48), (4, 96), (16, 8), (16, 32), (16, 48),
)  # fmt: skip
DECODE_SHAPES: tuple[Shape, ...] = ((1, 24), (1, 96), (1, 192))
"""Where a token is decoded: behind so many others."""
# Of several models each shows every other shape, as long as so many are left: those of the others are there, too.
_FEWEST_SHAPES = 4
# Whole calls of all artifacts together. What comes on top: the probe, starting a process, an item's nodes under the
# profiler.
_BUDGET_S, _PROBE_S, _PROCESS_S, _NODES_S = 200.0, 20.0, 3.0, 1.3
_LONGEST_S = 600.0
_COMMENTS = {
    "cpu": """\
# Written by `edgeformer calibrate`: this host's rates as they were measured, and what the estimator learned.
# It says nothing about another machine, and is refused there. Budgets are yours to change; the rest is not.
""",
    "cuda": """\
# Written by `edgeformer calibrate --validate-only`: the profile as it was, and how far estimates from its facts were
# from measurements on the card itself. Facts and budgets are yours to change; then validate again.
""",
}


@dataclass(frozen=True)
class _Subject:
    """A graph that is timed, and at what."""

    run: str
    checked: CheckedArtifact
    items: tuple[Item, ...]


def calibrate(
    bundle: Path,
    base: DeviceProfile,
    *,
    threads: int | None = None,
    shapes: Sequence[Shape] = FIT_SHAPES,
    others: Sequence[Path] = (),
    progress: Progress | None = None,
) -> DeviceProfile:
    """The profile of this host's processor with measured rates and a calibration. Takes at most ten minutes.

    Args:
        bundle: whose full FP32, INT8 and FP16 ONNX graphs, as far as they are there, are timed on this host.
        base: name, title and budgets are kept.
        threads: of one operator; None: the physical cores that this process may use.
        shapes: (batch, seq) to fit on; those that the model cannot take are left out, and of several models every
            other one.
        others: bundles of other models, from which to learn, too; with two of them or more, each model is left out
            once, which tells how far off estimates of a model are that was never seen.
        progress: where to say what is going on.

    Raises:
        InputError: not a CPU profile, or not of this processor; no FP32 ONNX graph, or too few shapes to fit on; one
            model twice, or so many that they take more than ten minutes.
        ArtifactError: the bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: the measuring processes did not answer.
    """
    if base.kind != "cpu":
        raise InputError(f"only processors can be calibrated so far, and {base.name!r} is a {base.kind} device")
    if not (target := find_target(base)).present:
        raise InputError(
            f"--device {base.name}: {target.reason}; calibrate on the device itself, or this host with --device host"
        )
    folders = (bundle, *others)
    subjects = [subject for folder in folders for subject in _subjects(folder, shapes, bool(others))]
    repeats = Repeats(_spare_s(subjects))
    count, shown = threads or default_threads(), progress or Silent()
    with bar(shown, "measuring this host's rates", None):
        probed = run_probe(count)
    timed, noted = _timed(subjects, count, repeats, shown)
    disturbed = _words([probed.disturbed, *noted])
    if disturbed is not None:
        shown.message(f"these times are no facts: {disturbed}; calibrate again when nothing else runs")
    device = host_facts(base, count, probed, timed, disturbed)
    calls = counted(timed)
    fitted = fit(device, probed, calls)
    assert fitted.calibration is not None
    known = fitted.calibration.model_copy(update={"disturbed": disturbed})
    cases = left_out(device, probed, calls, known.speed)
    fitted = fitted.model_copy(update={"calibration": known})
    return with_left_out(fitted, cases) if cases else fitted


def _subjects(folder: Path, shapes: Sequence[Shape], several: bool) -> list[_Subject]:
    opened = Bundle.open(folder)
    chosen = full_graphs(opened, PRECISIONS)
    if not chosen or chosen[0].artifact.precision != "fp32":
        raise InputError(f"{folder}: calibrating needs the full FP32 ONNX graph; export the run again")
    longest = opened.manifest.max_positions
    if longest is None:
        raise InputError(f"{folder}: calibrating needs a model that takes texts of many lengths, not a wrapped graph")
    fitting = sorted((shape for shape in shapes if shape[1] <= longest), key=lambda shape: shape[0] * shape[1])
    if len(fitting) < _FEWEST_SHAPES:
        raise InputError(
            f"calibrating needs at least {_FEWEST_SHAPES} shapes that the model takes (up to {longest} tokens), not "
            f"{len(fitting)}"
        )
    if several and len(fitting) >= 2 * _FEWEST_SHAPES:
        fitting = fitting[::2]
    items: tuple[Item, ...] = tuple(("steady", batch, seq) for batch, seq in fitting)
    tokens: tuple[Item, ...] = tuple(("decode", *shape) for shape in DECODE_SHAPES if shape[1] <= longest)
    decoders = full_graphs(opened, PRECISIONS, role="decode") if tokens else []
    return [_Subject(opened.name, one, what) for some, what in ((chosen, items), (decoders, tokens)) for one in some]


def _spare_s(subjects: Sequence[_Subject]) -> float:
    """What timing them leaves of ten minutes. Raises InputError where that is nothing, or a model is there twice."""
    artifacts = [(subject.run, subject.checked.artifact.id) for subject in subjects]
    twice = sorted({run for run, artifact in artifacts if artifacts.count((run, artifact)) > 1})
    if twice:
        raise InputError(f"--also: {', '.join(twice)} is there twice; each model teaches once")
    each_s = SWEEPS * _PROCESS_S
    taken_s = _PROBE_S + _BUDGET_S + sum(each_s + _NODES_S * len(subject.items) for subject in subjects)
    if taken_s > _LONGEST_S:
        raise InputError(
            f"--also: {len(subjects)} graphs take about {taken_s / 60:.0f} minutes, and a calibration takes at most "
            f"{_LONGEST_S / 60:.0f}; name fewer runs"
        )
    return _LONGEST_S - taken_s


def write_profile(device: DeviceProfile, folder: Path) -> Path:
    """Write a calibrated profile as ``folder/<name>.yaml``, where ``load_profile(name, folder)`` finds it.

    Args:
        device: the profile.
        folder: of the user's own profiles.
    """
    path = folder / f"{device.name}.yaml"
    save_profile(device, path, _COMMENTS[device.kind])
    return path


def full_graphs(bundle: Bundle, precisions: Sequence[str], role: str = "full") -> list[CheckedArtifact]:
    """The full, untrimmed ONNX graphs of a bundle, after their files were checked.

    Args:
        bundle: an opened one.
        precisions: of the graphs, in the order that is wanted.
        role: decode: those that write a token.

    Raises:
        ArtifactError: a file is missing, truncated or changed.
    """
    full = [artifact for artifact in bundle.built(role) if artifact.is_graph and not artifact.trimmed]
    wanted = [artifact for precision in precisions for artifact in full if artifact.precision == precision]
    return [CheckedArtifact.of(bundle, artifact) for artifact in wanted]


def _words(noted: Sequence[str | None]) -> str | None:
    """Of how many processes were disturbed, after each was given a second try, and by what at the last."""
    found = [doubts for doubts in noted if doubts is not None]
    return f"{len(found)} of {len(noted)} measuring processes were disturbed: {found[-1]}" if found else None


def _timed(
    subjects: Sequence[_Subject], threads: int, repeats: Repeats, shown: Progress
) -> tuple[list[Timed], list[str | None]]:
    """Every subject by a process in each sweep, its nodes listed in the first; and what disturbed each of them."""
    listings: list[dict[int, Listing]] = [{} for _ in subjects]
    budget_s = _BUDGET_S / len(subjects) / SWEEPS
    for sweep in range(SWEEPS):
        for place in in_turn(range(len(subjects)), sweep):
            subject, nodes = subjects[place], sweep == 0
            spec = ListSpec(
                checked=subject.checked, items=subject.items, threads=threads, timed=True, nodes=nodes,
                budget_s=budget_s,
            )  # fmt: skip
            name = f"{subject.run}'s {subject.checked.artifact.id}, sweep {sweep + 1} of {SWEEPS}"
            # Every item is timed, and then listed or said.
            with bar(shown, f"timing {name}", 2 * len(subject.items), "step"):
                listings[place][sweep] = repeats.undisturbed(partial(run_listing, spec, shown.advance))
    found = [Timed(one.run, one.checked.artifact, together(of)) for one, of in zip(subjects, listings, strict=True)]
    for one in found:
        for item, reason in one.listing.refused.items():
            shown.message(f"{one.artifact.id} at {item[1]}×{item[2]}: not timed: {reason}")
    return found, [listing.disturbed for of in listings for listing in of.values()]
