"""Tokenizers of models, of files and of the hub, or trained on a run's own text; a classifier's includes cleaning."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, SourceTokenizer, TokenizerConfig
from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError
from edgeformer.artifacts.files import read_at_most
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import CONFIG_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE
from edgeformer.data import cleaning as cleaning_rules
from edgeformer.data.records import check_file, first_line

if TYPE_CHECKING:
    from edgeformer.data.source_folder import SourceFolder

RecipeT = TypeVar("RecipeT", bound=Recipe)
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BOUNDARY = "<|endoftext|>"  # the only special token of a tokenizer trained for a language model, as in GPT-2
BEGIN_IDS, END_IDS = "begin_token_ids", "end_token_ids"
"""Keys of an imported model's tokenizer_config.json; runs trained here and older runs do not have them."""
_BOUNDARY_NAMES = (BOUNDARY, "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]")
"""Names of the token between two documents, in order of preference."""
UNLIMITED = 2**31 - 1  # tokens of a text that is never cut, as tokenizers of 32-bit hosts can read it
_NO_LIMIT = 10**20  # larger numbers of tokens in a tokenizer_config.json mean that texts are not cut
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")
_UNKNOWN_NAMES = ("[UNK]", "<unk>", "<|unk|>", "[MASK]", "<mask>")
_MAX_BYTES = 128 << 20  # maximum size of a tokenizer.json: four times the largest vocabularies in use (256,000 words)
_MAX_ENTRIES = 3_000_000
"""Maximum commas and brackets in a tokenizer.json: 256,000 words with their merges have 1.9 million. The library
takes 100 bytes for each, also of a file that it rejects."""
_LETTERS = 1000
_WORDS_AT_ONCE = 1000
_PREFIX = "##"
WORD_BOUNDARY = "▁"  # around every word in the tokens of algorithm ``characters``
_BETWEEN_WORDS = "[\\p{P}\\p{Z}\\p{C}]+"
"""Punctuation, spaces and control characters, by Unicode classes that Oniguruma and JavaScript both have."""
_new_trainer = partial(trainers.BpeTrainer, show_progress=False)
_FIRST_SYMBOL = 0xF0000  # a private-use plane: 65,534 characters without special rules in Unicode


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers of padding, of the unknown token, and of the token in front of every text."""

    pad: int
    unk: int
    cls: int


def load_tokenizer(
    config: TokenizerConfig, *, cleaning: str, vocab_size: int, training_texts: Iterable[str] | None
) -> Tokenizer:
    """Load or train the tokenizer of a classifier or an embedding model.

    With ``cleaning == "paper"`` the cleaning comes before the tokenizer's own normalizer, once. A tokenizer that is
    trained here may have fewer tokens than ``vocab_size``; see :func:`fitted_recipe`.

    Raises DataError: missing, not a tokenizer, of another size, or without the special tokens of a classifier.
    """
    front = cleaning_rules.normalizers() if cleaning == "paper" else []
    trained = None
    if config.kind == "trained" and training_texts is not None:
        trained = train_tokenizer(config.algorithm, vocab_size, training_texts, front)
    tokenizer, name = _load(config, vocab_size, trained)
    normalizer = tokenizer.normalizer
    if front and _cleaning_steps(normalizer)[1] is None:
        tokenizer.normalizer = normalizers.Sequence([*front, normalizer] if normalizer is not None else front)
    special_ids(tokenizer, name)
    return tokenizer


def _cleaning_steps(normalizer: normalizers.Normalizer | None) -> tuple[list[object], list[object] | None]:
    """Return the current cleaning, and the steps behind a normalizer's cleaning of any version; None: it has none."""
    steps = json.loads(normalizer.__getstate__()).get("normalizers", []) if normalizer is not None else []
    fronts = [
        json.loads(normalizers.Sequence(cleaning_rules.normalizers(rules)).__getstate__())["normalizers"]
        for rules in cleaning_rules.VERSIONS
    ]
    is_cleaning = any(steps[: len(front)] == front for front in fronts)
    return fronts[0], steps[len(cleaning_rules.RULES) :] if is_cleaning else None


def with_current_cleaning(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the cleaning of an earlier version, if it has one, replaced by the current one."""
    current, further_steps = _cleaning_steps(tokenizer.normalizer)
    if further_steps is None:
        return tokenizer
    document = json.loads(tokenizer.to_str())
    document["normalizer"]["normalizers"] = [*current, *further_steps]
    return Tokenizer.from_str(json.dumps(document))


def load_language_tokenizer(
    config: TokenizerConfig, *, vocab_size: int, training_texts: Iterable[str] | None, is_padded: bool = False
) -> Tokenizer:
    """Load or train the tokenizer of a language model, as :func:`load_tokenizer` does. Raises DataError.

    ``is_padded``: it may have fewer tokens than ``vocab_size``; tables of imported models may have rows for padding.
    """
    trained = None
    if config.kind == "trained":
        if config.algorithm != "bpe":
            raise DataError(
                f"tokenizer.algorithm: {config.algorithm} does not keep spaces, so a language model could not write "
                "its training text; set tokenizer.algorithm: bpe"
            )
        if training_texts is not None:
            trained = train_language_tokenizer(vocab_size, training_texts)
    tokenizer, name = _load(config, vocab_size, trained, is_padded=is_padded)
    boundary_id(tokenizer, name)
    return tokenizer


def _load(
    config: TokenizerConfig, vocab_size: int, trained: Tokenizer | None, *, is_padded: bool = False
) -> tuple[Tokenizer, str]:
    """Return a tokenizer of the model's size, without truncation and padding, and its name for messages.

    ``trained``: the tokenizer, if it was trained for this run. ``is_padded``: the model may have more rows than tokens.
    """
    if isinstance(config, FileTokenizer):
        tokenizer, name = tokenizer_from_file(Path(config.path)), config.path
    elif isinstance(config, HubTokenizer):
        name = f"hub tokenizer {config.name}"
        try:
            tokenizer = Tokenizer.from_pretrained(config.name, revision=config.revision or "main")
        except Exception as error:  # the library raises plain Exception, the hub client its own types
            raise DataError(
                f"{name}: cannot be loaded: {first_line(error)}; check tokenizer.name, or use a file: "
                "--tokenizer PATH/tokenizer.json"
            ) from None
    elif isinstance(config, SourceTokenizer):
        from edgeformer.data.source_folder import SourceFolder

        tokenizer, name = source_tokenizer(SourceFolder.open(config.name))[0], config.name
    elif trained is None:
        raise DataError("tokenizer.kind: trained needs the training texts, which exist during training only")
    else:
        tokenizer, name = trained, f"trained {config.algorithm} tokenizer"
    keep_settings(tokenizer)
    size = embedding_rows(tokenizer)
    # A small training text has fewer tokens than the recipe allows.
    if size != vocab_size and (size > vocab_size or not (is_padded or config.kind == "trained")):
        raise DataError(f"{name}: has {size} tokens, but the model has {vocab_size}; set model.vocab_size: {size}")
    return tokenizer, name


def source_tokenizer(source: SourceFolder) -> tuple[Tokenizer, int | None]:
    """Return a folder's tokenizer and the tokens that texts are cut to, as transformers and sentence-transformers do.

    The tokenizer keeps its padding token and the side where texts are cut (:func:`keep_settings`), and gives both texts
    of a pair the type 0 if transformers passes no types to the model.

    Raises DataError, InputError, ArtifactError, or MissingDependencyError: transformers is not installed.
    """
    from edgeformer.data.source_folder import SHORTEST, quiet_transformers, read_object

    # 1. Read the files
    folder = source.folder
    names = (CONFIG_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
    files = {name: read_object(folder / name) for name in names if (folder / name).is_file()}
    if files.get(TOKENIZER_CONFIG, {}).get("split_special_tokens"):
        raise InputError(
            f"{folder / TOKENIZER_CONFIG}: split_special_tokens is not supported; remove the key, with which the "
            "names of special tokens in a text are read as these tokens"
        )
    if (folder / TOKENIZER_FILE).is_file():
        tokenizer_from_file(folder / TOKENIZER_FILE)  # checks its size and format
    # 2. Let transformers build it
    try:
        with quiet_transformers():
            from transformers import AutoTokenizer

            loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        document = json.loads(loaded.backend_tokenizer.to_str())
        length = source.sentence.max_seq_length or int(loaded.model_max_length)
    except EdgeformerError:
        raise
    except Exception as error:  # invalid settings raise many types
        raise InputError(
            f"{folder}: transformers cannot build its tokenizer: {first_line(error)}; save it again with "
            "transformers, or set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json, which takes "
            "tokenizer.json as it is"
        ) from None
    vocabularies = [*loaded.vocab_files_names.values()]
    if not any((folder / file).is_file() for file in vocabularies):  # transformers would make up a small vocabulary
        raise InputError(
            f"{folder}: has no {' or '.join(sorted(vocabularies))}; write it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if length < SHORTEST:
        raise InputError(f"{folder}: model_max_length is {length}; it must be at least {SHORTEST} tokens")
    # 3. Add what transformers does beside it: token types, lower case, padding token, side of cuts
    has_types, processor = "token_type_ids" in loaded.model_input_names, json.dumps(document["post_processor"])
    if not has_types:
        document["post_processor"] = json.loads(
            processor, object_hook=lambda part: {**part, "type_id": 0} if "type_id" in part else part
        )
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(document))
    if not has_types and 1 in tokenizer.encode("a", "b").type_ids:
        raise InputError(
            f"{folder}: model_input_names lacks token_type_ids, but the tokenizer gives the second text of a pair "
            "another type; add token_type_ids in tokenizer_config.json if the model was trained with them"
        )
    if source.sentence.do_lower_case and '"Lowercase"' not in json.dumps(document["normalizer"]):
        further = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *further])
    number = files.get(CONFIG_FILE, {}).get("pad_token_id")
    pad = loaded.pad_token or (tokenizer.id_to_token(number) if isinstance(number, int) and number >= 0 else None)
    keep_settings(tokenizer, pad, loaded.truncation_side)
    return tokenizer, length if length <= _NO_LIMIT else None


def keep_settings(tokenizer: Tokenizer, pad: str | None = None, side: str | None = None) -> None:
    """Turn truncation and padding off, and keep what a tokenizer.json states in them: padding token, and side of cuts.

    ``pad``: None: the stated one, else one of the usual names. ``side``: ``left``, ``right``; None: the stated one.
    """
    pad = pad or (tokenizer.padding or {}).get("pad_token")
    side = side or (tokenizer.truncation or {}).get("direction")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    number = tokenizer.token_to_id(pad) if pad else None
    if number is not None and number != _first_id(tokenizer, _PAD_NAMES):
        tokenizer.enable_padding(pad_id=number, pad_token=pad)
    if side == "left":
        tokenizer.enable_truncation(UNLIMITED, direction=side)


@contextmanager
def cutting(tokenizer: Tokenizer, max_length: int) -> Iterator[None]:
    """Cut texts to ``max_length`` tokens, on the side that the tokenizer states, and do not pad them."""
    truncation, padding = tokenizer.truncation, tokenizer.padding
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, direction=(truncation or {}).get("direction", "right"))
    try:
        yield
    finally:
        tokenizer.no_truncation()
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding of the tokens needs: numbers may have gaps, and the largest has a row, too."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return max([tokenizer.get_vocab_size(with_added_tokens=True), *(number + 1 for number in vocabulary.values())])


def fitted_recipe(recipe: RecipeT, tokenizer: Tokenizer, note: Callable[[str], None]) -> RecipeT:
    """Return ``recipe`` with the vocabulary size of a tokenizer that was trained for it, and ``note`` a change."""
    size, stated_size = embedding_rows(tokenizer), recipe.model.vocab_size
    if size == stated_size:
        return recipe
    note(
        f"the trained tokenizer has {size:,} tokens, because the training text yields no more; model.vocab_size is "
        f"{size} instead of {stated_size}, also in the saved recipe"
    )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": size})})


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the tokenizer's document."""
    return hashlib.sha256(tokenizer.to_str().encode("utf-8")).hexdigest()


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises DataError."""
    check_file(path)
    try:
        content = read_at_most(path, _MAX_BYTES)
        if sum(map(content.count, (b",", b"[", b"{"))) > _MAX_ENTRIES:
            raise DataError(
                f"{path}: has more than {_MAX_ENTRIES:,} entries, which is too large for a tokenizer; use another"
            )
        return Tokenizer.from_str(content.decode("utf-8"))
    except DataError:
        raise
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except Exception as error:  # the library raises plain Exception
        reason = first_line(error)
    raise DataError(f"{path}: not a tokenizer: {reason}; use a tokenizer.json file")


def special_ids(tokenizer: Tokenizer, name: str = "the tokenizer") -> SpecialIds:
    """Return the numbers of the special tokens. Raises DataError, with the tokenizer's ``name``: one is missing."""
    probe = tokenizer.encode("a")
    model_unknown = getattr(tokenizer.model, "unk_token", None)
    unknown = (model_unknown, *_UNKNOWN_NAMES) if isinstance(model_unknown, str) else _UNKNOWN_NAMES
    names = (str((tokenizer.padding or {}).get("pad_token")), *_PAD_NAMES)
    pad, unk = _first_id(tokenizer, names), _first_id(tokenizer, unknown)
    missing = f"padding token ({', '.join(_PAD_NAMES)})" if pad is None else None
    if unk is None:
        missing = f"unknown token ({', '.join(_UNKNOWN_NAMES[:3])})"
    if not probe.ids or not probe.special_tokens_mask[0]:
        missing = "special token ([CLS]) at the beginning of a text, which the classifier reads"
    if missing is not None or pad is None or unk is None:
        raise DataError(
            f"{name}: has no {missing}; use another tokenizer (bert-base-uncased has all of them), or tokenizer: "
            "{kind: trained}"
        )
    return SpecialIds(pad, unk, probe.ids[0])


def boundary_id(tokenizer: Tokenizer, name: str = "the tokenizer") -> int:
    """Return the number of the token between documents. Raises DataError (with ``name``) if there is none."""
    number = _first_id(tokenizer, _BOUNDARY_NAMES)
    if number is None:
        raise DataError(
            f"{name}: has no token for the end of a text (one of {', '.join(_BOUNDARY_NAMES)}); use another tokenizer "
            "(gpt2 has one), or tokenizer: {kind: trained, algorithm: bpe}"
        )
    return number


@dataclass(frozen=True)
class TextBounds:
    """Tokens around the texts of a language model."""

    boundary: int  # between documents of training text, and in front of an empty prompt if there is no ``begin``
    begin: tuple[int, ...]  # in front of a text; the boundary for models trained here, none for some imported ones
    ends: tuple[int, ...]  # end a generated text
    reads_names: bool  # names of special tokens in a text are these tokens, as in an imported model's own library

    @staticmethod
    def of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> TextBounds:
        """Read the bounds from a tokenizer and its tokenizer_config.json. Raises DataError: no boundary, or damaged."""
        boundary, end, rows = boundary_id(tokenizer), config.get("eos_token"), embedding_rows(tokenizer)
        begin, stated_ends = config.get(BEGIN_IDS), config.get(END_IDS, [])
        for key, numbers in ((BEGIN_IDS, begin or []), (END_IDS, stated_ends)):
            if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < rows for n in numbers):
                raise DataError(f"tokenizer_config.json: {key} is no list of tokens; import the model again")
        ends = (boundary, tokenizer.token_to_id(end) if isinstance(end, str) else None, *stated_ends)
        return TextBounds(
            boundary=boundary, begin=(boundary,) if begin is None else tuple(begin), reads_names=begin is not None,
            ends=tuple(dict.fromkeys(each for each in ends if each is not None)),
        )  # fmt: skip


def _first_id(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    """Return the number of the first of ``names`` that is a token."""
    numbers = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in numbers if number is not None), None)


def train_tokenizer(
    algorithm: str, vocab_size: int, texts: Iterable[str], front: Sequence[normalizers.Normalizer]
) -> Tokenizer:
    """Train a tokenizer of word pieces, bytes, words or characters, with at most ``vocab_size`` tokens.

    A text is [CLS] text [SEP]; that of characters is between word boundaries.

    ``front``: first normalizers (the cleaning). Raises DataError: ``vocab_size`` is too small for the special tokens.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise DataError(
            f"model.vocab_size: {vocab_size} is too small for a trained tokenizer, which has "
            f"{len(SPECIAL_TOKENS)} special tokens and at least the letters of the text"
        )
    # 1. Tokens of bytes, of characters, or of words and their pieces
    begin, end = CLS, SEP
    if algorithm == "bpe":
        tokenizer = train_language_tokenizer(vocab_size, texts, SPECIAL_TOKENS, front, add_prefix_space=True)
    elif algorithm == "characters":
        begin = end = WORD_BOUNDARY
        marks = cleaning_rules.MARKS
        steps = [
            normalizers.Replace("Σ", "σ"), normalizers.Lowercase(),  # Σ: see cleaning.py
            normalizers.Replace(Regex(f"(?=[{marks}])|(?<=[{marks}])"), " "),  # a mark is a word of its own
            normalizers.Replace(Regex(f"[{cleaning_rules.SPACE}]+"), " "), normalizers.Replace(Regex("^ | $"), ""),
            normalizers.Replace(" ", WORD_BOUNDARY),
        ]  # fmt: skip
        normalizer = normalizers.Sequence([*front, *steps])
        letters: Counter[str] = Counter()
        for text in texts:
            letters.update(normalizer.normalize_str(text))
        del letters[WORD_BOUNDARY]
        frequent = sorted(sorted(letters), key=letters.__getitem__, reverse=True)
        tokens = [*SPECIAL_TOKENS, WORD_BOUNDARY, *frequent][:vocab_size]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNK))  # without merges every character is a token
        tokenizer.normalizer = normalizer
        tokenizer.decoder = decoders.Sequence([decoders.Replace(WORD_BOUNDARY, " "), decoders.Fuse()])
    else:
        whole_words = algorithm == "words"
        accents = False if whole_words else None  # None: with lowercase, they are removed
        lowercase = algorithm != "wordpiece-cased"
        bert = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents, handle_chinese_chars=True)
        normalizer = normalizers.Sequence([*front, bert])
        splitter: pre_tokenizers.PreTokenizer = pre_tokenizers.BertPreTokenizer()
        if whole_words:
            splitter = pre_tokenizers.Split(Regex(_BETWEEN_WORDS), "removed")
        words: Counter[str] = Counter()
        for text in texts:
            words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
        if whole_words:  # WordPiece without pieces of words: clients know it, and it reads other words as unknown
            repeated = sorted(word for word, count in words.items() if count > 1)
            frequent = sorted(repeated, key=words.__getitem__, reverse=True)[: vocab_size - len(SPECIAL_TOKENS)]
            vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *frequent])}
        else:
            vocabulary = _wordpiece_vocabulary(words, vocab_size)
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK, continuing_subword_prefix=_PREFIX))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = splitter
        tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    # 2. Special tokens around the texts
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    specials = [(token, tokenizer.token_to_id(token)) for token in {begin, end, SEP}]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {SEP} $B:1 {end}:1", special_tokens=sorted(specials)
    )
    return tokenizer


def train_language_tokenizer(
    vocab_size: int, texts: Iterable[str], special_tokens: Sequence[str] = (BOUNDARY,),
    front: Sequence[normalizers.Normalizer] = (), *, add_prefix_space: bool = False,
) -> Tokenizer:  # fmt: skip
    """Train a byte-level BPE tokenizer; with the default arguments it decodes every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    if front:
        tokenizer.normalizer = normalizers.Sequence(list(front))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = _new_trainer(vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=letters)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _wordpiece_vocabulary(words: Counter[str], vocab_size: int) -> dict[str, int]:
    """Learn the vocabulary of ``WordPieceTrainer``, with ties broken the same way every time.

    That trainer is BPE on letters that know whether they start a word, numbered in random order. So each such letter
    becomes one private-use character here, and the deterministic BPE trainer learns the merges.
    """
    letters: Counter[str] = Counter()
    for word, count in words.items():
        letters.update({letter: count * times for letter, times in Counter(word).items()})
    frequent = sorted(sorted(letters), key=letters.__getitem__, reverse=True)[:_LETTERS]
    # Both forms of every letter, so that a new word is spelled out instead of becoming [UNK].
    symbols = [form + letter for letter in sorted(frequent) for form in ("", _PREFIX)]
    character = {symbol: chr(_FIRST_SYMBOL + index) for index, symbol in enumerate(symbols)}

    mapped_words = (
        ("".join(character.get(part, " ") for part in (word[0], *(_PREFIX + letter for letter in word[1:]))), count)
        for word, count in words.items()
    )
    texts = (  # many copies of a word in one text: passing single words takes longer than learning from them
        f"{mapped} " * min(_WORDS_AT_ONCE, count - start)
        for mapped, count in mapped_words
        for start in range(0, count, _WORDS_AT_ONCE)
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    letters_used = list(character.values())
    trainer = _new_trainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=letters_used)
    learner.train_from_iterator(texts, trainer)
    vocabulary: dict[str, int] = {}
    for token, number in sorted(learner.get_vocab().items(), key=lambda item: item[1]):
        if token not in SPECIAL_TOKENS:
            first, *rest = (symbols[ord(mapped) - _FIRST_SYMBOL] for mapped in token)
            token = first + "".join(symbol.removeprefix(_PREFIX) for symbol in rest)
        vocabulary[token] = number
    return vocabulary
