"""The verdict on a claim: its rule applied to our figures and the published ones, and why in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.claims.figures import Finder, Found
from benchmarks.claims.schema import Claim, Direction, Number, Published, Reached, Result, Rule, Untestable, Within
from benchmarks.claims.tables import NotThere


def judge(claim: Claim, finder: Finder) -> Result:
    """Find our figures and apply the rule. Raises InputError where a pointer leads nowhere."""
    found, missing = find_all(claim, finder)
    ours = {name: rounded(figure.value) for name, figure in found.items()}
    origin = sorted({place for figure in found.values() for place in figure.origin})
    if isinstance(claim.rule, Untestable):
        return Result(ours=ours, origin=origin, verdict="not testable as published", why=claim.rule.because)
    if missing and claim.without:
        return Result(ours={}, origin=[], verdict="not testable as published", why=claim.without)
    if missing:
        return Result(ours={}, origin=[], verdict="not tested yet", why=missing)
    failed = [name for name, value in ours.items() if not holds(claim.rule, value, claim.published[name])]
    names = f"{', '.join(failed)}: " if failed and len(ours) > 1 else ""
    why = f"{names}not {asked(claim.rule)}" if failed else asked(claim.rule)
    return Result(ours=ours, origin=origin, verdict="not reproduced" if failed else "reproduced", why=why)


def find_all(claim: Claim, finder: Finder) -> tuple[dict[str, Found], str]:
    """Figure → what was found, and why the others are missing."""
    found: dict[str, Found] = {}
    missing: list[str] = []
    for name in claim.published if claim.ours is not None else ():
        try:
            found[name] = finder.find(claim.ours, name)  # type: ignore[arg-type]
        except NotThere as reason:
            missing.append(str(reason))
    return found, "; ".join(dict.fromkeys(missing))


def ends(published: Published) -> tuple[Number, Number]:
    """A range; of a single figure, the figure twice."""
    return (published[0], published[1]) if isinstance(published, list) else (published, published)


def holds(rule: Rule, ours: Number, published: Published) -> bool:
    """Whether ours supports what is published."""
    low, high = ends(published)
    match rule:
        case Within(absolute=absolute, share=share):
            return low - max(absolute, share * abs(low)) <= ours <= high + max(absolute, share * abs(high))
        case Reached(absolute=absolute, lower=True):
            return ours <= high + absolute
        case Reached(absolute=absolute):
            return ours >= low - absolute
        case Direction(noise=noise):
            return abs(ours) > noise and (ours > 0) == (low > 0)
    raise TypeError(rule)


def asked(rule: Rule) -> str:
    """What the rule asks of ours, seen from the published figure: ``within 0.005 of it``."""
    match rule:
        case Within(absolute=absolute, share=share) if absolute or share:
            return f"within {figure(absolute)} of it" if absolute else f"within {100 * share:g} % of it"
        case Within():
            return "exactly that"
        case Reached(absolute=absolute, lower=lower):
            return f"at {'most' if lower else 'least'} that" + (
                f", give or take {figure(absolute)}" if absolute else ""
            )
        case Direction(noise=noise):
            return "of the same sign" + (f", beyond the noise of {figure(noise)}" if noise else "")
    raise TypeError(rule)


def rounded(value: Number) -> Number:
    """Six significant digits, so that the same figures give the same file on every machine; counts stay exact."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def figure(value: Number) -> str:
    """As it was published: all its digits, thousands separated."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def judge_all(claims: Mapping[str, Claim], finder: Finder) -> dict[str, Claim]:
    """Every claim with its result."""
    return {name: claim.model_copy(update={"result": judge(claim, finder)}) for name, claim in claims.items()}
