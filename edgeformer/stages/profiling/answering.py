"""The child's side of a conversation: messages on stdout, one JSON document per line, and nothing else there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from pydantic import BaseModel


def claim_stdout() -> Callable[[BaseModel], None]:
    """Take stdout for messages; what libraries print, in Python or in C, goes to stderr from now on.

    Returns:
        Sends one message at once, so that a child that dies later has not lost it.
    """
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(message: BaseModel) -> None:
        ours.write(message.model_dump_json().encode() + b"\n")
        ours.flush()

    return send
