"""A task whose models are never trained here: whatever needs a recipe, text or labels is refused in one sentence."""

from __future__ import annotations

from typing import Any, NoReturn

from edgeformer.formats.errors import InputError
from edgeformer.tasks.task import Task


class Untrained(Task):
    """What is left of :class:`Task` are golden inputs, and how outputs compare."""

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"a {self.noun} came without recipe, text and labels: it can be profiled, verified and exported, not scored"
        )

    def prepare(self, *_: Any) -> NoReturn:
        self._refuse()

    def local_data(self, *_: Any) -> NoReturn:
        self._refuse()

    def set_name(self, *_: Any) -> NoReturn:
        self._refuse()

    def read_set(self, *_: Any) -> NoReturn:
        self._refuse()

    def read_file(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def reader(self, *_: Any) -> NoReturn:
        self._refuse()

    def batch(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def weight(self, *_: Any) -> NoReturn:
        self._refuse()

    def example(self, *_: Any) -> NoReturn:
        self._refuse()

    def evaluation_rows(self, *_: Any) -> NoReturn:
        self._refuse()

    def call_batches(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def meter(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def row_figures(self, *_: Any) -> NoReturn:
        self._refuse()

    def metric_of(self, *_: Any) -> NoReturn:
        self._refuse()

    def departures(self, *_: Any) -> NoReturn:
        self._refuse()

    def criterion(self, *_: Any) -> NoReturn:
        self._refuse()

    def record(self, *_: Any) -> NoReturn:
        self._refuse()

    def describe(self, *_: Any) -> NoReturn:
        self._refuse()

    def rows(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def golden_inputs(self, *_: Any) -> NoReturn:
        self._refuse()

    def golden_answers(self, *_: Any) -> NoReturn:
        self._refuse()

    def client_config(self, *_: Any) -> NoReturn:
        self._refuse()

    def tokenizer_config(self, *_: Any) -> NoReturn:
        self._refuse()

    def bundle_facts(self, *_: Any) -> NoReturn:
        self._refuse()

    def card_lines(self, *_: Any) -> NoReturn:
        self._refuse()
