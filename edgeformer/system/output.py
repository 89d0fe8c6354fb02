"""Output of native code, which writes to the file descriptors of stdout and stderr and not to Python's streams."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import BinaryIO, TextIO


@cache
def _python_stderr() -> TextIO:
    """Return a file with a descriptor of its own for Python's stderr; never closed, because loggers may keep it."""
    return os.fdopen(os.dup(2), "w", buffering=1)


@contextmanager
def capture_native_stderr() -> Iterator[list[str]]:
    """Capture what native code writes to stderr within the block; Python's own stderr stays visible.

    Yields a list, which has the lines at the end of the block.
    """
    sys.stderr.flush()
    original, python_stderr, lines = os.dup(2), sys.stderr, list[str]()
    if python_stderr is sys.__stderr__:
        sys.stderr = _python_stderr()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr = python_stderr
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def discard_native_stderr() -> None:
    """Discard what native code writes to stderr from now on."""
    sys.stderr = _python_stderr()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def claim_stdout() -> BinaryIO:
    """Return this process's stdout; what is printed there from now on, by Python or native code, goes to stderr."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return channel
