"""Very short stories, made by filling in plots. Knows nothing of chats."""

from __future__ import annotations

from random import Random

from train import words

PLOTS = (
    "Once upon a time there was a {adj} {animal} called {n}. {n} lived near {place}. One day {n} "
    "lost {poss} {obj}. {n} looked in {place2} and under {thing}, but it was not there. Then a "
    "{animal2} called {m} came by. \"I will help you,\" said {m}. Together they found the {obj} in "
    "{place3}. {n} was so happy that they shared {fruit} and became friends.",
    "{n} had a {adj} {obj}. Every morning {n} took it to {place}. One day it began to rain, and "
    "{n} ran home without it. In the evening {m} knocked at the door. \"Is this yours?\" asked "
    "{m}. {n} laughed and said, \"Yes, thank you!\" They drank tea together until the rain "
    "stopped.",
    "A {animal} and a {animal2} lived in {place}. The {animal} was {adj} and the {animal2} was "
    "{adj2}. They wanted to know who was faster. {n} watched the race. The {animal} ran first, but "
    "it stopped to eat {fruit}. So the {animal2} won. \"Slow and steady,\" said {n}.",
    "There once was a king who had a {adj} {obj}. He kept it in {place}. A thief came at night and "
    "took it. The king asked {n} to find it. {n} followed the tracks to {place2} and found the "
    "{obj} beside a sleeping {animal}. The king was glad and gave {n} a {adj2} {obj2}.",
    "Little {n} could not sleep. The wind blew round {place} and something went knock, knock. {n} "
    "took a candle and went to look. It was only a {animal} at the window. {n} let it in, and soon "
    "they were both asleep beside the fire.",
    "{n} planted a seed beside {place}. Every day {n} gave it water. {m} said, \"Nothing will grow "
    "there.\" But in spring a green leaf came up, and in summer there were {fruit} for everyone. "
    "Even {m} had some.",
    "In {place} there stood a {adj} {obj}. People said that it could speak. {n} went to see it and "
    "asked, \"What is the best thing in the world?\" The {obj} was quiet for a long time. Then it "
    "said, \"A good friend.\" {n} went home and told {m}.",
    "{n} and {m} went for a walk to {place}. They saw a {adj} {animal} that was stuck in the mud. "
    "{n} pulled and {m} pushed, and at last it was free. The {animal} looked at them once and ran "
    "away into {place2}. The next day they found {fruit} on their doorstep.",
)  # fmt: skip


def story(rng: Random, hero: str | None = None, about: str | None = None) -> str:
    """A story, of a hero by name or about a kind of animal if one is given."""
    plots = [p for p in PLOTS if about is None or "{animal}" in p]
    places = [f"the {p}" for p in rng.sample(words.PLACES, 3)]
    first, second = rng.sample(words.NAMES, 2)
    animal, animal2 = rng.sample(words.ANIMALS, 2)
    if about is not None:
        animal2 = rng.choice([a for a in words.ANIMALS if a != about])
    adj, adj2 = rng.sample(words.ADJECTIVES, 2)
    obj, obj2 = rng.sample(words.OBJECTS, 2)
    fruit = rng.choice(words.FRUITS)
    text = rng.choice(plots).format(
        n=hero or first, m=second if second != hero else first, animal=about or animal,
        animal2=animal2, adj=adj, adj2=adj2, obj=obj, obj2=obj2, place=places[0],
        place2=places[1], place3=places[2], thing=words.thing(rng),
        fruit=_plural(fruit),
        poss=rng.choice(("his", "her")),
    )  # fmt: skip
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}")
    return text


def _plural(fruit: str) -> str:
    if fruit == "cherry":
        return "cherries"
    return fruit + ("es" if fruit.endswith(("ch", "go")) else "s")
