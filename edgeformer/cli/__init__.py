"""The command line: one file per command, each parses, calls one function and renders."""

from edgeformer.cli.app import main

__all__ = ["main"]
