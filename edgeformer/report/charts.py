"""Charts of a profile report: SVG inside the HTML page. Without matplotlib there are none.

An estimate is hatched or hollow, with a dashed edge, and as wide as its range; a measurement is solid. The SVG needs no
other file and no network, and takes its colours from the page's style sheet.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from edgeformer.artifacts.report import Choice, Memory, Report, Row
from edgeformer.artifacts.units import format_bytes, format_milliseconds, format_threads
from edgeformer.report import canvas
from edgeformer.report.canvas import FAINT, GREY, INK, PALETTE, PAPER, RED, literal, shorten_name
from edgeformer.report.columns import ABOUT
from edgeformer.report.context import RankedCandidate, metric_named, ranked_candidates, shape_text
from edgeformer.runtimes import provider_facts

MAX_ROWS = 24  # rows of a chart of times; the tables have all rows
_LOG_SCALE_SPREAD = 12.0  # ratio of the longest to the shortest time from which the time axis is logarithmic
_MINOR_LABELS_SPREAD = 100.0  # ratio up to which a logarithmic time axis has space for labels between the powers of ten
_FAR_LIMIT = 4.0  # a limit this many times beyond the largest value is named at the edge instead of drawn
_MIB = 2**20
_WIDTH = 4.7  # inches; the page scales charts to its columns, and on a phone their text must stay readable
_DASHED: Any = (0, (3, 2))
_VALUE_LABEL: dict[str, Any] = {
    "textcoords": "offset points", "va": "center", "fontsize": 8,
    "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
}  # fmt: skip
"""A figure at the end of its bar; the line of a budget does not cross it."""
_PARTS = ("embeddings", "block", "heads", "other")


class Picture(NamedTuple):
    """One chart of the page; ``name`` is unique in the page, ``missing`` says why there is no ``svg``.

    ``height`` in inches grows with every entry that ``draw`` shows.
    """

    name: str
    title: str
    caption: str
    missing: str
    height: float
    height_per_entry: float
    draw: Callable[..., None]
    svg: str | None = None


def draw_pictures(report: Report) -> list[Picture]:
    """Return the charts of a report in order; a chart that cannot be drawn says why."""
    names = dict.fromkeys(row.artifact for row in report.rows)
    timed = [row for row in report.rows if row.phase != "cold" and row.latency_ms.p50 is not None]
    peaks = []  # each artifact's largest memory over all shapes: measured ones first, then estimated ones
    for status in ("measured", "estimated"):
        for name in names:
            memories = [row.memory_bytes for row in report.rows if row.artifact == name]
            if of_status := [memory for memory in memories if memory.status == status and memory.peak is not None]:
                peaks.append((name, max(of_status, key=lambda memory: memory.peak or 0)))
    drawn: dict[str, Sequence[Any]] = {
        "latency": [row for row in timed if row.latency_ms.status == "measured"],
        "estimates": [row for row in timed if row.latency_ms.status == "estimated"],
        "memory": peaks,
        "sizes": [*names],
    }
    if report.on_target:
        del drawn["estimates"]
    pictures = [_draw_picture(name, entries, report, entries) for name, entries in drawn.items()]
    if report.search is not None:
        pictures.append(draw_choice(report.search, report))
    return pictures


def draw_choice(choice: Choice, report: Report | None = None) -> Picture:
    """Return the chart of score against latency, with the colours of the other charts of a ``report``.

    None: of a search, whose artifacts are called model/artifact, with a colour per model.
    """
    if report is not None:
        colours = _colours(row.artifact for row in report.rows)
    else:
        model_of = {candidate.artifact: candidate.artifact.partition("/")[0] for candidate in choice.candidates}
        colour_of_model = _colours(model_of.values())
        colours = {artifact: colour_of_model[model] for artifact, model in model_of.items()}
    ranked = [r for r in ranked_candidates(choice) if None not in (r.candidate.score, r.candidate.latency_ms)]
    named = [row for row in ranked if row.is_pick or row.candidate.on_front]
    return _draw_picture("search", ranked, choice, colours, ranked, heights=len(named))


def _draw_picture(name: str, entries: Sequence[Any], *content: Any, heights: int | None = None) -> Picture:
    """Draw ``content``, which shows ``entries``, as SVG for a page; ``heights``: number of those that take height."""
    picture = PICTURES[name]
    if picture.draw is _draw_times and len(entries) > MAX_ROWS:
        heights = MAX_ROWS
        caption = f"{picture.caption} These are {MAX_ROWS} of {len(entries)} rows; the tables have all."
        picture = picture._replace(caption=caption)
    if not canvas.can_draw():
        return picture._replace(missing=f"{canvas.NO_PICTURE}; the tables hold the same figures")
    if not entries:
        return picture
    # Unique ids, no metadata, colours from the style sheet's variables.
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.edgecolor": INK, "grid.color": FAINT, "font.size": 9, "axes.labelsize": 8.5,
        "xtick.labelsize": 8, "hatch.linewidth": 0.7,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        height = picture.height + picture.height_per_entry * (len(entries) if heights is None else heights)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        picture.draw(canvas.bare(figure.subplots()), *content)
        text = io.StringIO()
        metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    root = rf'<svg viewBox="\1" role="img" aria-labelledby="t-{name}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', root, svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    # A presentation attribute cannot hold a CSS variable; a style can.
    svg = re.sub(r'\b(fill|stroke)="(#[0-9a-fA-F]{6})"', r'style="\1: \2"', svg)
    variables = {colour: f"c{index}" for index, colour in enumerate(PALETTE)}
    variables |= {INK: "ink", FAINT: "faint", PAPER: "paper", RED: "limit"}
    for colour, variable in variables.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # The reader's machine may not have matplotlib's font.
    return picture._replace(svg=re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg))


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name; of the artifacts of a report's rows, the same in every chart."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}


def _draw_times(axis: Any, report: Report, rows: Sequence[Row]) -> None:
    """Draw a line per row: the sample of a measured row, or the range of an estimated row."""
    rows = rows[:MAX_ROWS]
    status, colours, ends = rows[0].latency_ms.status, _colours(row.artifact for row in report.rows), list[float]()
    for y, row in enumerate(rows):
        latency, colour, text = row.latency_ms, colours[row.artifact], format_milliseconds(row.latency_ms.p50)
        if status == "estimated":
            low, high = _draw_estimate(axis, y, latency.low, latency.p50 or 0.0, latency.high, colour)
            text = f"{ABOUT} {text}"
        else:
            # Nested bars: all calls, 5 to 95%, the middle half, the median.
            quantiles = latency.quantiles_ms
            last = len(quantiles) - 1
            if last < 2:
                low, high = latency.p50 or 0.0, latency.p90 or latency.p50 or 0.0
                axis.plot([low, high], [y, y], color=colour, linewidth=2)
                axis.plot([low], [y], "o", color=colour, markersize=5)
            else:
                shares = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
                low, p5, p25, p50, p75, p95, high = (quantiles[round(last * share)] for share in shares)
                axis.plot([low, high], [y, y], color=colour, linewidth=1)
                axis.barh(y, p95 - p5, 0.34, left=p5, color=colour, alpha=0.45)
                axis.barh(y, p75 - p25, 0.62, left=p25, color=colour)
                axis.plot([p50, p50], [y - 0.31, y + 0.31], color=PAPER, linewidth=1.6)
            text += " unstable" if latency.stable is False else ""
        axis.annotate(text, (high, y), (4, 0), **_VALUE_LABEL)
        ends += [low, high]
    if status == "estimated" or report.on_target:
        ends += _draw_limits(axis, report, "latency", ends)
    is_logarithmic = bool(ends) and max(ends) > _LOG_SCALE_SPREAD * max(min(ends), 1e-9)
    has_runtimes = len({row.provider for row in rows}) > 1
    names = [f"{shorten_name(row.artifact)}  {shape_text(row, report)}" for row in rows]
    if has_runtimes:
        names = [f"{name}  {provider_facts(row.provider).label}" for name, row in zip(names, rows, strict=True)]
    _label_rows(axis, names, None if is_logarithmic else ends)
    if is_logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if max(ends) < _MINOR_LABELS_SPREAD * min(ends):
            axis.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
            axis.tick_params(axis="x", which="minor", labelsize=7)
        else:
            axis.xaxis.set_minor_formatter("")
        axis.set_xlim(min(ends) / 1.4, max(ends) * (max(ends) / min(ends)) ** 0.3)
    source = f"measured on this {'device' if report.on_target else 'host'}"
    if status == "estimated":
        source = literal(f"ESTIMATED for {report.device}, not measured")
    axis.set(xlabel=f"ms per call, {source}")


def _draw_memory(axis: Any, report: Report, peaks: Sequence[tuple[str, Memory]]) -> None:
    """Draw the peak memory of each artifact and the device's budget."""
    colours, ends = _colours(row.artifact for row in report.rows), list[float]()
    for y, (name, memory) in enumerate(peaks):
        high, text = (memory.peak or 0) / _MIB, format_bytes(memory.peak)
        if memory.status == "estimated":
            low_mib, high_mib = ((end or memory.peak or 0) / _MIB for end in (memory.low, memory.high))
            _, high = _draw_estimate(axis, y, low_mib, high, high_mib, colours[name])
            text = f"{ABOUT} {text}"
        else:
            axis.barh(y, high, 0.56, color=colours[name])
        axis.annotate(text, (high, y), (4, 0), **_VALUE_LABEL)
        ends.append(high)
    limits = _draw_limits(axis, report, "memory", ends)
    _label_rows(axis, [shorten_name(name) for name, _ in peaks], [*ends, *limits])
    axis.set(xlabel="peak memory (MiB)")


def _draw_sizes(axis: Any, report: Report, names: Sequence[str]) -> None:
    """Draw the file size of each artifact, split by what its bytes are for if the bundle says so."""
    sizes = {row.artifact: row.size_bytes for row in report.rows}
    parts = report.split_sizes
    in_legend: set[str] = set()
    for y, (name, size) in enumerate(sizes.items()):
        offset = 0.0
        split = {p: getattr(parts[name], p) for p in _PARTS} if name in parts else {"not split": size}
        for part, value in split.items():
            colour = GREY if part in ("other", "not split") else PALETTE[_PARTS.index(part)]
            label = part if part not in in_legend and value else None
            in_legend.update((part,) if value else ())
            axis.barh(y, value / _MIB, 0.56, left=offset, color=colour, label=label)
            offset += value / _MIB
        axis.annotate(format_bytes(size), (offset, y), (4, 0), **_VALUE_LABEL)
    ends = [size / _MIB for size in sizes.values()]
    _label_rows(axis, [shorten_name(name) for name in names], [*ends, *_draw_limits(axis, report, "size", ends)])
    axis.set(xlabel="size (MiB)" if parts else "size (MiB); the bundle does not record its parts")
    if parts:
        spacing = {"columnspacing": 1, "handlelength": 1, "borderaxespad": 1.7}
        axis.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), **spacing)


def _draw_limits(axis: Any, report: Report, check: str, ends: Sequence[float]) -> list[float]:
    """Draw a dashed line per limit of ``check`` and return the drawn limits; a far limit is only named."""
    drawn: list[float] = []
    scale, largest = 1 if check == "latency" else _MIB, max(ends, default=0.0)
    for limit in sorted({c.limit / scale for c in report.verdict.checks if c.name == check}):
        text = f"limit {format_milliseconds(limit) + ' ms' if check == 'latency' else format_bytes(limit * scale)}"
        place: Any = {"xy": (limit, 1), "xycoords": ("data", "axes fraction")}
        if largest and limit > _FAR_LIMIT * largest:
            text = f"{text} (to the right)"
            place = {"xy": (1, 1), "xycoords": "axes fraction"}
        else:
            axis.axvline(limit, color=RED, linestyle="--", linewidth=1.2)
            drawn.append(limit)
        offset: Any = {"xytext": (2, 3), "textcoords": "offset points"}
        axis.annotate(text, **place, **offset, ha="right", va="bottom", fontsize=8, color=RED)
    return drawn


def _draw_candidates(
    axis: Any, choice: Choice, colours: Mapping[str, str], candidates: Sequence[RankedCandidate]
) -> None:
    """Draw score over latency: a bubble per candidate, as large as its file; the front and the pick are numbered.

    Hollow and dashed: the latency is an estimate. Pale: not feasible. A lower perplexity is drawn higher. Bars are the
    range of the latency and the interval of the score, which the axes show whole.
    """
    legend = ["ms per call (p50)"]
    scale = 260 / (max(c.size_bytes for c in choice.candidates) or 1)
    for rank, row in enumerate(candidates):
        c, area = row.candidate, 40 + scale * row.candidate.size_bytes
        colour = colours.get(c.artifact, GREY)
        low, high = c.low_ms or c.latency_ms, c.high_ms or c.latency_ms
        bars: dict[str, Any] = {"color": colour, "linewidth": 1, "alpha": 0.75 if c.feasible else 0.25, "zorder": 1}
        axis.plot([low, high], [c.score, c.score], **bars)
        if c.score_low is not None and c.score_high is not None:
            axis.plot([c.latency_ms, c.latency_ms], [c.score_low, c.score_high], **bars)
        style = {"facecolor": colour, "linewidth": 1}
        if c.latency_status == "estimated":
            style = {"facecolor": "none", "linewidth": 1.5, "linestyle": _DASHED}
        axis.scatter(c.latency_ms, c.score, s=area, edgecolor=colour, alpha=0.75 if c.feasible else 0.25, **style)
        if row.is_pick:
            axis.scatter(c.latency_ms, c.score, s=area + 220, facecolor="none", edgecolor=INK, linewidth=1.4)
        if c.on_front or row.is_pick:
            # Alternate above and below, and near and far: neighbours are often close.
            lift = (area**0.5 / 2 + 6 + 11 * (rank % 4 // 2)) * (-1 if rank % 2 else 1)
            place: Any = {"textcoords": "offset points", "ha": "center", "va": "top" if lift < 0 else "bottom"}
            axis.annotate(str(row.number), (c.latency_ms, c.score), (0, lift), fontsize=8, color=INK, **place)
            threads = f", {format_threads(c.threads)}" if c.threads is not None else ""
            about = f" {ABOUT}" if c.latency_status == "estimated" else ""
            remark = f"{'' if c.feasible else ' (not feasible)'}{' ← pick' if row.is_pick else ''}"
            legend.append(f"{row.number}  {shorten_name(c.artifact)}{threads}{about}{remark}")
    front = sorted((r.candidate.latency_ms or 0, r.candidate.score or 0) for r in candidates if r.candidate.on_front)
    axis.plot([x for x, _ in front], [y for _, y in front], color=GREY, linewidth=1, linestyle=":", zorder=0)
    if choice.bound is not None:
        axis.axhline(choice.bound, color=GREY, linewidth=1, linestyle="--")
        bound: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axis.annotate(f"bound: {choice.bound:g}", (0, choice.bound), (3, 3), fontsize=8, color=GREY, **bound)
    metric = metric_named(choice.metric)
    direction = metric.evaluated_on if metric.higher_is_better else "lower is better, upwards"
    axis.set(xlabel=literal("\n".join(legend)), ylabel=f"{choice.metric} ({direction})")
    axis.grid(color=FAINT, linewidth=0.8)
    axis.margins(0.2)
    if not metric.higher_is_better:
        axis.invert_yaxis()


def _draw_estimate(
    axis: Any, y: float, low: float | None, middle: float, high: float | None, colour: str
) -> tuple[float, float]:
    """Draw a hatched bar over the range and mark its middle. Return the ends."""
    low, high = low or middle, high or middle
    style: dict[str, Any] = {"facecolor": "none", "hatch": "////", "linestyle": _DASHED, "linewidth": 1}
    axis.barh(y, high - low, 0.56, left=low, edgecolor=colour, **style)
    axis.plot([middle, middle], [y - 0.28, y + 0.28], color=INK, linewidth=1.4, linestyle=(0, (2, 1)))
    return low, high


def _label_rows(axis: Any, names: Sequence[str], ends: Sequence[float] | None) -> None:
    """Label the rows, and start the axis at 0 with space on the right for labels of bars; ``ends`` None: keep it."""
    if ends is not None:
        axis.set_xlim(0, 1.25 * max(ends, default=1.0) or 1.0)
    axis.set_yticks(range(len(names)), [literal(name) for name in names], fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)


PICTURES = {
    "latency": Picture(
        "latency", "Latency",
        "Times of single calls. Line: minimum to maximum; pale bar: 5th to 95th percentile; solid bar: quartiles; gap: "
        "median.",
        "no time was measured", 0.9, 0.27, _draw_times,
    ),
    "estimates": Picture(
        "estimates", "Estimated latency",
        "Not measured. Bar: the range of the estimate; mark: its middle.",
        "nothing was estimated", 1.0, 0.27, _draw_times,
    ),
    "memory": Picture(
        "memory", "Memory against the budget",
        "Peak memory that an artifact adds to a process, at its largest shape. Solid: measured on this host; hatched: "
        "estimated for the device.",
        "no memory was measured or estimated", 1.1, 0.3, _draw_memory,
    ),
    "sizes": Picture(
        "sizes", "Parts of the files",
        "Bytes of embeddings, layers (a shared block once), heads and the rest.",
        "the report has no artifacts", 1.1, 0.3, _draw_sizes,
    ),
    "search": Picture(
        "search", "Score against latency",
        "Bubble: size of the file; bars: range of an estimated or unstable time, 95% interval of the score; dotted "
        "line: Pareto front; numbers: see the list below.",
        "no candidate has a score and a time", 3.7, 0.16, _draw_candidates,
    ),
}  # fmt: skip
