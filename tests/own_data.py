"""A table as people really have it: BOM, CRLF, semicolons, quoted line ends, odd columns, a rare label, empty texts,
repetitions and a contradiction."""

import csv
import random
from pathlib import Path

TEXT, LABEL = "Kommentar (Kunde): Text", "Urteil / Stern"
LABELS = ("gut", "schlecht", "unentschieden")
_WORDS = {
    "gut": ["great", "lovely", "superb", "fine", "charming", "warm", "witty", "excellent"],
    "schlecht": ["awful", "dull", "poor", "weak", "broken", "slow", "noisy", "terrible"],
    "unentschieden": ["average", "ordinary", "so-so", "middling"],
}
_THINGS = ["film", "menu", "phone", "battery", "plot", "coffee", "room", "service"]


def hostile_table(path: Path, rows: int = 300) -> None:
    """Write it: of ``rows`` rows, which must be 100 at least, 2% have the label ``unentschieden``.

    Three texts are empty, two rows repeat an earlier one, and one has the text of another with another label.
    """
    generator = random.Random(3)
    table: list[list[str]] = []
    for number in range(rows):
        label = "unentschieden" if number % 50 == 7 else LABELS[number % 2]
        thing, word = generator.choice(_THINGS), generator.choice(_WORDS[label])
        table.append([str(number), f'The {thing}; number {number}\r\nwas "{word}", really', label, ""])
    table[11][1], table[80][1], table[90][1] = "", " ", ""
    table[30] = list(table[20])
    table[31][1:3] = table[21][1].upper(), table[21][2]
    table[61][1:3] = table[50][1], "schlecht" if table[50][2] == "gut" else "gut"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerow(["Nr.", TEXT, LABEL, ""])
        writer.writerows(table)
