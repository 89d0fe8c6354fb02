"""The one pydantic base of everything that is read from disk: frozen, strict, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value object. Types are not coerced (``"3"`` is not 3), so that a typing slip is reported, not guessed at."""

    # Deferred: a command uses few of all the models that it imports, and building each takes a millisecond or more.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)
