"""Child of decode.py: a model of a recipe with random weights that decodes in one way, timed on request.

Arguments: WAY RECIPE GRAPHS THREADS. GRAPHS: the folder of the exported graphs. The ways:

- ``graphs``: no way; the first request has the graphs written that are not there, and is answered when they are.
- ``torch``: eager, with keys, values and convolution inputs kept, products routed by what is fastest for one token.
- ``PRECISION decode``: the decode graph, opened as edgeformer opens it.
- ``PRECISION steps``: the step graphs, opened as edgeformer opens them; also embedding and head alone.
- ``PRECISION full``: the full text in one call, of the head only the last position, as a prompt needs it.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.ways import serve
from edgeformer.models import load_recipe
from edgeformer.runtimes.decoder import Decoder, FullDepthEngine, StepEngine, StepSession
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.language_modeling import LanguageRecipe

DECODE, STATES = "decode", "states"
STEPPED = ("fp32", "int8")
"""Precisions that have step graphs and the full text, too; the others have the decode graph alone."""
PRECISIONS = (*STEPPED, "int4", "nbits8")
_MOST_ERROR = 1e-5
"""Of a product, as a share of its largest number: what computes in bfloat16 is off by a hundredth."""

Answer = Callable[[Mapping[str, Any]], Any]


def model_of(recipe: LanguageRecipe) -> Any:
    """With random weights, the same in every process."""
    import torch

    from edgeformer.models.crt.model import CRT

    torch.manual_seed(0)
    config: Any = recipe.model
    return CRT(config).eval()


def write_graphs(recipe: LanguageRecipe, folder: Path) -> None:
    """Every precision's graphs in a folder of its own, where they are not there yet."""
    from edgeformer.export.graphs import weights_file, write_graph
    from edgeformer.export.quantize import LONG_BLOCK, quantize_int4, quantized_graphs
    from edgeformer.models.crt.adapter import ADAPTER
    from edgeformer.models.tracing import extract_outputs, state_name

    target = [precision for precision in PRECISIONS if not (folder / precision / "done").is_file()]
    if not target:
        return
    model = model_of(recipe)
    plain = ADAPTER.trace(model, ["input_ids"], steps=True)
    assert plain.decode is not None
    for precision in target:
        place = folder / precision
        place.mkdir(parents=True, exist_ok=True)
        if precision in STEPPED:
            built = plain if precision == "fp32" else quantized_graphs(plain, "int8", place)
            assert built.decode is not None
            graphs = {
                **built.steps,
                DECODE: built.decode,
                STATES: extract_outputs(built.exits, {state_name(model.loops): "state"}),
            }
        else:
            narrow = quantize_int4(plain.decode, LONG_BLOCK) if precision == "int4" else eight_bits(plain.decode)
            graphs = {DECODE: narrow}
        with weights_file(place / "model.onnx_data") as weights:
            for name, graph in graphs.items():
                write_graph(graph, place / f"{name}.onnx", weights)
        (place / "done").touch()


def eight_bits(decode: Any) -> Any:
    """The decode graph with weights in blocks of 8 bits (MatMulNBits), each stored once; tables in INT8."""
    import onnx_ir

    # Imported here: the module makes the root logger tell everything that any library does.
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    from edgeformer.export.quantize import prepare

    logging.getLogger().setLevel(logging.WARNING)
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=8)
    quantizer = MatMulNBitsQuantizer(onnx_ir.to_proto(prepare(decode)), algo_config=config)
    quantizer.process()
    model = onnx_ir.from_proto(quantizer.model.model)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
    onnx_ir.passes.common.DeduplicateHashedInitializersPass()(model)
    return model


def weight_bytes(graph: Path) -> int:
    """What one token reads of stored weights: those of every product, as often as a product has them."""
    model = onnx.load(str(graph), load_external_data=False).graph
    sizes = {
        item.name: int(
            np.prod(item.dims, dtype=np.int64) * onnx.helper.tensor_dtype_to_np_dtype(item.data_type).itemsize
        )
        for item in model.initializer
    }
    products = [node for node in model.node if node.op_type in ("MatMul", "Gemm", "MatMulInteger", "MatMulNBits")]
    return sum(sizes.get(name, 0) for node in products for name in node.input)


class Texts:
    """Texts that are written token by token, one for every loop that is stopped after, all after the same prompt."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._texts, self._logits = begin, dict[int, Any](), dict[int, Any]()

    def read(self, ids: list[int], loop: int) -> float:
        """A new text; milliseconds to the logits of its next token."""
        began = time.perf_counter()
        self._texts[loop] = self._begin()
        self._step(ids, loop)
        return 1000 * (time.perf_counter() - began)

    def write(self, ids: list[int], loop: int) -> float:
        """Median milliseconds of one token."""
        return statistics.median(self.timed(token, loop) for token in ids)

    def timed(self, token: int, loop: int) -> float:
        """Milliseconds of one token."""
        began = time.perf_counter()
        self._step([token], loop)
        return 1000 * (time.perf_counter() - began)

    def save(self, file: str, loop: int) -> bool:
        """The newest logits as a file."""
        np.save(file, self._logits[loop])
        return True

    def _step(self, ids: list[int], loop: int) -> None:
        text = self._texts[loop]
        text.read(ids)
        text.advance(loop)
        self._logits[loop] = text.logits(loop)


def asked_of(texts: Texts, more: Mapping[str, Answer] | None = None) -> Answer:
    """What answers requests: ``do``, and its arguments."""
    existing: dict[str, Answer] = {
        "read": lambda arguments: texts.read(arguments["ids"], arguments["loop"]),
        "write": lambda arguments: texts.write(arguments["ids"], arguments["loop"]),
        "save": lambda arguments: texts.save(arguments["file"], arguments["loop"]),
        **(more or {}),
    }
    return lambda arguments: existing[arguments["do"]](arguments)


def torch_way(recipe: LanguageRecipe, threads: int) -> Answer:
    """Beside texts: ``tune``; ``reference``, the logits of the uncached model after all of a text at every exit."""
    import torch

    from benchmarks._torch_routes import tune
    from edgeformer.models.crt.model import CachedLoops
    from edgeformer.runtimes.torch.session import torch_decoder

    torch.set_num_threads(threads)
    model, plain = model_of(recipe), model_of(recipe)

    @torch.inference_mode()
    def reference(arguments: Mapping[str, Any]) -> bool:
        states = plain(torch.tensor([arguments["ids"]]))
        np.savez(
            arguments["file"], **{str(loop): plain.head_of(loop)(states[loop][0, -1]).numpy() for loop in plain.exits}
        )
        return True

    texts = Texts(lambda: torch_decoder(CachedLoops(model)))
    return asked_of(texts, {"tune": lambda _: tune(model, _MOST_ERROR), "reference": reference})


def decode_way(loops: int, files: Mapping[str, Path], threads: int) -> Answer:
    """Beside texts: ``weight_bytes``."""
    graph = OnnxSession(files[DECODE], threads=threads)
    more: dict[str, Answer] = {"weight_bytes": lambda _: weight_bytes(files[DECODE])}
    return asked_of(Texts(lambda: Decoder(FullDepthEngine(graph, loops))), more)


def steps_way(recipe: LanguageRecipe, files: Mapping[str, Path], threads: int) -> Answer:
    """Beside texts: ``exits``, median milliseconds of a token by the loop that is stopped after, all in turn.

    The loop 0 stands for embedding a token and for its logits, without the loops. Those still run in between:
    their weights push the others out of the caches, as they do when texts are written; alone, the ends would find
    theirs there. Turns change with every token, for the question is how long each part takes, and a machine
    that changes its speed between two texts would answer something else.
    """
    model: Any = recipe.model
    loops = model.loops
    open_part = partial(OnnxSession, threads=threads, in_turns=True)
    parts = StepSession(files, loops, open_part, exits=(*model.exits, loops))

    texts, order = Texts(lambda: Decoder(StepEngine(parts))), (0, *model.exits, loops)

    def ends(token: int) -> float:
        engine, began = StepEngine(parts), time.perf_counter()
        state = engine.embed(np.array([[token]], dtype=np.int64), 0, keep=False)
        embedded = time.perf_counter()
        for stretch in range(order[1]):
            state = engine.advance(stretch, [state], keep=False)
        looped = time.perf_counter()
        engine.readout(state, loops)
        return 1000 * (embedded - began + time.perf_counter() - looped)

    def exits(arguments: Mapping[str, Any]) -> dict[str, float]:
        times: dict[int, list[float]] = {loop: [] for loop in order}
        for number, token in enumerate(arguments["ids"]):
            for loop in order[:: -1 if number % 2 else 1]:
                times[loop].append(texts.timed(token, loop) if loop else ends(token))
        return {str(loop): statistics.median(results) for loop, results in times.items()}

    return asked_of(texts, {"exits": exits})


def full_way(files: Mapping[str, Path], threads: int) -> Answer:
    """``full``: milliseconds of one forward of all tokens, to the logits of the next one."""
    states, head = (OnnxSession(files[name], threads=threads, in_turns=True) for name in (STATES, "readout"))

    def full(arguments: Mapping[str, Any]) -> float:
        began = time.perf_counter()
        state = states.run({"input_ids": np.array([arguments["ids"]], dtype=np.int64)})["state"]
        head.run({"state": state[:, -1:]})
        return 1000 * (time.perf_counter() - began)

    return lambda arguments: full(arguments)


def graphs_way(recipe: LanguageRecipe, folder: Path) -> Answer:
    """Answers when all graphs are there: seconds that writing them took."""

    def write(_: object) -> float:
        began = time.perf_counter()
        write_graphs(recipe, folder)
        return time.perf_counter() - began

    return write


def answering(way: str, name: str, folder: Path, threads: int) -> Answer:
    """What answers requests to a way."""
    recipe = load_recipe(name)
    assert isinstance(recipe, LanguageRecipe)
    model: Any = recipe.model
    precision, _, kind = way.partition(" ")
    files = {path.stem: path for path in (folder / precision).glob("*.onnx")}
    built: dict[str, Callable[[], Answer]] = {
        "": lambda: graphs_way(recipe, folder) if precision == "graphs" else torch_way(recipe, threads),
        "decode": lambda: decode_way(model.loops, files, threads),
        "steps": lambda: steps_way(recipe, files, threads),
        "full": lambda: full_way(files, threads),
    }
    return built[kind]()


if __name__ == "__main__":
    _way, _recipe, _folder, _threads = sys.argv[1:]
    serve(_way, lambda: answering(_way, _recipe, Path(_folder), int(_threads)))
