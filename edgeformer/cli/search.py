"""Command search: find the smallest model that is good enough for a device."""

from pathlib import Path
from typing import Literal

import typer
from typer import Option

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli import options as opt


def command(
    data: Path = typer.Argument(
        ...,
        metavar="DATA|RECIPE",
        help="File of labelled texts (see init), or a recipe whose data is used: a path or a shipped name.",
    ),
    device: str = Option("host", help="Device profile that the artifacts are judged for (edgeformer list devices)."),
    source: str | None = Option(
        None,
        metavar="PATH|NAME",
        help="Pretrained encoder (folder, name on the hub, or minilm): adds models that start from it. Default: minilm "
        "if it is installed.",
    ),
    no_source: bool = opt.advanced(False, "--no-source", help="Leave out models that start from a pretrained encoder."),
    min_score: float | None = Option(
        None, metavar="X", min=0.0, max=1.0, help="Lowest accepted accuracy (several labels, spans: F1), e.g. 0.85."
    ),
    max_latency: str | None = Option(None, metavar="TIME", help="Limit of the median latency, e.g. 5ms."),
    max_size: str | None = Option(None, metavar="SIZE", help="Limit of the file size, e.g. 20MiB."),
    minimize: Literal["latency", "size"] = opt.advanced("latency", help="Quantity to minimize."),
    budget: str | None = Option(
        None,
        metavar="TIME|none",
        help="Longest duration, e.g. 2h; models that may take longer are skipped. Default: 5min, with a source 12min.",
    ),
    every: bool = Option(
        False, "--all", help="Train every model, also after one that keeps the limits, or if it promises no gain."
    ),
    models: str | None = opt.advanced(None, metavar="NAME,NAME…", help="Train these models only. Default: all."),
    name: str | None = Option(None, help="Name of the search. Default: the name of DATA or of the recipe."),
    text: opt.TextColumn = None,
    label: opt.LabelColumn = None,
    labels: opt.LabelNames = None,
    encoding: opt.Encoding = None,
    delimiter: opt.Delimiter = None,
    quote: opt.Quote = None,
    test: opt.TestFile = None,
    folder: opt.DataFolder = None,
    tokenizer: opt.TokenizerFile = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Find the smallest model that is good enough for a [b]device[/b].

    Models are trained from the cheapest to the most expensive: a linear model, a classifier on the vectors of a
    pretrained encoder, small and light encoders with shared layers, the pretrained encoder fine-tuned, its folded form,
    and linear and light models that the best of them teaches. Each is exported in FP32, INT8 and INT4 and profiled.
    With --min-score the search ends at the first model that keeps all limits; without it, the model with the best
    score is recommended. The Pareto front of score, latency and size is printed, and drawn on one HTML page.

    Scores are of the validation rows; only the recommended artifact is scored on the test rows. The same command
    continues an interrupted search, and answers other limits from what is trained. Exit code 3: no artifact keeps
    them; the best one is named.

    Examples:
      edgeformer search reviews.csv --device raspberry-pi-5 --min-score 0.85 --max-latency 20ms
      edgeformer search tickets.csv --device host --source path/to/all-MiniLM-L6-v2 --budget 2h --all
      edgeformer search recurrent_sst2_fast --data ~/sst2 --tokenizer ~/bert/tokenizer.json --device host
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles, shipped_names
    from edgeformer.artifacts.units import parse_bytes, parse_milliseconds
    from edgeformer.benchmark.limits import Limit
    from edgeformer.data.source_folder import default_source
    from edgeformer.data.sources import Columns
    from edgeformer.report.model_search import PAGE_FILE, print_model_search, write_page

    # 1. Limits, source and budget
    progress = opt.show_progress()
    with needs_extra("train", "search"):
        from edgeformer.model_search.driver import ModelSearchOptions, search_models
        from edgeformer.model_search.ladder import ladder_of_file, ladder_of_recipe
        from edgeformer.training.init import recipe_name
    load_profile(device, own_profiles(artifacts))  # a wrong name must not cost hours of training
    limits = [Limit("score", min_score)] if min_score is not None else []
    if max_latency is not None:
        limits.append(Limit("latency", opt.parse_value("--max-latency", max_latency, parse_milliseconds)))
    if max_size is not None:
        limits.append(Limit("size", opt.parse_value("--max-size", max_size, parse_bytes)))
    if source is not None and no_source:
        raise InputError("--source and --no-source contradict each other; give one of them")
    source = None if no_source else source or default_source()
    budget = budget or ("5min" if source is None else "12min")
    budget_s = None if budget == "none" else opt.parse_value("--budget", budget, parse_milliseconds) / 1000
    options = ModelSearchOptions(tuple(limits), minimize, budget_s, every, tuple(models.split(",")) if models else ())
    # 2. The models to try, from a recipe or a data file
    is_recipe = data.suffix in (".yaml", ".yml") or (not data.exists() and str(data) in shipped_names("recipes"))
    if is_recipe:
        if text or label or labels or encoding or delimiter or quote or test:
            flags = "--text, --label, --labels, --encoding, --delimiter, --quote, --test"
            raise InputError(f"{flags}: of a data file; a recipe names these itself")
        recipe = opt.resolve_recipe(str(data), None, folder, tokenizer, progress)
        search_name, ladder = name or recipe.name, ladder_of_recipe(recipe, source)
    else:
        if folder or tokenizer:
            raise InputError("--data, --tokenizer: are of a recipe; for a data file leave them out")
        columns = Columns(text, None, label, encoding, labels, delimiter, quote)
        search_name = name or recipe_name(data)
        ladder = ladder_of_file(data, columns, source, progress, test)
    # 3. Search
    result = search_models(search_name, str(data), ladder, source, device, artifacts, options, progress, write_page)
    page = artifacts / f"{search_name}-search" / PAGE_FILE
    if as_json:
        opt.print_json(result)
    else:
        print_model_search(result, page, opt.stdout())
        if result.picked is not None:
            model, _, artifact = result.picked.partition("/")
            run = next(entry.run for entry in result.models if entry.name == model)
            opt.say_next(f"edgeformer profile {run} --artifact {artifact} --on HOST", "measures it on the device")
    if result.picked is None:
        raise typer.Exit(3)
