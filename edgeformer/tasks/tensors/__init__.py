"""Tensors: graphs that somebody else made, from any named inputs to any named outputs."""

from edgeformer.tasks.tensors.task import Tensors

TASK = Tensors()
