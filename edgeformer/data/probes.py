"""Texts on which an imported model is compared with the library that it came from."""

from tokenizers import Tokenizer

from edgeformer.data.rows import Text

PROBE_TEXTS: tuple[str, ...] = (
    "a", "Good.", "The service was slow, but the food was excellent.", "THE SERVICE WAS SLOW!", "iPhone 15 Pro MAX",
    "", " ", "  two  spaces,\ttabs\nand\r\nlines  ", "don't can't we'll I'm you've it's",
    "1234567890 12,345.67 1e-5 0x1F",
    "Crème brûlée à l'été, naïve Straße, İstanbul ĳ ﬁ", "cafe\u0301 e\u0301 A\u030a n\u0303",  # combining accents
    "🙂 👩‍👩‍👧‍👦 🇩🇪 👍🏽", "中文文本没有空格。", "日本語のテキストです。カタカナ", "한국어 문장입니다.",
    "Русский текст, ещё одна строка.", "Ελληνικό κείμενο με τόνους", "نص عربي من اليمين", "טקסט בעברית",
    "हिन्दी में एक वाक्य", "ภาษาไทยไม่มีช่องว่าง", "mixed 中文 and English и русский",
    "https://example.com/a?b=c&d=%20e#f me@example.org",
    "<b>bold</b> &amp; &lt;tag&gt;", "def f(x):\n    return x ** 2  # comment", '{"key": ["value", 1, null]}',
    "[SEP]", "good [SEP] bad", "[CLS] [MASK] [PAD] [UNK] end", "<s> a </s> b <pad> <mask> <unk>",
    "<|endoftext|> <|im_start|>user hello<|im_end|>", "<|begin_of_text|>x<|eot_id|>", "##ing ▁word Ġword",
    "\u200bzero\ufeffwidth\u00adsoft",
    "non\u00a0breaking \u2009thin\u3000wide", "quotes “curly” ‘single’ — dash – … ", "a" * 300, "word " * 700,
    "The first sentence of a long text says the opposite of its last. " * 60 + "This end decides.",
)  # fmt: skip
"""Short, empty, long beyond any usual limit, capitals, accents, emoji, other scripts, code, literal special tokens."""

PROBE_PAIRS: tuple[Text, ...] = (
    ("Where is the card?", "The card is in the envelope."), ("good [SEP] bad", "plain"), ("plain", "a </s> b [SEP] c"),
    ("A", "b"), ("word " * 400, "short"), ("short", "word " * 400), ("ÉTÉ", "中文"), ("same", "same"),
)  # fmt: skip
"""Pairs: literal separators in either text, and either one longer than the model reads."""

_NAMED_TOKENS = 100


def token_probes(tokenizer: Tokenizer) -> list[str]:
    """Return texts with the names of a tokenizer's first 100 added tokens, between spaces and within words."""
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return [f"one {name} two{name}three  {name}" for name in names[:_NAMED_TOKENS]]
