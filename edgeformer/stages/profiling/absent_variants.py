"""What a bundle does not hold although export could write it, with the command that does."""

from __future__ import annotations

from edgeformer.backends import builder_of
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.tasks import task_named

_NAMES = {"fp16": "FP16 graphs", "int8": "INT8 graphs", "int4": "INT4 graphs"}


def absent_variants(manifest: BundleManifest) -> tuple[str, ...]:
    """One line per absent variant, and one per artifact that was asked for and not built.

    Export replaces the whole bundle, so each command also asks for what is there already.
    """
    asked = {artifact.precision for artifact in manifest.artifacts}
    absent = [precision for precision in _NAMES if precision not in asked]
    lines = [f"{_NAMES[precision]}: {_command(manifest, f'--{precision}')}" for precision in absent]
    # Loops before the last that have a head but no graph. A looped classifier can leave after every loop.
    drifts = [artifact.drift for artifact in manifest.artifacts if artifact.drift is not None]
    loops = manifest.exits or tuple(loop.loop for loop in (drifts[0].loops if drifts else ()))
    have = {artifact.exit for artifact in manifest.artifacts if artifact.role == "exit"}
    missing = sorted(set(sorted(loops)[:-1]) - have)
    if missing:
        plural = "s" if len(missing) > 1 else ""
        lines.append(f"exit after loop{plural} {', '.join(map(str, missing))}: {_command(manifest, '--exit all')}")
    task = task_named(manifest.task)
    if task.writes_text and not any(artifact.role == "decode" for artifact in manifest.artifacts):
        lines.append(f"decoding with caches: {_command(manifest, '--exit all')}")
    if task.can_trim and not any(artifact.trimmed for artifact in manifest.artifacts):
        lines.append(f"trimmed vocabulary: {_command(manifest, '--vocab-trim')}")
    unbuilt = {a.id: a for a in manifest.artifacts if a.status != "built"}
    lines += [f"{name}: {known.status}: {known.reason or 'no reason given'}" for name, known in unbuilt.items()]
    return tuple(lines)


def _command(manifest: BundleManifest, added: str) -> str:
    """The export that writes what the bundle holds and ``added``."""
    flags = [*_held(manifest.artifacts), added]
    if "--exit all" in flags:  # it includes single exits
        flags = [flag for flag in flags if flag == "--exit all" or not flag.startswith("--exit")]
    name = manifest.run if manifest.wrapped is None else "BUNDLE"
    return " ".join(["edgeformer export", name, *dict.fromkeys(flags)])


def _held(artifacts: tuple[ArtifactManifest, ...]) -> list[str]:
    flags = [f"--{precision}" for precision in _NAMES if any(a.precision == precision for a in artifacts)]
    exits = sorted({a.exit for a in artifacts if a.role == "exit" and a.exit is not None})
    if any(artifact.role == "step" for artifact in artifacts):
        flags.append("--exit all")
    elif exits:
        flags.append(f"--exit {','.join(map(str, exits))}")
    if any(artifact.trimmed for artifact in artifacts):
        flags.append("--vocab-trim")
    # What is no graph has a builder; one that is not installed here has no flag.
    builders = [builder_of(artifact.format) for artifact in artifacts if not artifact.is_graph]
    built = [builder.flag for builder in builders if builder is not None]
    # --trt --trt-via … asks for what --trt alone asks for, too.
    return flags + [flag for flag in built if not any(other.startswith(f"{flag} ") for other in built)]
