"""The child's side: ``python -m edgeformer.benchmark.worker``, a job's spec in, messages out.

A process does one job and nothing else, so that nothing else shares its memory and its threads.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module

from pydantic import BaseModel

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.benchmark.process import End

Send = Callable[[BaseModel], None]
"""Sends one message at once, so that a child that dies later has not lost it."""

# A spec's kind → the module whose ``work(told, send)`` does the job: ``told`` is the spec as JSON. It raises
# EdgeformerError where nothing of it can be done.
_JOBS = {
    "measure": "edgeformer.benchmark.measurement_worker",
    "list": "edgeformer.estimate.listing",
    "pace": "edgeformer.benchmark.paired_worker",
    "probe": "edgeformer.estimate.probe",
}


def main() -> int:
    """Read the spec, do the job, answer. An unexpected error ends in a traceback on stderr and exit code 1."""
    send = claim_stdout()
    told = sys.stdin.buffer.readline()  # one document; a job that goes on asking does so in further lines
    work: Callable[[bytes, Send], None] = import_module(_JOBS[json.loads(told)["kind"]]).work
    reason = None
    try:
        work(told, send)
    except EdgeformerError as error:
        reason = str(error)
    send(End(reason=reason))
    return 0


def claim_stdout() -> Send:
    """Take stdout for messages, one JSON document per line; what libraries print there, in Python or in C, goes to
    stderr from now on."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(message: BaseModel) -> None:
        ours.write(message.model_dump_json().encode() + b"\n")
        ours.flush()

    return send


if __name__ == "__main__":
    sys.exit(main())
