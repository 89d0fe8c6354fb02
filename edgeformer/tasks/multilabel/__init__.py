"""Multi-label classification: any number of labels per text, each with a threshold of its own."""

from edgeformer.tasks.multilabel.task import MultiLabel

TASK = MultiLabel()
