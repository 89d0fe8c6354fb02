"""Check the pick of `edgeformer profile --search` against a brute force that shares no code with it.

Reads the rows and limits of a report that was made on its own device, and the scores of the bundle, as plain JSON; goes
through all rows, and exits with 1 unless the report's pick and Pareto front are the ones that it finds. What measuring
the two fastest in turns has found is taken from the report. Estimates and undecidable limits are not
covered: it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NOISE, CLOSE = 0.025, 0.15


def scores(bundle: dict[str, Any], metric: str) -> dict[str, float]:
    """Artifact → score on the validation split; step bundles and decode graphs have that of their full graph."""
    results = {a["id"]: a["validation"][metric] for a in bundle["artifacts"] if a["validation"]}
    for artifact in bundle["artifacts"]:
        for full in bundle["artifacts"]:
            alike = all(full[key] == artifact[key] for key in ("format", "precision", "trimmed"))
            if artifact["role"] in ("step", "decode") and full["role"] == "full" and alike and full["id"] in results:
                results.setdefault(artifact["id"], results[full["id"]])
    return results


def cost(row: dict[str, Any], quantity: str) -> float | None:
    """What a row says of latency (ms), size or memory (bytes) or energy (mJ); None: nothing."""
    return {
        "latency": row["latency_ms"]["p50"],
        "size": row["size_bytes"],
        "memory": row["memory_bytes"]["peak"],
        "energy": row["energy_mj"]["value"],
    }[quantity]


def ends(row: dict[str, Any]) -> tuple[float, float]:
    """Between which times the typical call lies: medians of both processes, and quartiles of what was not stable."""
    latency = row["latency_ms"]
    repeated, drawn = row["conditions"].get("repeated_p50_ms"), latency["quantiles_ms"]
    existing = [latency["p50"], *([repeated] if repeated is not None else [])]
    if latency["stable"] is False and len(drawn) == 41:
        existing += [drawn[10], drawn[30]]
    return min(existing), max(existing)


def near_the_least(report: dict[str, Any], costs: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows that are no different from the least."""
    search, quantity = report["search"], report["search"]["minimize"]
    least, best = min(costs, key=lambda item: item[0])
    text = search.get("compared")
    pair = [name(search["candidates"][text[item]]) for item in ("first", "second")] if text is not None else []
    if text is not None and text["found"] == "faster" and name(best) == pair[0]:
        least, best = next((value, row) for value, row in costs if name(row) == pair[1])
    near = []
    for value, row in costs:
        if row is not best and {name(row), name(best)} == {*pair} and text["found"] != "not known":
            same = text["found"] == "no different"
        elif quantity == "size":
            same = value == least
        else:
            overlap = quantity == "latency" and ends(row)[0] <= ends(best)[1] and value <= least * (1 + CLOSE)
            same = value <= least * (1 + NOISE) or overlap
        near += [row] if same else []
    return near


def judged_rows(report: dict[str, Any], bundle: dict[str, Any], shape: tuple[int, int]) -> list[dict[str, Any]]:
    """The measured rows at the budget's shape; of graphs that decode, those per token."""
    decode = bundle["task"] == "language-modeling"
    roles = {a["id"]: a["role"] for a in bundle["artifacts"]}
    rows = []
    for row in report["rows"]:
        phase = "decode" if decode and roles[row["artifact"]] in ("step", "decode") else "steady"
        local = row["where"] == "host" and row["phase"] == phase and (row["batch"], row["seq"]) == shape
        if local and row["latency_ms"]["status"] == "measured":
            rows.append(row)
    return rows


def beaten(point: tuple[float, ...], rest: list[tuple[float, ...]]) -> bool:
    """Return whether a different point is at least as small in every quantity."""
    return any(other != point and all(o <= p for o, p in zip(other, point, strict=True)) for other in rest)


def main() -> int:
    """0: the pick and the front are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    for which in ("report", "bundle"):
        parser.add_argument(which, type=Path, metavar=f"{which.upper()}_JSON")
    files = parser.parse_args()
    report, bundle = (json.loads(path.read_bytes()) for path in (files.report, files.bundle))
    search = report["search"]
    if search["basis"] != "measured" or any(c["unknown"] for c in search["candidates"] if c["feasible"]):
        print("holds estimates, or limits that nobody can decide")
        return 2
    metric, bound, minimize = search["metric"], search["bound"], search["minimize"]
    sign = -1 if metric == "accuracy" else 1
    losses = {artifact: sign * score for artifact, score in scores(bundle, metric).items()}
    limits = {check["name"]: check["limit"] for check in report["verdict"]["checks"]}
    budget = report["profile"].get("budgets", {}).get(bundle["task"], {})
    shape = (budget.get("batch", 1), min(budget.get("seq", 128), bundle["max_positions"]))
    rows = [row for row in judged_rows(report, bundle, shape) if row["artifact"] in losses]
    points = [(losses[row["artifact"]], row["latency_ms"]["p50"], row["size_bytes"]) for row in rows]
    front = {name(row) for row, point in zip(rows, points, strict=True) if not beaten(point, points)}
    allowed = [row for row in rows if bound is None or losses[row["artifact"]] <= sign * bound]
    for quantity, limit in limits.items():
        allowed = [row for row in allowed if (value := cost(row, quantity)) is not None and value <= limit]
    costs = [(value, row) for row in allowed if (value := cost(row, minimize)) is not None]
    near = near_the_least(report, costs) if costs else []
    right = {name(row) for row in near if row["size_bytes"] == min(other["size_bytes"] for other in near)}
    candidates = search["candidates"]
    pick = name(candidates[search["pick"]]) if search["pick"] is not None else None
    displayed = {name(candidate) for candidate in candidates if candidate["on_front"]}
    picked_right = pick in right if right else pick is None
    print(f"{len(rows)} measured rows at {shape[0]}×{shape[1]}, {len(allowed)} within bound and limits")
    print(f"pick {pick}: {'right' if picked_right else f'WRONG, brute force: {right or None}'}")
    print(f"front {sorted(displayed)}: {'right' if front == displayed else f'WRONG, brute force: {sorted(front)}'}")
    return 0 if picked_right and front == displayed else 1


def name(candidate: dict[str, Any]) -> tuple[str, int]:
    """Artifact and threads of a row or a candidate."""
    return candidate["artifact"], candidate["threads"] or 0


if __name__ == "__main__":
    sys.exit(main())
