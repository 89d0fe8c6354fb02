"""The one pydantic base of everything that is read from disk: frozen, strict, unknown keys refused.

Modules of such models do without ``from __future__ import annotations``: pydantic would compile each annotation of each
model when it is imported, which an edge device waits for at every command.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue  # takes 10 ms
    from pydantic_core import CoreSchema


class Frozen(BaseModel):
    """A value object. Types are not coerced (``"3"`` is not 3), so that a typing slip is reported, not guessed at."""

    # Deferred: a command uses few of all the models that it imports, and building each takes a millisecond or more.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)


class Recognised(Frozen):
    """Base of task-specific models: after the task's import, a document is recognised by its fields."""

    called: ClassVar[str]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: "CoreSchema", handler: "GetJsonSchemaHandler"
    ) -> "JsonSchemaValue":
        """Of such a base: an object, whose keys are the task's; of a subclass: its own."""
        if Recognised not in cls.__bases__:
            return handler(core_schema)
        return {"type": "object", "description": f"{cls.called}, as its task has them"}

    @classmethod
    def recognise(cls, value: object) -> object:
        """A saved object as its own type: the one that has exactly such fields. Raises ValueError where none has."""
        if not isinstance(value, Mapping):
            return value
        for kind in (below := [*cls.__subclasses__()]):
            below += kind.__subclasses__()
            fields = kind.model_fields
            needed = {name for name, info in fields.items() if info.is_required()}
            if needed <= value.keys() <= fields.keys():
                return kind.model_validate(dict(value), strict=False)
        raise ValueError(f"{cls.called} of no task that is known here: {', '.join(sorted(map(str, value)))}")
