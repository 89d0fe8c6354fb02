"""Proof of an imported language model: tokens, logits and greedy text of transformers or of llama.cpp."""

from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.data.encoding import PlainText
from edgeformer.data.probes import PROBE_TEXTS, token_probes
from edgeformer.imports.proof import TOLERANCE, Compared, prove, unproven
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.runtimes.llamacpp.library import Llama

COMPUTED_TOKENS, _NEW_TOKENS = 64, 32
"""First tokens of a text whose logits are compared, and tokens that continue it."""
LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers: it never runs code of a folder, nor asks whether it may."""
_WRITTEN_EVERY = 10
"""Of so many probe texts, one is continued by 32 tokens."""
_COMPUTED_EVERY = 8
"""Of so many probe texts, the logits of one are compared with llama.cpp's."""
LLAMA_TOLERANCES: Mapping[str, float] = {"F32": TOLERANCE, "F16": 1e-2, "BF16": 2e-2, "Q8_0": 5e-2}
"""Type of the matrices with the fewest bits → tolerance. llama.cpp rounds the activations to that type too, or to 8
bits, while edgeformer computes with them in FP32."""
_FEWER_BITS = 0.15


def prove_by_transformers(
    folder: Path, model: DecoderModel, plain: PlainText, *, allow: bool, progress: Progress
) -> ImportProof:
    """Compare a model with transformers, text to tokens, logits and the first 32 greedy tokens.

    ``plain`` encodes texts as :meth:`Writer.encode` does. Raises InputError: an answer differs, or transformers cannot
    open a model that it has a class for; with ``allow`` the import is unproven instead.
    """
    # 1. Open the model in transformers
    if util.find_spec("transformers") is None:
        return unproven(f"transformers is not installed ({install_hint('hf')})")
    import transformers

    library = f"transformers {transformers.__version__}"
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    except ValueError:
        return unproven(f"{library} has no class for this model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, **LOCAL
        )
    except Exception as error:  # any type, by a class for another kind of file
        return unproven(f"{library} cannot open {folder}: {str(error).splitlines()[0]}", allowed=allow)
    # Plain greedy text: what a new configuration leaves open, generate would take from the model's own.
    reference.generation_config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=reference.generation_config.eos_token_id,
        pad_token_id=plain.boundary,
    )  # fmt: skip

    # 2. Compare the answers
    probes, longest = [*map(str, PROBE_TEXTS), *token_probes(plain.tokenizer)], model.config.max_positions

    def compare(number: int, text: str) -> Compared:
        ids = plain.encode_prompt(text)
        expected_ids = tokenizer(text).input_ids or [plain.boundary]
        if ids != expected_ids:
            return Compared(text, np.array(expected_ids), np.array(ids), exact=True)
        tokens = torch.tensor([ids[: min(longest, COMPUTED_TOKENS)]])
        if number < len(PROBE_TEXTS) and number % _WRITTEN_EVERY == 0 and tokens.shape[1] + _NEW_TOKENS <= longest:
            mask = torch.ones_like(tokens)
            written = reference.generate(tokens, attention_mask=mask)[0]
            logits = model.logits(written[None, :-1])[0, tokens.shape[1] - 1 :]
            new = written[tokens.shape[1] :]
            best, near = (
                logits.max(-1),
                torch.isclose(logits.gather(-1, new[:, None])[:, 0], logits.amax(-1), TOLERANCE),
            )
            chosen, new = torch.where(near, new, best.indices).tolist(), new.tolist()
            if len(new) < _NEW_TOKENS and new[-1] not in plain.bounds.ends:
                chosen.append(-1)  # the next token: transformers stops here, and edgeformer goes on
            # An end token of the tokenizer ends a text, too, which transformers may continue.
            stop = next((place + 1 for place, token in enumerate(new) if token in plain.bounds.ends), None)
            if new[:stop] != chosen[:stop]:
                return Compared(text, np.array(new[:stop]), np.array(chosen[:stop]), exact=True)
        expected = reference(tokens).logits[0].numpy()
        return Compared(text, expected, model.logits(tokens)[0].numpy())

    def answers() -> Iterator[Compared]:
        for number, text in enumerate(probes):
            yield compare(number, text)
            progress.advance()

    with torch.inference_mode(), bar(progress, f"Comparing with {library}", len(probes), "texts"):
        return prove(library, answers(), allow=allow)


def prove_by_llama(
    llama: Llama, kinds: set[str], model: DecoderModel, plain: PlainText, *, allow: bool, progress: Progress
) -> ImportProof:
    """Compare a model with llama.cpp on its GGUF file: tokens of all texts, the tokens that end a text, and logits.

    Arguments are those of :func:`prove_by_transformers`; ``kinds``: types of the file's matrices.
    """
    library = f"llama.cpp of xllamacpp {metadata.version('xllamacpp')}"
    texts = [*map(str, PROBE_TEXTS), *token_probes(plain.tokenizer)]

    def answers() -> Iterator[Compared]:
        ends = np.array(llama.end_tokens()), np.array(sorted(plain.bounds.ends))
        yield Compared("the end of a text", *ends, exact=True)
        for number, text in enumerate(texts):
            ids = plain.encode_prompt(text)
            expected = np.array(llama.tokenize(text, add_special=True, parse_special=True) or [plain.boundary])
            actual = np.array(ids)
            is_equal = np.array_equal(expected, actual)
            if is_equal and number % _COMPUTED_EVERY == 0:
                llama.truncate(0)
                expected = llama.read(ids[: llama.max_positions], every=True)
                actual = model.logits(torch.tensor([ids[: llama.max_positions]]))[0].numpy()
                yield Compared(text, expected, actual)
            else:
                yield Compared(text, expected, actual, exact=True)
            progress.advance()

    tolerance = max(LLAMA_TOLERANCES.get(kind, _FEWER_BITS) for kind in kinds)
    with torch.inference_mode(), bar(progress, f"Comparing with {library}", len(texts), "texts"):
        return prove(library, answers(), allow=allow, tolerance=tolerance)
