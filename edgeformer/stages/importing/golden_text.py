"""A short English text for the golden inputs of an imported model, whose own data is not at hand."""

from __future__ import annotations

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
"""Written for this purpose. About 200 words; repeated where the model needs more."""
