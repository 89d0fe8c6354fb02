"""metrics.jsonl and TensorBoard, written side by side."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from edgeformer.formats.files import write_text


class MetricsLog:
    """One JSON object per record in ``metrics.jsonl``; its numbers also as TensorBoard scalars.

    A resumed run drops the records of steps that were lost with the process and writes them again.
    """

    def __init__(self, run: Path, resume_step: int) -> None:
        self._path = run / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= resume_step]
        write_text(self._path, "".join(line + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resume_step + 1)

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.endswith("}")]  # a killed process may leave half a line

    def record(self, kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
        """Append one record: ``kind`` is "step" or "epoch", ``epoch`` counts passes over the data (fractional)."""
        document = {"kind": kind, "step": step, "epoch": round(epoch, 4), **values}
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()
