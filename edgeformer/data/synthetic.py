"""Synthetic reviews: a small seeded grammar of opinions, to try models without a data set; and short English texts.

The label of a review depends on its structure, not on single words: negation ("far from dull"), contrast ("the menu was
great but the staff was rude": the main clause decides) and earlier expectations ("I expected it to be awful"). Counting
good and bad words predicts the label badly, reading in order predicts it well.
"""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from edgeformer.data.rows import Row

WHERE = "synthetic-reviews (generated)"
POSITIVE = 1


class _Domain(NamedTuple):
    """Phrases about one kind of subject."""

    subjects: list[str]
    aspects: list[str]
    asides: list[str]
    good: list[str]
    bad: list[str]


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
_DOMAINS = [_Domain(*(line.split(",") for line in lines.split("\n"))) for lines in _PHRASES.split("\n\n")]
_WORDS = """\
good,great,excellent,wonderful,superb,brilliant,impressive,lovely,fantastic,satisfying,pleasant,perfect
bad,terrible,awful,dreadful,poor,horrible,mediocre,annoying,disappointing,weak,unpleasant,miserable
really,very,truly,so,quite,absolutely,surprisingly,simply,rather,remarkably
not,never,hardly,not at all,by no means,anything but,far from,not even remotely,nowhere near
was,is,seemed,felt,turned out to be,proved
honestly,to be fair,in the end,overall,as for me,all in all,frankly,on the whole"""
_GOOD, _BAD, _INTENSE, _DENIALS, _VERBS, _PREFIXES = (line.split(",") for line in _WORDS.split("\n"))


def synthetic_reviews(rows: int, seed: int) -> Iterator[Row]:
    """Yield ``rows`` reviews with label 0 (negative) or 1 (positive); equal arguments give equal rows."""
    generator, labels = random.Random(seed), random.Random(f"labels-{seed}")
    choose, draw = generator.choice, generator.random
    for _ in range(rows):
        label = labels.randrange(2)
        domain = choose(_DOMAINS)
        structures = ("clause", "agreement", "contrast", "concession", "aftermath", "expectation")
        (structure,) = generator.choices(structures, (6, 9, 3, 1, 1, 2))
        if structure == "clause":
            body = _clause(generator, domain, label)
        elif structure == "agreement":
            joint = choose(("and", ", and", ". besides ,", ". also ,"))
            body = f"{_clause(generator, domain, label)} {joint} {_clause(generator, domain, label)}"
        elif structure == "contrast":
            joint = choose(("but", ", but overall", ", yet", ". however ,", "; still ,"))
            body = f"{_clause(generator, domain, 1 - label)} {joint} {_clause(generator, domain, label)}"
        elif structure == "concession":
            joint = choose(("although", "even though", "while"))
            main, subordinate = _clause(generator, domain, label), _clause(generator, domain, 1 - label)
            is_main_last = draw() < 0.7
            body = f"{joint} {subordinate} , {main}" if is_main_last else f"{main} , {joint} {subordinate}"
        elif structure == "aftermath":
            end = "would come back any time" if label == POSITIVE else "will not come back"
            body = f"{_clause(generator, domain, 1 - label)} , and yet i {end}"
        else:
            believed = _adjective(generator, domain, 1 - label)
            source = choose(("i expected it to be", "my friends called it", "the reviews made it sound"))
            verdict = choose(("i was wrong", "they were wrong", "it is the opposite"))
            body = f"{source} {believed} , but {_clause(generator, domain, label) if draw() < 0.5 else verdict}"
        if draw() < 0.25:
            body = f"{choose(_PREFIXES)} , {body}"
        if draw() < 0.35:
            aside = choose(domain.asides)
            body = f"{aside} . {body}" if draw() < 0.6 else f"{body} . {aside}"
        yield Row(body + choose((" .", " .", " !", "")), label, WHERE)


def _adjective(generator: random.Random, domain: _Domain, polarity: int) -> str:
    specific, general = (domain.good, _GOOD) if polarity == POSITIVE else (domain.bad, _BAD)
    return generator.choice(specific if generator.random() < 0.5 else general)


def _clause(generator: random.Random, domain: _Domain, polarity: int) -> str:
    """Return one or two opinions: an adjective of this polarity, or a negated one of the opposite polarity."""
    choose, draw = generator.choice, generator.random
    text = f"{choose(domain.aspects if draw() < 0.7 else domain.subjects)} {choose(_VERBS)}"
    opinions: list[str] = []
    while not opinions or (len(opinions) == 1 and draw() < 0.2):
        if draw() < 0.15:
            opinions.append(f"{choose(_DENIALS)} {_adjective(generator, domain, 1 - polarity)}")
        else:
            adjective = _adjective(generator, domain, polarity)
            opinions.append(f"{choose(_INTENSE)} {adjective}" if draw() < 0.5 else adjective)
    return f"{text} {' and '.join(opinions)}"


PARAGRAPHS = (
    "A river begins as rain on high ground. The water runs off the slopes in thin streams, finds the lowest way "
    "between the stones, and joins other streams until it has a bed of its own. In spring, when the snow melts, "
    "it rises within a few days and floods the meadows on both sides; in a dry summer it may shrink until "
    "children can wade across it. People have always settled on its banks, because it gave them water, fish, and "
    "a road that nobody had to build.",
    "The first bridge of the town was made of wood and burned down in the winter of 1742. The second one, of "
    "stone, took nine years and cost more than the council had in its chest, so that every cart that crossed it "
    "paid two pennies until the debt was cleared. It has five arches; the middle one is wider than the others, to "
    "let the barges through.",
    "Today trains cross the valley on a steel viaduct a mile to the north, and the old bridge is closed to cars. "
    "On Saturdays there is a market on it. You can buy bread, honey, second-hand books and, in the autumn, more "
    "apples than anyone can eat.",
)
"""English text for the golden inputs of models whose own data is missing; repeated where a model needs more."""

_SHORT_TEXTS = (
    "Bread needs four things: flour, water, salt and time. Most people give it too little of the last. The dough "
    "should rise slowly in a cool room until it has doubled. Knock it back, shape it and let it rest once more "
    "before it goes into a very hot oven. It is done when it sounds hollow. Can you wait until it is cold? Nobody "
    "ever does.",
    "The office closes at five. Please return the keys to the front desk, and sign the list! If you lose one, a new"
    " key costs 25 euros. Visitors must be met at the door by the person they have come to see.",
    "Light takes about eight minutes from the sun to the earth. The nearest other star is more than four light "
    "years away. We see it as it was when today's first-graders were babies. Some of the stars that are drawn on "
    "old maps are no longer there.",
    "I ordered the blue one and got the green one. The parcel was late, the box was torn, and a cable was missing. "
    "When I called, a friendly woman took care of it at once. Two days later everything was here. Would I buy there"
    " again? Yes, because mistakes happen, and they were put right without any fuss.",
    "Water boils at 100 degrees at sea level. High in the mountains it boils sooner, so that potatoes take longer "
    "there. A lid saves a third of the energy.",
    "The orchestra tuned for a long time. Then the lights went down and the first violin stood up alone. What "
    "followed was the finest quarter of an hour of the whole festival. The second half was dull. A man in the third"
    " row slept.",
    "To reset the device, hold the button for ten seconds until the lamp blinks twice. Your settings are lost, your"
    " files are not. Then connect it to the network again. If it does not appear in the list, restart the router.",
    "In 1969 three men flew to the moon, and two of them walked on it. The computer on board had less memory than a"
    " modern doorbell. It was restarted several times on the way down.",
    "My grandmother kept bees behind the house. She moved slowly among them and was hardly ever stung. In good "
    "summers there were forty jars of honey. We gave most of them away.",
    "The bill was passed by a narrow margin after a debate that lasted all night. It takes effect in January. "
    "Farmers say that it comes too early; the cities say that it comes too late. Both will have to pay for it.",
    "Run 30 minutes three times a week, and begin slowly. Drink enough. Stop when something hurts. After six weeks "
    "you will climb the stairs without noticing them.",
    "The quarterly report is attached. Revenue rose by 4.5 percent, costs by three. Please read page seven before "
    "the meeting on Thursday: we have to decide whether the second warehouse is needed. Anna will present the "
    "figures. Questions are welcome, but not about the coffee machine.",
    "The cat sat in the window and watched the snow. A door banged somewhere. She did not move. When the boy came "
    "home from school she stretched, yawned and walked past him into the kitchen.",
)

SENTENCES = tuple(
    sentence for text in (*PARAGRAPHS, *_SHORT_TEXTS) for sentence in re.findall(r"\S.*?[.?!](?= |$)", text)
)
"""Different sentences of 2 to 40 words."""
