"""llama.cpp's C interface (llama.h), in the library that the package xllamacpp brings.

The package's own Python interface answers with text and the likeliest tokens only; llama.h gives all logits.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, MissingDependencyError, install_hint
from edgeformer.runtimes.runtime import OptionalPackage
from edgeformer.runtimes.session import Array, InputType, Session, check_inputs, require_file
from edgeformer.system.host import default_threads

EXTRA, PACKAGE, PROVIDER = "llamacpp", "xllamacpp", "llama.cpp"
XLLAMACPP = OptionalPackage(PACKAGE, EXTRA, "llama.cpp, which runs GGUF files", (PACKAGE,))
_POINTER = ctypes.c_void_p
_DEFAULT_SIZES = [512, 2048, 512]
"""First fields of llama_context_params, as llama.cpp sets them: n_ctx, n_batch, n_ubatch."""
_CONTEXT, _BATCH_TOKENS, _COMPUTED_TOKENS = range(3)
_UNSET, _MINUS_ONE = 0xFFFFFFFF, 0xBF800000
_DEFAULT_CACHE = [_UNSET] * 4 + [0] * 2 + [_MINUS_ONE] * 4 + [0, _MINUS_ONE] + [0] * 4 + [1] * 2
"""Later fields, whose place differs between versions: the kinds of rotary scaling, pooling, attention and flash
attention (all unset), eight numbers for positions, a callback of two pointers, and the types of kept keys and values
(F16)."""
_FLASH_ATTENTION, _KEYS, _VALUES, _F32 = 3, -2, -1, 0
_ERROR_LEVEL = 4
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)


class _Parameters(ctypes.Structure):
    """llama_model_params or llama_context_params: larger than both, because later fields differ between versions.

    llama.cpp fills in the defaults and reads only what it knows.
    """

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)), ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)), ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "llama_backend_init": ([], None),
    "llama_log_set": ([_Log, _POINTER], None),
    "llama_model_default_params": ([], _Parameters),
    "llama_context_default_params": ([], _Parameters),
    "llama_model_load_from_file": ([ctypes.c_char_p, _Parameters], _POINTER),
    "llama_init_from_model": ([_POINTER, _Parameters], _POINTER),
    "llama_set_n_threads": ([_POINTER, ctypes.c_int32, ctypes.c_int32], None),
    "llama_model_n_ctx_train": ([_POINTER], ctypes.c_int32),
    "llama_model_get_vocab": ([_POINTER], _POINTER),
    "llama_vocab_n_tokens": ([_POINTER], ctypes.c_int32),
    "llama_vocab_is_eog": ([_POINTER, ctypes.c_int32], ctypes.c_bool),
    "llama_tokenize": (
        [_POINTER, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
        + [ctypes.c_bool] * 2,
        ctypes.c_int32,
    ),
    "llama_get_memory": ([_POINTER], _POINTER),
    "llama_memory_clear": ([_POINTER, ctypes.c_bool], None),
    "llama_memory_seq_rm": ([_POINTER, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32], ctypes.c_bool),
    "llama_batch_init": ([ctypes.c_int32] * 3, _Batch),
    "llama_batch_free": ([_Batch], None),
    "llama_decode": ([_POINTER, _Batch], ctypes.c_int32),
    "llama_get_logits_ith": ([_POINTER, ctypes.c_int32], ctypes.POINTER(ctypes.c_float)),
    "llama_get_logits": ([_POINTER], ctypes.POINTER(ctypes.c_float)),
    "llama_free": ([_POINTER], None),
    "llama_model_free": ([_POINTER], None),
}
"""Function → types of its arguments and of its result."""


@cache
def library() -> Any:
    """Return llama.cpp's library, initialised. Raises MissingDependencyError: it is missing or of another interface."""
    if (problem := XLLAMACPP.missing()) is not None:
        raise MissingDependencyError(problem)
    spec = util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    files = [*Path(spec.origin).parent.glob(f"{PACKAGE}*.so"), *Path(spec.origin).parent.glob(f"{PACKAGE}*.pyd")]
    hint = install_hint(EXTRA, reinstall=True)
    try:
        loaded: Any = ctypes.CDLL(str(files[0]))
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result
    except (IndexError, OSError, AttributeError) as error:
        raise MissingDependencyError(
            f"{PACKAGE} is installed, but llama.cpp is not usable in it: {error}; {hint}"
        ) from None
    loaded.llama_log_set(_keep_errors, None)
    loaded.llama_backend_init()
    sizes = list(loaded.llama_context_default_params().words[: len(_DEFAULT_SIZES)])
    if sizes != _DEFAULT_SIZES:
        raise MissingDependencyError(
            f"{PACKAGE}: its llama_context_params begin with {sizes}, not {_DEFAULT_SIZES}; {hint}"
        )
    return loaded


_NO_REASON = "it gives no reason"
_errors = [_NO_REASON]
"""The latest messages of llama.cpp's errors."""


@_Log  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR_LEVEL:
        _errors[:] = [*_errors[-4:], text.decode("utf-8", "replace").strip()]


class Llama(Session):
    """A GGUF file that llama.cpp opened, which reads one text at a time.

    Args:
        exact: keep keys and values in F32 and compute attention without the flash kernel, which rounds to F16.
    """

    provider = PROVIDER
    inputs: Mapping[str, InputType] = {"input_ids": InputType("int64", ("batch", "sequence"))}

    def __init__(self, path: Path, threads: int | None, max_positions: int | None, *, exact: bool = False) -> None:
        self.path, self.threads = path, threads or default_threads()
        self._library, self._model, self._context = library(), None, None
        require_file(path)
        _errors[:] = [_NO_REASON]
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise ArtifactError(f"{path}: llama.cpp cannot open it: {_errors[-1]}; export or copy it again")
        self.max_positions: int = max_positions or self._library.llama_model_n_ctx_train(self._model)
        parameters = self._library.llama_context_default_params()
        parameters.words[_CONTEXT] = self.max_positions
        # As many logits as tokens are computed at once are kept in memory.
        self._call_tokens = parameters.words[_BATCH_TOKENS] = parameters.words[_COMPUTED_TOKENS]
        if exact:
            words = list(parameters.words)
            length = len(_DEFAULT_CACHE)
            starts = [start for start in range(len(words) - length) if words[start : start + length] == _DEFAULT_CACHE]
            if len(starts) != 1:
                raise MissingDependencyError(
                    f"{PACKAGE}: its llama_context_params have no known place for the types of kept keys and values; "
                    f"{install_hint(EXTRA, reinstall=True)}"
                )
            places = [starts[0] + place % length for place in (_FLASH_ATTENTION, _KEYS, _VALUES)]
            for place, value in zip(places, (0, _F32, _F32), strict=True):
                parameters.words[place] = value
        self._context = self._library.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ArtifactError(f"{path}: llama.cpp cannot make room for {self.max_positions} tokens: {_errors[-1]}")
        self._library.llama_set_n_threads(self._context, self.threads, self.threads)
        self._vocabulary = self._library.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._library.llama_vocab_n_tokens(self._vocabulary)
        self._memory = self._library.llama_get_memory(self._context)
        self.length = 0

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ids = check_inputs(self.path.name, self.inputs, inputs, self.max_positions)["input_ids"]
        logits = []
        for row in ids.tolist():
            self.truncate(0)
            logits.append(self.read(row, every=True))
        return {"logits": np.stack(logits)}

    def settings(self) -> dict[str, Any]:
        return {"threads": self.threads}

    def read(self, ids: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        """Read the next tokens; return the logits of the last one, or of ``every`` one: [1 or n, V].

        Raises EdgeformerError if llama.cpp fails.
        """
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise EdgeformerError(f"a token id lies outside the model's vocabulary ({self.vocab_size})")
        results = []
        for start in range(0, len(ids), self._call_tokens):
            piece = ids[start : start + self._call_tokens]
            is_last = start + len(piece) == len(ids)
            batch = self._library.llama_batch_init(len(piece), 0, 1)
            try:
                batch.n_tokens = len(piece)
                for place, token in enumerate(piece):
                    batch.token[place], batch.pos[place] = token, self.length + place
                    batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
                    batch.logits[place] = every or (is_last and place == len(piece) - 1)
                if code := self._library.llama_decode(self._context, batch):
                    raise EdgeformerError(f"llama.cpp failed with code {code}: {_errors[-1]}")
            finally:
                self._library.llama_batch_free(batch)
            self.length += len(piece)
            if count := len(piece) if every else int(is_last):
                pointer = self._library.llama_get_logits(self._context)
                results.append(np.ctypeslib.as_array(pointer, (count, self.vocab_size)).copy())
        return np.concatenate(results)

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first ``length`` ones. Raises EdgeformerError: the session is closed."""
        if self._context is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        self._library.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = length

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Encode a text as llama.cpp does.

        ``add_special``: with the tokens that the file's tokenizer puts around a text. ``parse_special``: names of
        special tokens in the text are read as these tokens.
        """
        content, flags = text.encode(), (add_special, parse_special)
        ids = (ctypes.c_int32 * (2 * len(content) + 8))()  # a prefix may be added in front of every part
        count = self._library.llama_tokenize(self._vocabulary, content, len(content), ids, len(ids), *flags)
        return list(ids[:count])

    def end_tokens(self) -> list[int]:
        """Return the tokens at which llama.cpp ends a text: those of the file's keys, and by their names."""
        is_end = self._library.llama_vocab_is_eog
        return [number for number in range(self.vocab_size) if is_end(self._vocabulary, number)]

    def close(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None
