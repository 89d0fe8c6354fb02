"""When each claim's rule, source and figure took their present form: benchmarks/claims/history.json.

``python -m benchmarks.claims --history`` reads the commits of docs/claims.yaml on the first-parent line, and what is
not committed yet. Everything else reads the file, because a clone may have no history.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.claims.schema import Claims
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import InputError

HISTORY = Path(__file__).with_name("history.json")
COMPLETE = "f3f87f3b"
"""First commit in which every claim had a verdict."""
Age = Literal["older", "same", "younger"]
Content = Mapping[str, Any]
"""What docs/claims.yaml of a commit holds."""


class Part(Frozen):
    """Digest of a rule, source or figure, and the place in ``History.commits`` of the commit that wrote it."""

    digest: str
    place: int


class Origin(Frozen):
    """Origin of a claim's present form. ``first``: place of the commit that first had any figure of ours."""

    rule: Part
    source: Part
    figure: Part | None = None
    first: int | None = None

    @property
    def age(self) -> Age | None:
        """How old the rule is, compared with the figure; None: there is no figure."""
        if self.figure is None:
            return None
        difference = self.rule.place - self.figure.place
        return "older" if difference < 0 else "younger" if difference else "same"


class Changes(Frozen):
    """How many claims of a commit have changed since: rules, also those only reworded, sources, verdicts."""

    commit: str
    date: str
    claims: int
    rules: int
    reworded: int
    sources: int
    verdicts: int
    rules_and_verdicts: int


class History(Frozen):
    """Commits [hash, date], oldest first; a hash is empty for what is not committed yet."""

    commits: list[list[str]]
    changes: Changes
    claims: dict[str, Origin]

    def origins(self, claims: Claims) -> dict[str, Origin]:
        """Return the origin of each claim as it is now; what differs from the file is younger than all its commits."""
        return advanced(self.claims, claims.model_dump(mode="json", exclude_defaults=True), len(self.commits))

    def commit(self, part: Part) -> str:
        """Return the abbreviated hash of the commit that wrote a part; ``uncommitted``: none has."""
        return (self.commits[part.place][0] if part.place < len(self.commits) else "") or "uncommitted"


def parts(content: Content, name: str) -> dict[str, str | None]:
    """Return the digests of a claim's rule, source and figure. The words of a rule do not count; its numbers do."""
    claim = content["claims"][name]
    rule = {key: value for key, value in claim["rule"].items() if key != "because"}
    figure = (claim.get("result") or {}).get("ours")
    return {
        "rule": digest([rule, claim["published"]]),
        "source": digest(expanded(claim.get("ours"), content["sources"])),
        "figure": digest(figure) if figure else None,
    }


def digest(value: Any) -> str:
    """Return a short digest that depends on the numbers, not on whether one is written 1 or 1.0."""
    text = json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def expanded(source: Any, sources: Mapping[str, Any]) -> Any:
    """Return a source with the definitions of the named sources that it uses, without default values."""
    if isinstance(source, str):
        return [expanded(part, sources) for part in sources[source]]
    if isinstance(source, Mapping):
        kept = {key: value for key, value in source.items() if value not in (False, "", ())}
        return {**kept, "of": {key: expanded(part, sources) for key, part in source.get("of", {}).items()}}
    return source


def advanced(before: Mapping[str, Origin], content: Content, place: int) -> dict[str, Origin]:
    """Return the origins of the claims of a version, from those of the version before it."""
    origins = {}
    for name in content["claims"]:
        earlier, parts_now = before.get(name), parts(content, name)
        origin: dict[str, Any] = {}
        for key, value in parts_now.items():
            previous = getattr(earlier, key, None)
            same = previous is not None and previous.digest == value
            origin[key] = previous if same else value and Part(digest=value, place=place)
        first = earlier.first if earlier is not None and earlier.first is not None else origin["figure"] and place
        origins[name] = Origin(**origin, first=first)
    return origins


def trace(versions: Sequence[Content]) -> dict[str, Origin]:
    """Return the origin of every claim of the last version; places count in ``versions``, oldest first."""
    origins: dict[str, Origin] = {}
    for place, content in enumerate(versions):
        origins = advanced(origins, content, place)
    return origins


def changed(start: Content, end: Content, commit: str, date: str) -> Changes:
    """Count what differs between two versions, of the claims that both have."""
    names = [name for name in start["claims"] if name in end["claims"]]
    pairs = {name: [content["claims"][name] for content in (start, end)] for name in names}
    digests = {name: [parts(content, name) for content in (start, end)] for name in names}
    rules = {name for name, (old, new) in pairs.items() if old["rule"] != new["rule"]}
    verdicts = {name for name, (old, new) in pairs.items() if old["result"]["verdict"] != new["result"]["verdict"]}
    return Changes(
        commit=commit, date=date, claims=len(names), rules=len(rules),
        reworded=sum(digests[name][0]["rule"] == digests[name][1]["rule"] for name in rules),
        sources=sum(old["source"] != new["source"] for old, new in digests.values()), verdicts=len(verdicts),
        rules_and_verdicts=len(rules & verdicts),
    )  # fmt: skip


def derive(path: Path) -> History:
    """Read the history of docs/claims.yaml from git. Raises InputError: git has none, or only a part."""
    root = path.resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    relative = path.resolve().relative_to(root).as_posix()
    try:
        listed = git("log", "--first-parent", "-m", "--reverse", "--format=%H %cs", "--", relative).split("\n")
        commits = [line.split() for line in listed if line]
        versions = [yaml.load(git("show", f"{commit}:{relative}"), _LOADER) for commit, _ in commits]
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"--history: {root} has no history that git reads ({error}); run it in a full clone") from None
    places = [place for place, (commit, _) in enumerate(commits) if commit.startswith(COMPLETE)]
    if not places:
        raise InputError(f"--history: {root} does not have commit {COMPLETE}; fetch it with git fetch --unshallow")
    now = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    if now != versions[-1]:
        commits.append(["", ""])
        versions.append(now)
    commit, date = commits[places[0]]
    return History(
        commits=[[name[:8], day] for name, day in commits],
        changes=changed(versions[places[0]], now, commit[:8], date),
        claims=trace(versions),
    )


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_history() -> History:
    """Read the stored history."""
    return History.model_validate_json(HISTORY.read_text(encoding="utf-8"), strict=False)


def write_history(path: Path) -> None:
    """Derive the history of docs/claims.yaml and store it, a claim a line."""
    history = derive(path).model_dump(mode="json", exclude_none=True)
    claims = ",\n".join(f'  "{name}": {json.dumps(origin)}' for name, origin in history.pop("claims").items())
    head = json.dumps(history)[:-1]
    HISTORY.write_text(f'{head},\n "claims": {{\n{claims}\n}}}}\n', encoding="utf-8")
