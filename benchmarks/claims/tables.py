"""Which cells of committed study tables may decide a claim, and which rows a study has at all."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.claims.schema import Number, Study
from benchmarks.results_page.provenance import read_json
from benchmarks.studies.specification import Study as Written
from benchmarks.studies.specification import load_study as read_study
from benchmarks.studies.specification import measure
from edgeformer.artifacts.errors import InputError

load_study = cache(read_study)


class NotThere(Exception):
    """No committed result holds the figure yet; the message says which file, row or cell is missing."""


SIZES = ("parameters", "megabytes", "size_bytes")
"""Figures that no computation changes: those of an FP16 file are of FP16 whatever multiplied with it."""


def cell(source: Study, figure: str, results: Path) -> Number:
    """Return a cell's mean.

    Raises:
        NotThere: there is no such table yet, the row is not complete, or it was made of other data.
        InputError: the study has no such row or figure, the row's model sees what it predicts and ``source`` does not
            expect that, or the score is of an FP16 graph.
    """
    value = _cell(source, figure, results).get("mean")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotThere(f"studies/{source.study}.json has no {figure} of {source.run} at {source.at!r} yet")
    return value


def seeds(source: Study, figure: str, results: Path) -> tuple[float, ...]:
    """Return a cell's value by each seed; empty: it has one. Raises as :func:`cell`."""
    values = _cell(source, figure, results).get("values", ())
    return tuple(values) if len(values) > 1 else ()


def _cell(source: Study, figure: str, results: Path) -> dict[str, Any]:
    check_reference(source, figure)
    file = f"studies/{source.study}.json"
    path = results / file
    if not path.is_file():
        raise NotThere(f"{file} is not committed yet")
    table = read_json(path)
    rows = [row for row in table["rows"] if (row["run"], row["at"]) == (source.run, source.at)]
    label = f"{source.run} at {source.at!r}"
    if not rows:
        raise NotThere(f"{file} has no {label} yet")
    _check_row(source, rows[0], table, f"{file}: {label}")
    return rows[0]["cells"].get(figure) or {}


def _check_row(source: Study, row: dict[str, Any], table: dict[str, Any], where: str) -> None:
    study, _ = load_study(source.study)
    if row.get("missing"):
        raise NotThere(f"{where}: {row['missing']}")
    target, have = len(set(study.runs[source.run].seeds)), len(set(row.get("keys", ())))
    if study.table.rows != "labels" and have < target:  # nothing is trained to count labels
        raise NotThere(f"{where}: {have} of {target} seeds")
    if row.get("leaks") and not source.leaks:
        raise InputError(f"{where}: the model sees what it predicts; where that is meant, the source says leaks: true")
    stands_in = f"in place of the hub's {source.hub}"
    if source.hub and any(stands_in in note for note in table.get("data", {}).get(source.run, ())):
        raise NotThere(f"{where}: other files {stands_in}")


def check_reference(source: Study, figure: str) -> None:
    """Raise InputError where no table of that study can ever have the row or the figure, or it decides nothing."""
    study, _ = load_study(source.study)
    if source.run not in study.runs:
        raise InputError(f"study {source.study} has no run {source.run!r}; it has {', '.join(study.runs)}")
    places = places_of(source.study, source.run)
    if source.at not in places:
        raise InputError(f"study {source.study}: {source.run} is never shown at {source.at!r}: {', '.join(places)}")
    if source.at == "fp16" and figure not in SIZES:
        raise InputError(
            f"study {source.study}: a CPU scores FP16 graphs in FP32; read {figure} from DATE-half-precision.json"
        )
    try:
        measure(figure)
    except KeyError:
        raise InputError(f"study {source.study}: no table has a figure {figure!r}") from None


@cache
def places_of(name: str, run: str) -> tuple[str, ...]:
    """Return the column ``at`` of a run's rows. Raises InputError for swept thresholds."""
    from edgeformer.data.splits import set_parts
    from edgeformer.models import load_recipe

    study, _ = load_study(name)
    spec = study.runs[run]
    changes = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in study.changes(run).items()]
    recipe: Any = load_recipe(spec.recipe, changes)
    if study.table.rows == "artifacts":
        return tuple(dict.fromkeys(("fp32", *spec.export)))
    if study.table.rows == "exits":
        return tuple(map(str, (*recipe.model.exits, recipe.model.loops)))
    if study.table.rows == "thresholds":
        raise InputError(f"study {name}: no claim can be read from a sweep of thresholds")
    sets = tuple(set_parts(recipe.data)) if hasattr(recipe.data, "split") else ("train", "validation", "test")
    return sets if study.table.rows == "labels" else _scored(study, sets)


def _scored(study: Written, sets: tuple[str, ...]) -> tuple[str, ...]:
    """Of the sets of some data, those that a table of scores shows."""
    if study.table.tests:
        return tuple(name for name in study.table.tests if name in sets)
    return tuple(name for name in sets if name not in ("train", "validation"))
