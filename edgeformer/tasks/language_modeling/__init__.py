"""Language modelling (paper B): the next token of a text."""

from edgeformer.tasks.language_modeling.task import LanguageModeling

TASK = LanguageModeling()
