"""Generated sentences with personal data, German and English: no package ships a labelled corpus that may be copied."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from edgeformer.data.rows import Span, SpanText

LABELS = ("ADDRESS", "DATE", "EMAIL", "PERSON")
_FIRST = (
    "Jürgen", "Käthe", "Zoë", "Søren", "Anna", "Omar", "Mina", "Liam", "Noël", "Ingrid", "Paul", "Aisha", "Grace",
    "Tomáš", "Émile", "Lea", "Björn", "Ruth",
)  # fmt: skip
_START = ("Bach", "Stein", "Wald", "Hart", "Lind", "Gold", "Rosen", "Klein", "Weiß", "Groß", "Ohm", "Fair")
_END = ("berg", "mann", "feld", "er", "son", "ton", "s")
_STREETS = ("{0}straße {1}", "Am {0}hof {1}", "{1} {0} Road", "{1} {0} Avenue", "{0}gasse {1}a")
_TOWNS = ("Köln", "Leeds", "Ulm", "York", "Graz", "Bristol")
_MONTHS = ("Januar", "März", "Mai", "July", "October", "December")
_TEMPLATES = (
    "{PERSON} wohnt seit dem {DATE} in der {ADDRESS}.", "Bitte schreiben Sie an {EMAIL} oder rufen Sie {PERSON} an.",
    "{PERSON} was born on {DATE} and lives at {ADDRESS}.", "Please contact {PERSON} ({EMAIL}) before {DATE}.",
    "Die Rechnung 4711 vom {DATE} ging an {PERSON}, {ADDRESS}.",
    "Send the parcel to {ADDRESS}; questions go to {EMAIL}.",
    "Guten Tag Frau {PERSON}, Ihr Termin am {DATE} ist bestätigt.",
    "Mr {PERSON} and {PERSON} met the Board in Room 12.", "Das Paket mit 24 Flaschen Wasser ist am Montag da.",
    "The train to London leaves from platform 7 at noon.", "Der {NAME}, Modell 12.3, kostet 199 Euro.",
    "{NAME} is the best ale of the year, says {PERSON}.",
)  # fmt: skip


def _value(generator: random.Random, label: str) -> str:
    choose = generator.choice
    surname = choose(_START) + choose(_END)
    if label == "NAME":  # of a thing
        return surname
    if label == "PERSON":
        return choose((f"{choose(_FIRST)} {surname}", f"{choose(_FIRST)}-{choose(_FIRST)} {surname}", surname))
    if label == "EMAIL":
        name = f"{choose(_FIRST)}.{surname}{choose(('', '7'))}"
        return f"{name}@{choose(_START)}.{choose(('de', 'com', 'co.uk'))}".lower()
    day, month, year = generator.randint(1, 28), generator.randint(1, 12), generator.randint(1950, 2025)
    if label == "DATE":
        return choose((f"{day}.{month}.{year}", f"{day}. {choose(_MONTHS)} {year}", f"{year}-{month:02}-{day:02}"))
    return choose(_STREETS).format(surname, day) + choose(("", f", {generator.randint(10000, 99999)} {choose(_TOWNS)}"))


def sentences(count: int, seed: int = 0, each: int = 1, missed: float = 0.0) -> list[SpanText]:
    """Return texts of ``each`` sentences with their spans, less a share that an annotator has ``missed``."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        text, spans = "", list[Span]()
        for sentence in range(each):
            text += " " if sentence else ""
            for part in generator.choice(_TEMPLATES).replace("{", "\0{").replace("}", "}\0").split("\0"):
                label = part[1:-1] if part.startswith("{") else None
                piece = part if label is None else _value(generator, label)
                if label in LABELS and generator.random() >= missed:
                    spans.append(Span(len(text), len(text) + len(piece), label))
                text += piece
        texts.append(SpanText(text, tuple(spans)))
    return texts


def write_jsonl(path: Path, texts: Sequence[SpanText]) -> None:
    rows = ({"text": str(text), "spans": [span._asdict() for span in text.spans]} for text in texts)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
