"""The verdict on a claim: its rule applied to our figures and the published ones, and why in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import stdev
from typing import Literal

from scipy.stats import t as student

from benchmarks.claims.figures import Finder, Found
from benchmarks.claims.schema import Claim, Direction, Number, Published, Reached, Result, Rule, Untestable, Within
from benchmarks.claims.tables import NotThere
from edgeformer.artifacts.errors import InputError


def judge(claim: Claim, finder: Finder) -> Result:
    """Find our figures and apply the rule. Raises InputError where a pointer leads nowhere."""
    values, missing = find_all(claim, finder)
    result = _judged(claim, finder, values, missing)
    remarks = dict.fromkeys(remark for figure in values.values() for remark in figure.remarks)
    return result.model_copy(update={"why": "; ".join([result.why, *remarks])}) if result.ours else result


def _judged(claim: Claim, finder: Finder, values: Mapping[str, Found], missing: str) -> Result:
    ours = {name: rounded(figure.value) for name, figure in values.items()}
    origin = sorted({place for figure in values.values() for place in figure.origin})
    if isinstance(claim.rule, Untestable):
        return Result(ours=ours, origin=origin, verdict="not testable as published", why=claim.rule.because)
    if missing and claim.without:
        return Result(ours={}, origin=[], verdict="not testable as published", why=claim.without)
    if missing:
        return Result(ours={}, origin=[], verdict="not tested yet", why=missing)
    if isinstance(claim.rule, Direction) and claim.rule.noise == "seeds":
        noise = {name: seed_noise(name, figure) for name, figure in values.items()}
        rule = claim.rule.model_copy(update={"noise": noise, "published": claim.rule.published_noise})
        return _compared(claim.model_copy(update={"rule": rule}), ours, origin).model_copy(update={"noise": noise})
    return _compared(claim, ours, origin)


def seed_noise(name: str, figure: Found) -> float:
    """Return half the width of the 95% interval of a mean over seeds, by Student's t. Raises InputError: one seed."""
    if not figure.seeds:
        raise InputError(f"{name}: rule.noise is seeds, but no cell of {', '.join(figure.origin)} has several")
    count = len(figure.seeds)
    return float(f"{student.ppf(0.975, count - 1) * stdev(figure.seeds) / count**0.5:.3g}")


def _compared(claim: Claim, ours: dict[str, Number], origin: list[str]) -> Result:
    """The verdict on figures that are all there. Those whose published difference is noise decide nothing."""
    noise = [name for name in ours if shows_nothing(claim.rule, name, claim.published[name])]
    too_small = f"{_named(noise, ours)}the published difference is itself within two standard errors" if noise else ""
    if noise and len(noise) == len(ours):
        why = f"{too_small}, {amounts(claim.rule.published_noise)}" if isinstance(claim.rule, Direction) else too_small
        return Result(ours=ours, origin=origin, verdict="not testable as published", why=why)
    faults = {name: fault(claim.rule, name, ours[name], claim.published[name]) for name in ours if name not in noise}
    failed = [f"{_named([name], ours)}{reason}" for name, reason in faults.items() if reason]
    why = f"{', '.join(failed)}; the rule: {asked(claim.rule)}" if failed else asked(claim.rule)
    why = f"{why}; {too_small}" if noise else why
    return Result(ours=ours, origin=origin, verdict="not reproduced" if failed else "reproduced", why=why)


def _named(names: list[str], ours: dict[str, Number]) -> str:
    return f"{', '.join(names)}: " if len(ours) > 1 else ""


def find_all(claim: Claim, finder: Finder) -> tuple[dict[str, Found], str]:
    """Figure → what was found, and why the others are missing."""
    values: dict[str, Found] = {}
    missing: list[str] = []
    for name in claim.published if claim.ours is not None else ():
        try:
            values[name] = finder.find(claim.ours, name)  # type: ignore[arg-type]
        except NotThere as reason:
            missing.append(str(reason))
    return values, "; ".join(dict.fromkeys(missing))


def ends(published: Published) -> tuple[Number, Number]:
    """A range; of a single figure, the figure twice."""
    return (published[0], published[1]) if isinstance(published, list) else (published, published)


def of_figure(amount: float | dict[str, float] | Literal["seeds"], name: str) -> float:
    """A rule's amount for one figure. Raises TypeError for "seeds", for which amounts must have been put in."""
    if isinstance(amount, str):
        raise TypeError(amount)
    return amount[name] if isinstance(amount, dict) else amount


def shows_nothing(rule: Rule, name: str, published: Published) -> bool:
    """Whether a published difference is no larger than its own noise."""
    return isinstance(rule, Direction) and abs(ends(published)[0]) <= of_figure(rule.published_noise, name)


def fault(rule: Rule, name: str, ours: Number, published: Published) -> str:
    """Why ours does not support what is published; empty: it does."""
    low, high = ends(published)
    match rule:
        case Within(absolute=absolute, share=share):
            limit = of_figure(absolute, name)
            below, above = ours < low - max(limit, share * abs(low)), ours > high + max(limit, share * abs(high))
            return "is lower" if below else "is higher" if above else ""
        case Reached(absolute=absolute, lower=True):
            return "is higher" if ours > high + absolute else ""
        case Reached(absolute=absolute):
            return "is lower" if ours < low - absolute else ""
        case Direction(noise=noise):
            if abs(ours) <= of_figure(noise, name):
                return "is within the noise"
            return "" if (ours > 0) == (low > 0) else "has the other sign"
    raise TypeError(rule)


def asked(rule: Rule) -> str:
    """What the rule asks of ours, seen from the published figure: ``within 0.005 of it``."""
    match rule:
        case Within(absolute=absolute, share=share) if absolute or share:
            return f"within {amounts(absolute)} of it" if absolute else f"within {100 * share:g}% of it"
        case Within():
            return "exactly that"
        case Reached(absolute=absolute, lower=lower):
            return f"at {'most' if lower else 'least'} that" + (
                f", give or take {figure(absolute)}" if absolute else ""
            )
        case Direction(noise=noise):
            return "of the same sign" + (f", beyond the noise of {amounts(noise)}" if noise else "")
    raise TypeError(rule)


def amounts(parameters: float | dict[str, float] | Literal["seeds"]) -> str:
    """One for all figures, or that of each: figures that share one stand together."""
    if isinstance(parameters, str):
        return parameters
    if not isinstance(parameters, dict):
        return figure(parameters)
    if len(parameters) == 1:
        return figure(*parameters.values())
    alike: dict[float, list[str]] = {}
    for name, amount in parameters.items():
        alike.setdefault(amount, []).append(name)
    return " and ".join(f"{figure(amount)} ({', '.join(names)})" for amount, names in alike.items())


def rounded(value: Number) -> Number:
    """Six significant digits, so that the same figures give the same file on every machine; counts stay exact."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def figure(value: Number) -> str:
    """Return the published value with all its digits, thousands separated."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def judge_all(claims: Mapping[str, Claim], finder: Finder) -> dict[str, Claim]:
    """Every claim with its result."""
    return {name: claim.model_copy(update={"result": judge(claim, finder)}) for name, claim in claims.items()}
