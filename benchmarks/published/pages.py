"""A page per device: its facts, errors of estimates per runtime, and published beside estimated times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.frame import RESULTS, ROOT, markdown
from edgeformer.artifacts.documents import load_profile, shipped_names

RESULT, FORMER = (RESULTS / f"{name}.json" for name in ("published", "published-former"))
PICTURES = ROOT / "docs" / "results" / "pictures" / "devices"
_WORST = 5


class Case(NamedTuple):
    """A published time. Errors are log(estimated / published), without its source and without its device."""

    device: str
    runtime: str
    precision: str
    phase: str
    model: str
    batch: int
    size: int
    ms: float
    source: str
    error: float
    factor: float
    other_error: float
    other_factor: float


@cache
def result() -> dict[str, Any]:
    """Return the record of the last run; its rows as cases."""
    record: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    names = record["names"]
    record["rows"] = [Case(*(names[cell] if place in (0, 1, 4, 8) else cell for place, cell in enumerate(row)))
                      for row in record["rows"]]  # fmt: skip
    return record


def figures(cases: Sequence[Case], *, is_known: bool = True) -> dict[str, float]:
    """Return the share within the range, the median width, and the median and the worst error."""
    pairs = [(case.error, case.factor) if is_known else (case.other_error, case.other_factor) for case in cases]
    sizes, factors = np.abs(np.array(pairs)).T
    return {
        "rows": len(cases), "within": float(np.mean(sizes <= np.log(factors))), "width": float(np.median(factors**2)),
        "median_error": float(np.expm1(np.median(sizes))), "worst": float(np.exp(sizes.max())),
    }  # fmt: skip


def cells(values: dict[str, float]) -> list[str]:
    """Return the cells of a table for :func:`figures`."""
    return [
        f"{values['rows']:,}", f"{values['within']:.0%}", f"{values['width']:.1f}", f"{values['median_error']:.0%}",
        f"{values['worst']:.1f}",
    ]  # fmt: skip


HEADS = ("rows", "within the range", "width of the range", "median error", "worst factor")


def grouped(cases: Sequence[Case], key: Callable[[Case], Any]) -> dict[Any, list[Case]]:
    """Return the cases by key, the largest group first."""
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def facts(device: str) -> Iterator[list[str]]:
    """Yield the facts of a profile: name, value, what checks it, and its source."""
    profile = load_profile(device).model_dump(mode="json")
    entries = [(key, value) for key, value in profile.items() if isinstance(value, dict)]
    entries += [(f"peaks.{key}", value) for key, value in profile["peaks"].items() if value]
    for key, fact in entries:
        if {"value", "verified"} <= fact.keys():
            value = fact["value"]
            text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
            published = f"; published: {fact['published']}" if fact.get("published") else ""
            yield [f"`{key}`", text, fact["verified"], breakable(f"{fact['source']}{published}".replace("|", "\\|"))]


def breakable(text: str) -> str:
    """Return a source whose long words (commits, addresses) can be broken at the end of a line."""
    return re.sub(r"[^\s-]{16}(?=[^\s-])", lambda match: f"{match[0]}<wbr>", text)


def page(device: str, cases: Sequence[Case]) -> str:
    """Return the page of a device."""
    errors, sources = figures(cases), len({case.source for case in cases})
    by_runtime = grouped(cases, lambda case: (case.runtime, case.precision, case.phase))
    worst = sorted(cases, key=lambda case: -abs(case.error))[:_WORST]
    parts = [
        f"# {load_profile(device).title}",
        f"**{errors['rows']:,} published times from {sources} sources: median error {errors['median_error']:.0%}, "
        f"{errors['within']:.0%} within the range.**",
        f"Counted on {result()['created']}, by `python -m benchmarks.published`. Each time is estimated by a fit to "
        "the other sources. [All devices](../devices.md) has the method.",
        f"![Published against estimated times, each with its range](../pictures/devices/{device}.png)",
        "## Errors per runtime",
        markdown(("runtime", "precision", "phase", *HEADS), [[*key, *cells(figures(group))] for key, group in
                 by_runtime.items()]),
        "## Largest errors",
        markdown(
            ("model", "runtime", "batch × size", "published ms", "estimated ms", "source"),
            [
                [case.model, f"{case.runtime} {case.precision}", f"{case.batch} × {case.size}", f"{case.ms:.4g}",
                 f"{case.ms * math.exp(case.error):.4g}", breakable(case.source)]
                for case in worst
            ],
        ),
        "## Facts of the profile",
        markdown(("fact", "value", "checked by", "source"), [*facts(device)]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def index_facts() -> dict[str, Any]:
    """Return the figures and tables of the page of all devices."""
    cases = result()["rows"]
    former = json.loads(FORMER.read_text(encoding="utf-8"))
    profiles = {*shipped_names("profiles")}
    by_device = grouped(cases, lambda case: case.device)
    kinds = {device: load_profile(device).kind if device in profiles else "cpu" for device in by_device}
    by_class = grouped(cases, lambda case: (kinds[case.device], case.runtime, case.precision))
    heads = ("rows", "source left out", "device left out", "former")

    def line(group: Sequence[Case], key: str) -> list[str]:
        checks = figures(group), figures(group, is_known=False), former.get(key)
        return [f"{len(group):,}", *(", ".join(cells(values)[1:]) if values else "" for values in checks)]

    devices = [
        [f"[{device}](devices/{device}.md)" if device in profiles else device, *line(group, device)]
        for device, group in by_device.items()
    ]
    classes = [[*key, *line(group, " ".join(key))] for key, group in by_class.items()]
    return {
        **result()["counts"], "created": result()["created"], "devices": len(by_device), "known": figures(cases),
        "others": figures(cases, is_known=False), "former": former["all"], "commit": former["commit"],
        "by_device": markdown(("device", *heads), [["all", *line(cases, "all")], *devices]),
        "by_class": markdown(("kind", "runtime", "precision", *heads), classes),
    }  # fmt: skip


def of_profiles() -> dict[str, list[Case]]:
    """Return the cases of the devices with a shipped profile, by device."""
    profiles = {*shipped_names("profiles")}
    return grouped([case for case in result()["rows"] if case.device in profiles], lambda case: case.device)


def device_pages() -> dict[str, str]:
    """Return the pages of the devices by their path below docs/results."""
    return {f"devices/{device}.md": page(device, cases) for device, cases in of_profiles().items()}


def draw() -> None:
    """Draw published against estimated times of every device, with their ranges as a band."""
    import matplotlib.pyplot as plt

    PICTURES.mkdir(parents=True, exist_ok=True)
    for device, cases in of_profiles().items():
        figure, axes = plt.subplots(figsize=(7, 5.5), layout="constrained")
        for place, (runtime, group) in enumerate(grouped(cases, lambda case: case.runtime).items()):
            published = np.array([case.ms for case in group])
            estimated = published * np.exp([case.error for case in group])
            factors = np.array([case.factor for case in group])
            ends = [estimated - estimated / factors, estimated * factors - estimated]
            axes.errorbar(
                published, estimated, ends, fmt="o", markersize=3, elinewidth=0.5, alpha=0.7, color=f"C{place}",
                label=f"{runtime} ({len(group)})",
            )  # fmt: skip
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="0.3", linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlabel="published, ms", ylabel="estimated without its source, ms")
        axes.set_title(f"{load_profile(device).title}: bars are the ranges of the estimates", fontsize=10)
        axes.legend(fontsize=8)
        figure.savefig(PICTURES / f"{device}.png", dpi=100)
        plt.close(figure)
