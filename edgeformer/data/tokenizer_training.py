"""Training a tokenizer on a run's own text, the same from the same text every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeformer.artifacts.errors import DataError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BOUNDARY = "<|endoftext|>"
"""The only special token of a tokenizer that is trained for a language model, as in GPT-2."""
_LETTERS = 1000
_WORDS_AT_ONCE = 1000
_PREFIX = "##"
_FIRST_SYMBOL = 0xF0000  # a private-use plane: 65,534 characters that no rule of Unicode treats specially


def train_tokenizer(
    algorithm: str, vocab_size: int, texts: Iterable[str], front: Sequence[normalizers.Normalizer]
) -> Tokenizer:
    """A WordPiece or byte-level BPE tokenizer with [CLS] text [SEP]; at most ``vocab_size`` tokens.

    Args:
        front: normalizers that come first (the cleaning).

    Raises:
        DataError: ``vocab_size`` has no room for the special tokens.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise DataError(
            f"model.vocab_size: {vocab_size} is too small for a trained tokenizer: it holds "
            f"{len(SPECIAL_TOKENS)} special tokens and at least the letters of the text"
        )
    if algorithm == "bpe":
        tokenizer = _byte_level(vocab_size, texts, SPECIAL_TOKENS, front, add_prefix_space=True)
    else:
        tokenizer = _wordpiece(vocab_size, texts, front)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    specials = [(CLS, tokenizer.token_to_id(CLS)), (SEP, tokenizer.token_to_id(SEP))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=specials
    )
    return tokenizer


def train_language_tokenizer(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that gives back every text exactly; its one special token is ``BOUNDARY``."""
    return _byte_level(vocab_size, texts, [BOUNDARY], (), add_prefix_space=False)


def _byte_level(
    vocab_size: int,
    texts: Iterable[str],
    special_tokens: list[str],
    front: Sequence[normalizers.Normalizer],
    *,
    add_prefix_space: bool,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if front:
        tokenizer.normalizer = normalizers.Sequence(list(front))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = _trainer(vocab_size, special_tokens, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _trainer(vocab_size: int, special_tokens: list[str], alphabet: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )


def _wordpiece(vocab_size: int, texts: Iterable[str], front: Sequence[normalizers.Normalizer]) -> Tokenizer:
    normalizer = normalizers.Sequence(
        [*front, normalizers.BertNormalizer(lowercase=True, strip_accents=None, handle_chinese_chars=True)]
    )
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    vocabulary = _wordpiece_vocabulary(words, vocab_size)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK, continuing_subword_prefix=_PREFIX))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    return tokenizer


def _wordpiece_vocabulary(words: Counter[str], vocab_size: int) -> dict[str, int]:
    """The vocabulary that ``WordPieceTrainer`` learns, with ties broken the same way every time.

    That trainer numbers its "##" letters in the order of a randomly seeded hash map, so that two runs on the
    same text give two tokenizers. It is BPE on letters that know whether they start a word; so each such
    letter becomes one private-use character here, and the (deterministic) BPE trainer does the work.
    """
    letters: Counter[str] = Counter()
    for word, count in words.items():
        letters.update({letter: count * times for letter, times in Counter(word).items()})
    kept = sorted(sorted(letters), key=letters.__getitem__, reverse=True)[:_LETTERS]
    # Both forms of every letter, so that a word never seen is spelled out and not [UNK].
    symbols = [form + letter for letter in sorted(kept) for form in ("", _PREFIX)]
    character = {symbol: chr(_FIRST_SYMBOL + index) for index, symbol in enumerate(symbols)}

    def mapped_words() -> Iterator[str]:
        for word, count in words.items():
            parts = [word[0], *(_PREFIX + letter for letter in word[1:])]
            mapped = "".join(character.get(part, " ") for part in parts) + " "
            # Many at a time: handing over single words takes longer than learning from them.
            for start in range(0, count, _WORDS_AT_ONCE):
                yield mapped * min(_WORDS_AT_ONCE, count - start)

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(mapped_words(), _trainer(vocab_size, SPECIAL_TOKENS, list(character.values())))

    def name(token: str) -> str:
        if token in SPECIAL_TOKENS:
            return token
        first, *others = (symbols[ord(mapped) - _FIRST_SYMBOL] for mapped in token)
        return first + "".join(symbol.removeprefix(_PREFIX) for symbol in others)

    return {name(token): number for token, number in sorted(learner.get_vocab().items(), key=lambda item: item[1])}
