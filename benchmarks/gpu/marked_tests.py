"""Row 9: the tests that need a card, and what became of each."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.session import ROOT, Column, Figures, Row, Session, main
from edgeformer.artifacts.errors import EdgeformerError

TESTS = ROOT / "tests" / "gpu"
SECONDS = 280


def measure(session: Session) -> None:
    """Each file in a process of its own, side by side: an illegal access of one spoils no other."""
    files = sorted(TESTS.glob("test_*.py"))[: 1 if session.tiny else None]
    with ThreadPoolExecutor() as pool:
        tested = {path.stem: pool.submit(_tested, session, path) for path in files}
        for name, future in tested.items():
            session.case(name, future.result)


def _tested(session: Session, path: Path) -> Figures:
    report = session.work / f"{path.stem}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    # Without the project's own options: they ask for a plugin that a borrowed machine lacks.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    limit = min(SECONDS, session.seconds_left)
    done = subprocess.run(
        [*command, f"--junitxml={report}", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=limit
    )
    if done.returncode not in (0, 1):
        raise EdgeformerError(
            f"pytest ended with exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
        )
    tests = {case.attrib["name"]: _outcome(case) for case in xml.parse(report).iter("testcase")}
    count = {kind: sum(text.startswith(kind) for text in tests.values()) for kind in ("passed", "failed", "skipped")}
    return {**count, "tests": tests}


def _outcome(case: xml.Element) -> str:
    for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (results := case.find(kind)) is not None:
            return f"{name}: {results.attrib.get('message', '')[:300]}"
    return "passed"


ROW = Row(
    number=9,
    topic="marked-tests",
    question="do the tests that need a card pass on it?",
    wanted="all pass; skipped ones lack a library",
    measure=measure,
    columns=(Column("passed", "passed"), Column("failed", "failed"), Column("skipped", "skipped")),
    module="marked_tests",
)

if __name__ == "__main__":
    raise SystemExit(main(ROW))
