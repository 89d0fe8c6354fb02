"""A short English text for the golden inputs of models whose own data is not at hand."""

from __future__ import annotations

import re

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
"""Repeated where a model needs more."""

_FURTHER = (
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

SENTENCES = tuple(sentence for text in (*PARAGRAPHS, *_FURTHER) for sentence in re.findall(r"\S.*?[.?!](?= |$)", text))
"""Sentences of 2 to 40 words, each there once."""
