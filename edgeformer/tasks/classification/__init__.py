"""Classification (paper A): one label per text."""

from edgeformer.tasks.classification.task import Classification

TASK = Classification()
