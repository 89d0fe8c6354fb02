"""Embedding: one vector per text, such that texts of similar meaning have vectors of similar direction."""

from edgeformer.tasks.embedding.task import Embedding

TASK = Embedding()
