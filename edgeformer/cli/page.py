"""Command page: write a static web page that runs and measures a bundle in a browser."""

from itertools import product
from pathlib import Path

from typer import Option

from edgeformer.cli import options as opt


def command(
    bundle: opt.Run = None,
    output: Path = Option(
        Path("site"), "--output", "-o", metavar="DIR", help="Folder to write the page to; it replaces an existing page."
    ),
    libraries: Path | None = Option(
        None,
        metavar="DIR",
        help="Folder node_modules with onnxruntime-web and @huggingface/tokenizers. Default: a CDN, with checksums.",
    ),
    artifact: list[str] | None = Option(
        None, help="Include only this artifact. May be repeated. Default: all that browsers can run."
    ),
    provider: list[str] | None = Option(
        None, help="Provider in the browser: wasm (CPU) or webgpu. May be repeated. Default: both."
    ),
    batch: str | None = Option(None, metavar="N,N…", help="Batch sizes to measure. Default: 1."),
    seq: str | None = Option(None, metavar="N,N…", help="Sequence lengths to measure, in tokens. Default: 16,128."),
    allow_leak: opt.AllowLeak = False,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Write a [b]page[/b] that runs the model on texts and measures it in the browser of any phone or computer.

    The page is a folder of static files for any web server. It measures as profile does and offers the report
    as JSON for compare and profile REPORT.json --device NAME. It sends no data anywhere.

    Examples:
      edgeformer page -o site
      edgeformer page path/to/bundle -o site --libraries node_modules --artifact onnx-int8
      edgeformer profile browser.json --device raspberry-pi-5
    """
    from edgeformer.artifacts.units import format_bytes
    from edgeformer.web import PageOptions, publish

    location = opt.locate(bundle, artifacts)
    shapes = tuple(product(opt.integers(batch, "--batch") or (1,), opt.integers(seq, "--seq") or (16, 128)))
    shapes = shapes if batch or seq else ()
    options = PageOptions(libraries, tuple(artifact or ()), tuple(provider or ()), shapes, allow_leak)
    site = publish(location.open_bundle(), output, options, location.artifact, opt.show_progress())
    if as_json:
        facts = site.model_dump(mode="json", include={"run", "offline", "versions", "left_out"})
        opt.print_json({"page": str(output), "artifacts": [artifact.id for artifact in site.artifacts], **facts})
        return
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    artifact_sizes = ", ".join(f"{artifact.id} ({format_bytes(artifact.size_bytes)})" for artifact in site.artifacts)
    libraries_from = "in the folder; the page works offline" if site.offline else "from a CDN, with checksums"
    opt.say(f"page      {output}, {format_bytes(size_bytes)}: {artifact_sizes}")
    opt.say(f"libraries {libraries_from}\nnext      python -m http.server --directory {output}")
