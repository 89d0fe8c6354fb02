"""Synthetic reviews: a small seeded grammar of opinions, for trying things out without any data set.

Not real text. What decides a review is its structure, not its words: negation ("far from dull"), contrast
("the menu was great but the staff was rude": the main clause decides) and earlier expectations ("I expected
it to be awful"), so that counting good and bad words is a poor guide and reading in order is a good one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from edgeformer.data.rows import Row

WHERE = "synthetic-reviews (generated)"
NEGATIVE, POSITIVE = 0, 1


@dataclass(frozen=True)
class _Domain:
    whole: tuple[str, ...]
    aspects: tuple[str, ...]
    asides: tuple[str, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


# One line for each field of _Domain.
_PHRASES = """\
the film,this movie,the picture,the sequel,the documentary,this comedy
the plot,the acting,the script,the soundtrack,the dialogue,the ending,the camera work,the cast
we saw it on a rainy sunday,it runs for two hours,it is set in a small town,my brother picked it,\
the second half takes place at sea
moving,gripping,clever,charming,witty,touching,stylish,memorable
boring,predictable,clumsy,shallow,tedious,lifeless,pretentious,forgettable

the restaurant,this place,the cafe,our dinner,the buffet,the bistro
the service,the soup,the dessert,the menu,the coffee,the staff,the music,the pasta
we came with a group of six,it is right beside the station,i had the fish,we ordered at the counter,\
there is a garden behind the house
delicious,friendly,fresh,cosy,generous,attentive,flavourful,welcoming
bland,rude,stale,overpriced,greasy,careless,noisy,cold

this phone,the headset,the vacuum cleaner,this keyboard,the camera,the backpack
the battery,the screen,the manual,the sound,the zipper,the packaging,the app,the finish
it arrived on a monday,i bought the blue one,it came with two cables,i use it on the way to work,\
the box weighs three pounds
sturdy,reliable,quick,comfortable,precise,quiet,handy,durable
flimsy,faulty,slow,awkward,fragile,useless,wobbly,cheap"""
_DOMAINS = tuple(_Domain(*map(_words, lines.split("\n"))) for lines in _PHRASES.split("\n\n"))
_GOOD = _words(
    "good,great,excellent,wonderful,superb,brilliant,impressive,lovely,fantastic,satisfying,pleasant,perfect"
)
_BAD = _words("bad,terrible,awful,dreadful,poor,horrible,mediocre,annoying,disappointing,weak,unpleasant,miserable")
_INTENSE = _words("really,very,truly,so,quite,absolutely,surprisingly,simply,rather,remarkably")
_DENIALS = _words("not,never,hardly,not at all,by no means,anything but,far from,not even remotely,nowhere near")
_VERBS = _words("was,is,seemed,felt,turned out to be,proved")
_PREFIXES = _words("honestly,to be fair,in the end,overall,as for me,all in all,frankly,on the whole")


class _Writer:
    """Writes one review at a time; every choice comes from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def review(self, label: int) -> str:
        domain = self._random.choice(_DOMAINS)
        simple = [self._clause, self._agreement, self._contrast]
        involved = [self._concession, self._aftermath, self._expectation]
        (structure,) = self._random.choices([*simple, *involved], (6, 9, 3, 1, 1, 2))
        body = structure(domain, label)
        if self._chance(0.25):
            body = f"{self._pick(_PREFIXES)} , {body}"
        if self._chance(0.35):
            aside = self._pick(domain.asides)
            body = f"{aside} . {body}" if self._chance(0.6) else f"{body} . {aside}"
        return body + self._random.choice((" .", " .", " !", ""))

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _pick(self, choices: tuple[str, ...]) -> str:
        return str(self._random.choice(choices))

    def _adjective(self, domain: _Domain, polarity: int) -> str:
        own, general = (domain.good, _GOOD) if polarity == POSITIVE else (domain.bad, _BAD)
        return self._pick(own if self._chance(0.5) else general)

    def _opinion(self, domain: _Domain, polarity: int) -> str:
        """An adjective of this polarity, or a denied one of the other."""
        if self._chance(0.15):
            return f"{self._pick(_DENIALS)} {self._adjective(domain, 1 - polarity)}"
        adjective = self._adjective(domain, polarity)
        return f"{self._pick(_INTENSE)} {adjective}" if self._chance(0.5) else adjective

    def _clause(self, domain: _Domain, polarity: int) -> str:
        subject = self._pick(domain.aspects if self._chance(0.7) else domain.whole)
        text = f"{subject} {self._pick(_VERBS)} {self._opinion(domain, polarity)}"
        return f"{text} and {self._opinion(domain, polarity)}" if self._chance(0.2) else text

    def _agreement(self, domain: _Domain, label: int) -> str:
        joint = self._pick(("and", ", and", ". besides ,", ". also ,"))
        return f"{self._clause(domain, label)} {joint} {self._clause(domain, label)}"

    def _contrast(self, domain: _Domain, label: int) -> str:
        joint = self._pick(("but", ", but overall", ", yet", ". however ,", "; still ,"))
        return f"{self._clause(domain, 1 - label)} {joint} {self._clause(domain, label)}"

    def _concession(self, domain: _Domain, label: int) -> str:
        """The main clause decides, wherever it stands."""
        joint = self._pick(("although", "even though", "while"))
        main, other = self._clause(domain, label), self._clause(domain, 1 - label)
        return f"{joint} {other} , {main}" if self._chance(0.7) else f"{main} , {joint} {other}"

    def _aftermath(self, domain: _Domain, label: int) -> str:
        end = "would come back any time" if label == POSITIVE else "will not come back"
        return f"{self._clause(domain, 1 - label)} , and yet i {end}"

    def _expectation(self, domain: _Domain, label: int) -> str:
        believed = self._adjective(domain, 1 - label)
        source = self._pick(("i expected it to be", "my friends called it", "the reviews made it sound"))
        verdict = self._pick(("i was wrong", "they were wrong", "it is the opposite"))
        closing = self._clause(domain, label) if self._chance(0.5) else verdict
        return f"{source} {believed} , but {closing}"


def synthetic_reviews(rows: int, seed: int) -> Iterator[Row]:
    """Generate ``rows`` reviews with label 0 (negative) or 1 (positive); equal arguments give equal rows."""
    writer = _Writer(seed)
    labels = random.Random(f"labels-{seed}")
    for _ in range(rows):
        label = labels.randrange(2)
        yield Row(writer.review(label), label, WHERE)
