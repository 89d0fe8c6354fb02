"""Publish a bundle as a static page that runs and measures its models in a browser, with a manifest for its scripts."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from importlib.resources import files as package_files
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import Field

from edgeformer.artifacts import report
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import replacing_folder, write_json, write_text
from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.artifacts.manifest import ArtifactManifest, cautions
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.report import MeasureRules, Subject
from edgeformer.artifacts.units import visible
from edgeformer.artifacts.workspace import REMEDY, TOKENIZER_FILE, read_manifest
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import states_types
from edgeformer.runtimes import provider_facts
from edgeformer.runtimes.decoder import present_name
from edgeformer.runtimes.session import PAST
from edgeformer.runtimes.web import CDN, RUNTIMES, TOKENIZER_LIBRARY, WASM, WEBGPU, LibraryFile, find_local
from edgeformer.system.host import code_version, now
from edgeformer.system.leftovers import remove_leftovers
from edgeformer.system.lock import lock_path
from edgeformer.tasks import RowSource

SITE_FILE = "site.json"  # manifest of a page: a `PageManifest`, read by its JavaScript
_MAX_WRITING_BYTES = 200_000_000  # largest decode graph of a page, which the browser downloads and keeps in memory
_CACHE = re.compile(r"(float32|float16)\[batch, (.*)\]")
DEFAULT_SHAPES = ((1, 16), (1, 128))
_TEMPLATE = "index.html"
# Threads need an isolated page. Hosts that read this file (Netlify, Cloudflare Pages) send the headers for it.
_HEADERS = "/*\n  Cross-Origin-Opener-Policy: same-origin\n  Cross-Origin-Embedder-Policy: require-corp\n"


class PageFile(Frozen):
    """A file that the page downloads. The browser refuses one with another checksum."""

    url: str = Field(description="relative to the page, or an absolute URL")
    integrity: str = Field(description="subresource integrity: sha256-… or sha384-…")
    size_bytes: int


class PageWeights(Frozen):
    """External weights of a graph."""

    name: str = Field(description="file name in the graph")
    file: PageFile


class PageReader(Frozen):
    """Tokenizer of the model, and real inputs to measure with."""

    tokenizer: PageFile | None = Field(None, description="tokenizer.json; None: the page takes no text")
    config: PageFile | None = Field(None, description="tokenizer_config.json")
    golden: PageFile = Field(description="JSON: `rows`, the token ids of each golden input without padding")
    max_tokens: int = Field(description="longest text in tokens, special tokens included")
    suffix: int = Field(0, description="special tokens at the end of a text, kept by truncation")
    types: bool = Field(False, description="the tokenizer states token types other than 0")


class PageCache(Frozen):
    """Keys, values or convolution inputs of earlier tokens: an output of a decode graph that is its next input."""

    input: str
    output: str
    type: Literal["float32", "float16"]
    shape: tuple[int, ...] = Field(description="for one text without tokens")


class PageArtifact(Frozen):
    """A graph of the bundle."""

    id: str
    precision: str
    role: Literal["full", "exit", "decode"] = Field(description="decode: writes texts, and is not measured")
    exit: int | None = None
    size_bytes: int
    graph: PageFile
    weights: tuple[PageWeights, ...] = ()
    masked: bool = Field(description="the graph takes attention_mask beside input_ids")
    typed: bool = Field(False, description="the graph takes token_type_ids beside input_ids")
    positions: bool = Field(False, description="decode graphs: takes position_ids beside input_ids")
    caches: tuple[PageCache, ...] = ()
    reader: str = Field(description="key of `readers`")


class PageWriting(Frozen):
    """How a language model writes."""

    boundary: int = Field(description="token in front of an empty text without `begin`")
    begin: tuple[int, ...] = Field(description="tokens in front of a text")
    ends: tuple[int, ...] = Field(description="tokens that end a text")


class PageProvider(Frozen):
    """Execution provider in the browser, and the library files that it needs."""

    name: str = Field(description="name in ONNX Runtime Web")
    label: str
    short: str = Field(description="label for tables")
    script: PageFile
    glue: PageFile
    binary: PageFile
    counts_threads: bool


class LeftOut(Frozen):
    """Artifact that a browser cannot run, or that was not requested."""

    artifact: str
    reason: str


class PageManifest(Frozen):
    """Contents of site.json."""

    format: Literal["edgeformer-page"] = "edgeformer-page"
    format_version: Literal[1] = 1
    run: str
    noun: str = Field(description="kind of model: classifier, language model…")
    parameters: int
    created: str
    code_version: str
    bundle: str
    synthetic: bool
    leaks: bool
    cautions: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = Field(None, description="None: the page takes no text")
    pieces: Literal["first", "all"] | None = Field(
        None, description="token classifiers, whose `labels` are classes of tokens: tokens of a word that count"
    )
    thresholds: dict[str, float] | None = Field(None, description="label → least probability; None: likeliest label")
    pairs: bool = Field(False, description="the model reads pairs of texts")
    silent: str | None = Field(None, description="reason why the page takes no text")
    writing: PageWriting | None = Field(None, description="language models with decode graphs")
    readers: dict[str, PageReader]
    artifacts: tuple[PageArtifact, ...]
    left_out: tuple[LeftOut, ...] = ()
    providers: tuple[PageProvider, ...]
    tokenizers: PageFile | None = Field(None, description="tokenizer library")
    versions: dict[str, str] = Field(description="library → version")
    offline: bool = Field(description="the libraries are in the page's folder")
    shapes: tuple[tuple[int, int], ...] = Field(description="(batch size, tokens) of the first measurements")
    max_positions: int | None = None
    rules: dict[str, Any] = Field(description="measurement rules of the page")
    subject: Subject


@dataclass(frozen=True)
class PageOptions:
    """Options of a page: folder of the npm packages (None: from a CDN), artifacts, providers and shapes (empty: all).

    ``allow_leak``: publish a language model that sees future tokens; the page says so.
    """

    libraries: Path | None = None
    artifacts: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    allow_leak: bool = False


def publish(
    bundle: Bundle, output: Path, options: PageOptions, artifact: str | None = None, progress: Progress = SILENT
) -> PageManifest:
    """Write the page of a bundle; ``artifact``: named by the RUN argument. An existing page is replaced.

    Raises InputError: the folder holds something else, nothing in the bundle runs in a browser, a library is missing,
    or the model cannot take a shape; ArtifactError: a file of the bundle is missing or changed.
    """
    output = output.resolve()  # "." has no name for temporary folders next to it
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not (output / SITE_FILE).is_file():
            raise InputError(f"-o {output}: already exists and is no page of edgeformer; choose another folder")
        try:
            read_manifest(PageManifest, output / SITE_FILE)
        except ArtifactError as error:
            raise InputError(f"-o {output}: its {SITE_FILE} is damaged ({error}); choose another folder") from None

    # 1. Select the artifacts, and say why the others are left out: a browser cannot run them in one call
    if not isinstance(bundle.task, RowSource):
        raise InputError(f"{bundle.name}: is a {bundle.task.noun}, and a page needs a model that reads text")
    if bundle.leaks and not options.allow_leak:
        raise InputError(
            f"{bundle.name!r} leaks future tokens: it sees the tokens that it predicts, so its scores are void; add "
            "--allow-leak to publish it, marked as leaking"
        )
    requested = options.artifacts or ((artifact,) if artifact is not None else ())
    selected: list[ArtifactManifest] = []
    refused: dict[str, str] = {}
    for candidate in [bundle.artifact(name) for name in dict.fromkeys(requested)] or bundle.artifacts:
        if candidate.status != "built" or candidate.file is None:
            refused[candidate.id] = f"{candidate.status}: {candidate.reason or 'no reason is recorded'}"
        elif not candidate.is_graph:
            refused[candidate.id] = f"browsers run ONNX graphs only, not {candidate.format}"
        elif candidate.calls is not None or "int32" in str(candidate.inputs):
            refused[candidate.id] = "pages call graphs with int64 inputs of any size and the output logits only"
        elif candidate.role == "step":
            refused[candidate.id] = "step artifacts do not run in a page"
        elif candidate.role == "decode" and (bundle.leaks or (candidate.size_bytes or 0) > _MAX_WRITING_BYTES):
            reason = f"is larger than {_MAX_WRITING_BYTES // 10**6} MB"
            refused[candidate.id] = "a model that leaks future tokens writes no text" if bundle.leaks else reason
        elif candidate.role == "decode" and any(type_.startswith("int8") for type_ in candidate.inputs.values()):
            refused[candidate.id] = "a page keeps no keys and values in INT8"
        elif candidate.role == "decode":
            selected.append(candidate)
        elif unsupported := set(candidate.inputs) - {"input_ids", "attention_mask", TOKEN_TYPES}:
            refused[candidate.id] = f"a page has no values for its inputs {', '.join(sorted(unsupported))}"
        else:
            selected.append(candidate)
    if requested and refused:
        name, reason = next(iter(refused.items()))
        raise InputError(f"--artifact {name}: {reason}; leave it out, or give another artifact")
    if not selected:
        listed = "; ".join(f"{name}: {reason}" for name, reason in refused.items()) or "its bundle has no artifacts"
        raise InputError(f"{bundle.name}: no artifact runs in a browser: {listed}; export the run again")
    left_out = tuple(LeftOut(artifact=name, reason=reason) for name, reason in refused.items())

    # 2. Choose the shapes of the first measurements
    longest = bundle.manifest.max_positions
    for _, seq in options.shapes:
        if longest is not None and seq > longest:
            raise InputError(f"--seq {seq}: {bundle.name!r} takes at most {longest} tokens; give a smaller number")
    judged = bundle.task.max_call_tokens(longest, bundle.manifest.max_length)  # profile REPORT.json needs this shape
    defaults = dict.fromkeys((batch, min(seq, judged or seq)) for batch, seq in DEFAULT_SHAPES)

    # 3. Write the page
    with lock_path(output):
        remove_leftovers(output)
        with replacing_folder(output) as temporary:
            builder = _PageBuilder(temporary, bundle, options.libraries)
            manifest = builder.build(selected, left_out, options.providers, options.shapes or tuple(defaults))
            write_json(temporary / SITE_FILE, manifest)
            for asset in package_files("edgeformer.web").joinpath("site").iterdir():
                if asset.name.endswith((".js", ".css")):
                    (temporary / asset.name).write_bytes(asset.read_bytes())
            loader = PackageLoader("edgeformer.web", "site")
            page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(_TEMPLATE)
            hosts = "" if manifest.offline else f" {CDN}"
            html = page.render(title=visible(manifest.run), noun=manifest.noun, hosts=hosts)
            write_text(temporary / _TEMPLATE, html)
            write_text(temporary / "_headers", _HEADERS)
    for entry in left_out:
        progress.message(f"{entry.artifact} is left out of the page: {entry.reason}")
    return manifest


@dataclass
class _PageBuilder:
    """Copies the files of a page and describes them. ``versions``: library → version, of those that it uses."""

    folder: Path
    bundle: Bundle
    libraries: Path | None
    versions: dict[str, str] = field(default_factory=dict)

    def build(
        self, selected: list[ArtifactManifest], left_out: tuple[LeftOut, ...], providers: tuple[str, ...],
        shapes: tuple[tuple[int, int], ...],
    ) -> PageManifest:  # fmt: skip
        """Copy everything that the page needs and return its manifest. Raises InputError for an unknown provider."""
        for name in providers:
            if name not in (WASM, WEBGPU):
                raise InputError(f"--provider {name}: is unknown; give {WASM} or {WEBGPU}")
        bundle, manifest, task = self.bundle, self.bundle.manifest, self.bundle.task
        # 1. What the page does with texts
        writing = None
        if any(artifact.role == "decode" for artifact in selected):
            bounds = bundle.reader().bounds
            assert bounds is not None
            writing = PageWriting(boundary=bounds.boundary, begin=bounds.begin, ends=bounds.ends)
        answers = bool(manifest.labels)
        reads = answers or writing is not None
        thresholds: Any = task.answer_config(bundle.data).get("thresholds")
        # 2. Libraries
        page_providers = tuple(
            PageProvider(
                name=runtime.provider, label=runtime.label, short=provider_facts(runtime.provider).label,
                script=self._library(runtime.script), glue=self._library(runtime.glue),
                binary=self._library(runtime.binary), counts_threads=provider_facts(runtime.provider).counts_threads,
            )
            for runtime in RUNTIMES
            if not providers or runtime.provider in providers
        )  # fmt: skip
        # 3. Graphs with their weights
        artifacts = []
        for artifact in selected:
            bundle.check(artifact)
            assert artifact.file is not None and artifact.role != "step"
            shapes_of = {name: _CACHE.fullmatch(shape) for name, shape in artifact.inputs.items()}
            caches = tuple(
                PageCache(
                    input=name, output=present_name(name), type=cast(Any, match[1]),
                    shape=(1, *(int(axis) if axis.isdigit() else 0 for axis in match[2].split(", "))),
                )
                for name, match in shapes_of.items()
                if match is not None and name.startswith(PAST)
            )  # fmt: skip
            weights = sorted(external_files(bundle.contents.path(artifact.file)))
            folder = PurePosixPath(artifact.file).parent
            artifacts.append(
                PageArtifact(
                    id=artifact.id, precision=artifact.precision, role=artifact.role, exit=artifact.exit,
                    size_bytes=artifact.size_bytes or 0, graph=self._copy(artifact.file),
                    weights=tuple(PageWeights(name=name, file=self._copy(str(folder / name))) for name in weights),
                    masked="attention_mask" in artifact.inputs or not artifact.inputs,
                    typed=TOKEN_TYPES in artifact.inputs, reader=artifact.companions,
                    positions="position_ids" in artifact.inputs, caches=caches,
                )
            )  # fmt: skip
        # 4. Golden inputs and, if the page reads texts, tokenizers
        readers: dict[str, PageReader] = {}
        for artifact in selected:
            prefix = "" if artifact.companions == "." else f"{artifact.companions}/"
            rows = [row.tolist() for row in bundle.golden(artifact).texts()]
            golden = self._write(f"model/{prefix}golden.json", json.dumps({"rows": rows}).encode())
            reader = PageReader(golden=golden, max_tokens=bundle.data.tokens_at_once)
            if reads:
                config = f"{prefix}tokenizer_config.json"
                has_config = config in bundle.contents.checksums
                tokenizer = bundle.reader(artifact).tokenizer
                special = tokenizer.encode("a").special_tokens_mask
                update = {
                    "tokenizer": self._copy(f"{prefix}{TOKENIZER_FILE}"),
                    "config": self._copy(config) if has_config else self._write(f"model/{config}", b"{}"),
                    "suffix": special[::-1].index(0) if 0 in special else 0,  # special tokens after the text
                    "types": states_types(tokenizer, pairs=True),
                }
                reader = reader.model_copy(update=update)
            readers[artifact.companions] = reader
        # 5. The manifest
        rules, strict = asdict(MeasureRules()), asdict(MeasureRules.strict())
        return PageManifest(
            run=manifest.run, noun=task.noun, parameters=manifest.parameters, created=now(),
            code_version=code_version(), bundle=manifest.manifest_sha256 or bundle.name, synthetic=manifest.synthetic,
            leaks=manifest.leaks, cautions=tuple(cautions(manifest)), labels=manifest.labels if answers else None,
            pieces=getattr(bundle.data, "pieces", None), thresholds=thresholds if answers else None,
            pairs=task.can_answer and task.answerer.reads_pairs(bundle.data) is True,
            silent=None if reads else f"a page can measure a {task.noun}, but not answer texts with it",
            writing=writing, readers=readers, artifacts=tuple(artifacts), left_out=left_out, providers=page_providers,
            tokenizers=self._library(TOKENIZER_LIBRARY) if reads else None, versions=self.versions,
            offline=self.libraries is not None, shapes=shapes, max_positions=manifest.max_positions,
            rules={
                **rules, "strict": {name: value for name, value in strict.items() if value != rules[name]},
                "percentile_needs": {str(percentile): n for percentile, n in report.PERCENTILE_NEEDS.items()},
                "noisy_cv": report.NOISY_CV, "quantiles": report.QUANTILES, "drift_parts": report.DRIFT_PARTS,
                "drift_part_calls": report.DRIFT_PART_CALLS, "drift_fewest_calls": report.DRIFT_FEWEST_CALLS,
            },
            subject=Subject.of(manifest, selected),
        )  # fmt: skip

    def _library(self, file: LibraryFile) -> PageFile:
        """Copy a library's file, or return its address. Raises InputError if the libraries' folder lacks it."""
        name, version = file.package
        if self.libraries is None:
            self.versions[name] = version
            url = f"{CDN}/npm/{name}@{version}/{file.path}"
            return PageFile(url=url, integrity=f"sha384-{file.sha384}", size_bytes=file.size_bytes)
        content, local_version = find_local(self.libraries, file)
        self.versions[name] = local_version or "unknown"
        folder = f"libraries/{name.replace('@', '').replace('/', '-')}"
        return self._write(f"{folder}/{PurePosixPath(file.path).name}", content)

    def _copy(self, name: str) -> PageFile:
        """Copy a file of the bundle and compare the copy with its checksum in the manifest."""
        content = self.bundle.contents.intact(name, f"the page needs {name}").read_bytes()
        if hashlib.sha256(content).hexdigest() != self.bundle.contents.checksums[name]:
            raise ArtifactError(f"{self.bundle.folder / name}: changed while it was copied; {REMEDY}")
        return self._write(f"model/{name}", content)

    def _write(self, name: str, content: bytes) -> PageFile:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sha256 = f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
        return PageFile(url=quote(name), integrity=sha256, size_bytes=len(content))
