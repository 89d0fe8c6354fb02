"""The parts of a page, each copied into its folder and described: graphs, what reads text, golden inputs, libraries."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files as package_files
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from tokenizers import Tokenizer

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import replacing_folder, write_json, write_text
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.artifacts.page import (
    SITE_FILE,
    LeftOut,
    PageArtifact,
    PageFile,
    PageManifest,
    PageProvider,
    PageReader,
    PageWeights,
)
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.report import (
    DRIFT_FEWEST_CALLS,
    DRIFT_PART_CALLS,
    DRIFT_PARTS,
    NOISY_CV,
    PERCENTILE_NEEDS,
    QUANTILES,
    MeasureRules,
    Subject,
    SubjectArtifact,
)
from edgeformer.artifacts.units import visible
from edgeformer.artifacts.workspace import REMEDY, TOKENIZER_FILE, read_manifest
from edgeformer.bundle import Bundle
from edgeformer.runtimes import provider_facts
from edgeformer.runtimes.web.libraries import TOKENIZER_LIBRARY, LibraryFile, WebRuntime, find_local, runtimes_named
from edgeformer.system.host import code_version, now
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import claiming
from edgeformer.tasks.task import longest_call
from edgeformer.tasks.text_answers import reads_pairs

_MODEL, _LIBRARIES = "model", "libraries"
_TOKENIZER_CONFIG, _GOLDEN = "tokenizer_config.json", "golden.json"
_IDS, _MASK = "input_ids", "attention_mask"


def can_publish(artifact: ArtifactManifest) -> str | None:
    """Why a browser cannot run an artifact in one call; None: it can."""
    if artifact.status != "built" or artifact.file is None:
        return f"{artifact.status}: {artifact.reason or 'no reason given'}"
    if not artifact.is_graph:
        return f"browsers run ONNX graphs, no {artifact.format}"
    if artifact.role not in ("full", "exit"):
        return "it is run in several calls, which pages do not do"
    if unknown := set(artifact.inputs) - {_IDS, _MASK}:
        return f"it takes {', '.join(sorted(unknown))}, which no text gives it"
    return None


class PageFolder:
    """A page that is being written.

    Args:
        folder: its own.
        bundle: that its models are from.
        libraries: folder with npm packages; None: the page gets the libraries from a CDN.
    """

    def __init__(self, folder: Path, bundle: Bundle, libraries: Path | None) -> None:
        self.folder = folder
        self.bundle = bundle
        self._libraries = libraries
        self.versions: dict[str, str] = {}

    def artifact(self, artifact: ArtifactManifest) -> PageArtifact:
        """Copy an artifact's graph and the weights beside it. Raises ArtifactError for a damaged bundle."""
        self.bundle.check(artifact)
        assert artifact.file is not None and artifact.role in ("full", "exit")
        beside = sorted(external_files(self.bundle.contents.path(artifact.file)))
        folder = PurePosixPath(artifact.file).parent
        return PageArtifact(
            id=artifact.id,
            precision=artifact.precision,
            role=artifact.role,
            exit=artifact.exit,
            size_bytes=artifact.size_bytes or 0,
            graph=self._copy(artifact.file),
            weights=tuple(PageWeights(name=name, file=self._copy(str(folder / name))) for name in beside),
            masked=_MASK in artifact.inputs or not artifact.inputs,
            reader=artifact.companions,
        )

    def reader(self, artifact: ArtifactManifest, *, answers: bool) -> PageReader:
        """Copy what an artifact reads text with, and its golden inputs. Raises ArtifactError for a damaged bundle.

        Args:
            artifact: those with a trimmed vocabulary have a tokenizer of their own.
            answers: whether the page answers texts; else golden inputs are all that it needs.
        """
        where = "" if artifact.companions == "." else f"{artifact.companions}/"
        rows = [row.tolist() for row in self.bundle.golden(artifact).texts()]
        golden = self._write(f"{_MODEL}/{where}{_GOLDEN}", json.dumps({"rows": rows}).encode())
        longest = self.bundle.data.tokens_at_once
        if not answers:
            return PageReader(golden=golden, max_tokens=longest)
        tokenizer = self.bundle.reader(artifact).tokenizer
        config = f"{where}{_TOKENIZER_CONFIG}"
        listed = config in self.bundle.contents.checksums
        return PageReader(
            tokenizer=self._copy(f"{where}{TOKENIZER_FILE}"),
            config=self._copy(config) if listed else self._write(f"{_MODEL}/{config}", b"{}"),
            golden=golden,
            max_tokens=longest,
            suffix=_suffix(tokenizer),
        )

    def library(self, wanted: LibraryFile) -> PageFile:
        """A library's file: copied, or its address. Raises InputError where the folder has none."""
        name = wanted.package.name
        if self._libraries is None:
            self.versions[name] = wanted.package.version
            return PageFile(url=wanted.address, integrity=wanted.integrity, size_bytes=wanted.size_bytes)
        found = find_local(self._libraries, wanted)
        self.versions[name] = found.version or "unknown"
        path = f"{_LIBRARIES}/{name.replace('@', '').replace('/', '-')}/{PurePosixPath(wanted.path).name}"
        return self._write(path, found.content, found.integrity)

    def _copy(self, name: str) -> PageFile:
        """A file of the bundle, after it was compared with the manifest; its checksum there is the page's, too."""
        content = self.bundle.contents.intact(name, f"the page needs {name}").read_bytes()
        sha256 = hashlib.sha256(content)
        if sha256.hexdigest() != self.bundle.contents.checksums[name]:
            raise ArtifactError(f"{self.bundle.folder / name}: changed while it was copied; {REMEDY}")
        return self._write(f"{_MODEL}/{name}", content, f"sha256-{base64.b64encode(sha256.digest()).decode()}")

    def _write(self, name: str, content: bytes, integrity: str | None = None) -> PageFile:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        own = f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
        return PageFile(url=quote(name), integrity=integrity or own, size_bytes=len(content))


def _suffix(tokenizer: Tokenizer) -> int:
    """Special tokens that the tokenizer puts behind every text."""
    special = tokenizer.encode("a").special_tokens_mask
    return next((number for number, one in enumerate(reversed(special)) if not one), 0)


# From a bundle to a static folder: models, tokenizer, libraries, and a page that runs and measures them.


_PACKAGE = "edgeformer.web"
_SITE = "site"
_TEMPLATE = "index.html"
# Threads need a page that no other can look into; hosts that read this file (Netlify, Cloudflare Pages) send them.
_HEADERS = "/*\n  Cross-Origin-Opener-Policy: same-origin\n  Cross-Origin-Embedder-Policy: require-corp\n"
DEFAULT_SHAPES = ((1, 16), (1, 128))


@dataclass(frozen=True)
class PageOptions:
    """What a caller may ask for.

    Attributes:
        libraries: folder with the npm packages of the libraries; None: the page gets them from a CDN.
        artifacts: ids to publish; empty: all that a browser can run.
        providers: what shall compute, as ONNX Runtime calls it in a browser; empty: everything.
        shapes: batch size and tokens that the page offers to measure at; empty: the usual ones.
        allow_leak: also publish a language model that looks ahead; the page says so.
    """

    libraries: Path | None = None
    artifacts: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    allow_leak: bool = False


def publish(
    bundle: Bundle, output: Path, options: PageOptions, artifact: str | None = None, progress: Progress = SILENT
) -> PageManifest:
    """Write the page of a bundle. A page that is there already is replaced as a whole, anything else is left alone.

    Args:
        bundle: whose files are compared with its manifest before they are copied.
        output: the page's folder.
        options: what to put into it.
        artifact: the one that the RUN argument itself names.
        progress: where to say what is going on.

    Raises:
        InputError: the folder holds something else; nothing in the bundle runs in a browser; a library is not in the
            folder; a shape that the model cannot take.
        ArtifactError: a file of the bundle is missing or changed.
        OSError: it cannot be written.
    """
    output = output.resolve()  # "." has no name, which its temporary neighbours would need
    _require_free(output)
    chosen, left_out = _choose(bundle, options, artifact)
    shapes = _shapes(bundle, options)
    with claiming(output):
        remove_leftovers(output)
        with replacing_folder(output) as temporary:
            manifest = _fill(PageFolder(temporary, bundle, options.libraries), chosen, options, shapes)
            manifest = manifest.model_copy(update={"left_out": left_out})
            write_json(temporary / SITE_FILE, manifest)
            _write_page(temporary, manifest)
    for left in left_out:
        progress.message(f"{left.artifact}: not in the page: {left.reason}")
    return manifest


def _require_free(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / SITE_FILE).is_file():
        raise InputError(f"-o {folder}: is there already, and is no page of edgeformer; choose another folder")
    try:
        read_manifest(PageManifest, folder / SITE_FILE)
    except ArtifactError as error:
        raise InputError(f"-o {folder}: its {SITE_FILE} is of no page ({error}); choose another folder") from None


def _choose(
    bundle: Bundle, options: PageOptions, artifact: str | None
) -> tuple[tuple[ArtifactManifest, ...], tuple[LeftOut, ...]]:
    """The artifacts of the page, and why others are not in it."""
    if not bundle.task.reads_text:
        raise InputError(f"{bundle.name}: is a {bundle.task.noun}; a page is for models that read text")
    if bundle.leaks and not options.allow_leak:
        raise InputError(
            f"{bundle.name!r} leaks future tokens: it sees what it is asked to predict, so its scores are void; make a "
            "page of it all the same, marked as leaking, with --allow-leak"
        )
    asked = options.artifacts or ((artifact,) if artifact is not None else ())
    wanted = [bundle.artifact(name) for name in dict.fromkeys(asked)] or list(bundle.artifacts)
    reasons = {one.id: can_publish(one) for one in wanted}
    if asked and (refused := [(name, reason) for name, reason in reasons.items() if reason is not None]):
        raise InputError(f"--artifact {refused[0][0]}: cannot be in a page: {refused[0][1]}")
    chosen = tuple(one for one in wanted if reasons[one.id] is None)
    if not chosen:
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "its bundle has no artifacts"
        raise InputError(f"{bundle.name}: nothing of it runs in a browser: {said}")
    return chosen, tuple(LeftOut(artifact=name, reason=reason) for name, reason in reasons.items() if reason)


def _shapes(bundle: Bundle, options: PageOptions) -> tuple[tuple[int, int], ...]:
    longest = bundle.manifest.max_positions
    for _, seq in options.shapes:
        if longest is not None and seq > longest:
            raise InputError(f"--seq {seq}: {bundle.name!r} takes at most {longest} tokens; ask for less")
    judged = longest_call(bundle.task, longest, bundle.manifest.max_length)  # profile REPORT.json looks for that shape
    usual = ((batch, min(seq, judged or seq)) for batch, seq in DEFAULT_SHAPES)
    return options.shapes or tuple(dict.fromkeys(usual))


def _fill(
    page: PageFolder,
    chosen: tuple[ArtifactManifest, ...],
    options: PageOptions,
    shapes: tuple[tuple[int, int], ...],
) -> PageManifest:
    """Copy what the page needs, and say what it is."""
    bundle = page.bundle
    manifest, task = bundle.manifest, bundle.task
    answers = task.predicts == "labels"
    limits: Any = task.answer_config(bundle.data).get("thresholds")
    artifacts = tuple(page.artifact(one) for one in chosen)
    known = {one.id: SubjectArtifact(role=one.role, sha256=one.sha256) for one in chosen}
    return PageManifest(
        run=manifest.run,
        noun=task.noun,
        parameters=manifest.parameters,
        created=now(),
        code_version=code_version(),
        bundle=manifest.manifest_sha256 or bundle.name,
        synthetic=manifest.synthetic,
        leaks=manifest.leaks,
        cautions=tuple(cautions(manifest)),
        labels=manifest.labels if answers else None,
        thresholds=limits if answers else None,
        pairs=reads_pairs(task, bundle.data) is True,
        silent=None if answers else f"the page measures a {task.noun}, and answers no texts with it",
        readers={one.companions: page.reader(one, answers=answers) for one in chosen},
        artifacts=artifacts,
        providers=tuple(_provider(page, runtime) for runtime in runtimes_named(options.providers)),
        tokenizers=page.library(TOKENIZER_LIBRARY) if answers else None,
        versions=page.versions,
        offline=options.libraries is not None,
        shapes=shapes,
        max_positions=manifest.max_positions,
        rules=_rules(),
        subject=Subject(
            task=task.name,
            max_positions=manifest.max_positions,
            max_length=manifest.max_length,
            artifacts=known,
            manifest_sha256=manifest.manifest_sha256,
        ),
    )


def _provider(page: PageFolder, runtime: WebRuntime) -> PageProvider:
    """Copy the libraries of a runtime."""
    facts = provider_facts(runtime.provider)
    return PageProvider(
        name=runtime.provider,
        label=runtime.label,
        short=facts.label,
        script=page.library(runtime.script),
        glue=page.library(runtime.glue),
        binary=page.library(runtime.binary),
        counts_threads=facts.counts_threads,
    )


def _rules() -> dict[str, object]:
    """Every number of the rules, so that the page has none of its own."""
    usual, strict = asdict(MeasureRules()), asdict(MeasureRules.strict())
    return {
        **usual,
        "strict": {name: value for name, value in strict.items() if value != usual[name]},
        "percentile_needs": {str(percentile): needed for percentile, needed in PERCENTILE_NEEDS.items()},
        "noisy_cv": NOISY_CV,
        "quantiles": QUANTILES,
        "drift_parts": DRIFT_PARTS,
        "drift_part_calls": DRIFT_PART_CALLS,
        "drift_fewest_calls": DRIFT_FEWEST_CALLS,
    }


def _write_page(folder: Path, manifest: PageManifest) -> None:
    """The page itself: HTML, CSS, and one JavaScript module per job, as they lie in the package."""
    for asset in package_files(_PACKAGE).joinpath(_SITE).iterdir():
        if asset.name != _TEMPLATE and asset.name.endswith((".js", ".css")):
            (folder / asset.name).write_bytes(asset.read_bytes())
    environment = Environment(
        loader=PackageLoader(_PACKAGE, _SITE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    hosts = " ".join(dict.fromkeys(_hosts(manifest)))
    page = environment.get_template(_TEMPLATE).render(title=visible(manifest.run), noun=manifest.noun, hosts=hosts)
    write_text(folder / _TEMPLATE, page)
    write_text(folder / "_headers", _HEADERS)


def _hosts(manifest: PageManifest) -> Iterator[str]:
    """Where the page may download from, beside its own folder."""
    libraries = [file for one in manifest.providers for file in (one.script, one.glue, one.binary)]
    for file in (*libraries, *filter(None, [manifest.tokenizers])):
        address = urlsplit(file.url)
        if address.netloc:
            yield f"{address.scheme}://{address.netloc}"
