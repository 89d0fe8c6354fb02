"""TensorRT's progress monitor, mapped on ours. It reports phases within phases, each with a number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeformer.formats.progress import Progress

PARTS = 100


@dataclass
class _Phase:
    name: str
    steps: int
    done: int = 0


class Phases:
    """How much of the whole is done: a phase inside another one is part of that one's current step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: list[_Phase] = []
        self._shown = 0

    def start(self, name: str, steps: int) -> None:
        """A phase begins inside those that are open."""
        self._open.append(_Phase(name, max(1, steps)))

    def step(self, name: str) -> None:
        """A step of an open phase is done."""
        for phase in self._open:
            if phase.name == name:
                phase.done += 1
        part, width = 0.0, 1.0
        for phase in self._open:
            part += width * min(phase.done, phase.steps) / phase.steps
            width /= phase.steps
        self._reach(round(PARTS * part))

    def finish(self, name: str) -> None:
        """A phase ends."""
        self._open = [phase for phase in self._open if phase.name != name]

    def complete(self) -> None:
        """All is done; builders skip steps that they announced."""
        self._reach(PARTS)

    def _reach(self, part: int) -> None:
        # A phase may be repeated; what was shown is not taken back.
        reached = max(self._shown, min(PARTS, part))
        self._progress.advance(reached - self._shown)
        self._shown = reached


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """What a builder's configuration takes as ``progress_monitor``, or None where this TensorRT has none.

    An exception (Ctrl-C, or of ``progress``) cancels the build and is kept in the monitor's ``interruption``: it must
    not travel through TensorRT's own code.
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interruption: BaseException | None = None
            self.phases = Phases(progress)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._guarded(lambda: self.phases.start(phase_name, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._guarded(lambda: self.phases.step(phase_name))
            return self.interruption is None

        def phase_finish(self, phase_name: str) -> None:
            self._guarded(lambda: self.phases.finish(phase_name))

        def _guarded(self, report: Any) -> None:
            try:
                report()
            except BaseException as error:
                self.interruption = error

    return _Monitor()
