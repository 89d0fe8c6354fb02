"""Pydantic base class of all files that are read from disk: frozen, strict, unknown keys refused.

Modules with these models omit ``from __future__ import annotations``. With it, pydantic compiles every annotation at
import, which delays each command on an edge device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue  # takes 10 ms
    from pydantic_core import CoreSchema


class Frozen(BaseModel):
    """Immutable model. Types are not coerced (``"3"`` is not 3), so that a wrong type is reported."""

    # Deferred: a command uses few of all the models that it imports, and building each takes a millisecond or more.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)


class Recognised(Frozen):
    """Base of task-specific models: once the task is imported, :meth:`recognise` selects a subclass by its fields."""

    called: ClassVar[str]

    def model_post_init(self, context: object, /) -> None:
        """Complete the class: until pydantic 2.12, SerializeAsAny fails on a class whose build is deferred."""
        type(self).model_rebuild()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: "CoreSchema", handler: "GetJsonSchemaHandler"
    ) -> "JsonSchemaValue":
        """Return a generic object schema for a direct subclass (the task defines its keys), else the model's own."""
        if Recognised not in cls.__bases__:
            return handler(core_schema)
        return {"type": "object", "description": f"{cls.called}; its keys depend on the task"}

    @classmethod
    def recognise(cls, value: object) -> object:
        """Return a saved object as the subclass with exactly its fields. Raises ValueError if no subclass matches."""
        if not isinstance(value, Mapping):
            return value
        for kind in (below := [*cls.__subclasses__()]):
            below += kind.__subclasses__()
            fields = kind.model_fields
            needed = {name for name, info in fields.items() if info.is_required()}
            if needed <= value.keys() <= fields.keys():
                return kind.model_validate(dict(value), strict=False)
        raise ValueError(f"the keys of {cls.called} fit no task of this version: {', '.join(sorted(map(str, value)))}")


def first_problem(error: ValidationError) -> str:
    """Describe the first invalid key of a file or section."""
    details = error.errors()[0]
    key = ".".join(str(step)[:60] for step in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    return f"{key + ': ' if key else ''}{message[:1].lower()}{message[1:]}"
