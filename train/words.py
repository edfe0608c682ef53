"""Words that tasks and chats are filled with. Invents names; draws nothing else."""

from __future__ import annotations

from random import Random


def _split(words: str) -> list[str]:
    return words.split()


COLOURS = _split("red blue green yellow orange purple black white brown grey pink silver golden")
ANIMALS = _split(
    "cat dog horse cow sheep goat pig duck goose hen rabbit fox wolf bear deer mouse owl eagle "
    "frog turtle snake lion tiger elephant monkey parrot swan donkey camel otter"
)
FRUITS = _split("apple pear plum cherry peach orange lemon grape melon banana fig mango")
OBJECTS = _split(
    "lamp chair table clock mirror basket bottle kettle book letter key ring coat hat boot drum "
    "flute violin ladder bucket candle blanket pillow hammer rope map coin cup plate spoon"
)
ADJECTIVES = _split(
    "small large old new bright dark quiet heavy light round broken wooden iron soft cold warm "
    "clean dusty narrow wide plain fine odd rare"
)
VERBS = _split("run walk sing read write swim jump sleep cook paint climb laugh dance work rest")
PLACES = _split(
    "garden kitchen cellar library tower harbour forest market bridge mill chapel stable orchard "
    "school castle valley island village"
)
NAMES = _split(
    "Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Mary Ned Olive Peter Rose Sam "
    "Tom Una Victor Will Alice Bella Carl Dora Edgar Flora George Helen Ivy James Laura Mark Nora "
    "Oscar Paul Ruth Simon Tess Lucy Max Nina Otto Polly Ralph Sara Theo Vera Walter"
)
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "England": "London", "Ireland": "Dublin", "Scotland": "Edinburgh",
    "Norway": "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens",
    "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Russia": "Moscow", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima", "Chile": "Santiago",
    "Cuba": "Havana", "Australia": "Canberra", "Belgium": "Brussels", "Iceland": "Reykjavik",
    "Argentina": "Buenos Aires", "Switzerland": "Bern", "the Netherlands": "Amsterdam",
    "the United States": "Washington", "the Czech Republic": "Prague", "South Korea": "Seoul",
    "Thailand": "Bangkok", "Vietnam": "Hanoi",
}  # fmt: skip
CITIES = [*CAPITALS.values(), "Bath", "York", "Oxford", "Venice", "Milan", "Munich", "Hamburg",
          "Lyon", "Boston", "Chicago", "Kyoto", "Sydney", "Geneva", "Seville", "Porto"]  # fmt: skip
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _split(
    "January February March April May June July August September October November December"
)
NUMBERS = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
OPPOSITES = {
    "hot": "cold", "big": "small", "tall": "short", "fast": "slow", "old": "young",
    "happy": "sad", "rich": "poor", "light": "dark", "open": "closed", "full": "empty",
    "wet": "dry", "hard": "soft", "early": "late", "high": "low", "near": "far", "up": "down",
    "left": "right", "good": "bad", "strong": "weak", "loud": "quiet", "clean": "dirty",
    "day": "night", "black": "white", "first": "last", "long": "short", "thick": "thin",
    "true": "false", "win": "lose", "buy": "sell", "begin": "end", "push": "pull",
    "brave": "afraid", "deep": "shallow", "wide": "narrow", "cheap": "dear", "love": "hate",
}  # fmt: skip

_ONSETS = _split("b br c ch cl d dr f fl g gr h j k l m n p r s sh st t th tr v w x y z")
_VOWELS = _split("a e i o u a e i o ai ea ia io ou")
_CODAS = ["", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk", "st", "th", "ck"]


def name(rng: Random) -> str:
    """Mostly an invented name, such as Xanthe; else a common one."""
    if rng.random() < 0.2:
        return rng.choice(NAMES)
    syllables = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    ]
    return ("".join(syllables) + rng.choice(_CODAS)).capitalize()


def thing(rng: Random) -> str:
    """Such as `the dusty lamp`."""
    return f"the {rng.choice((*ADJECTIVES, *COLOURS))} {rng.choice((*OBJECTS, *PLACES))}"


def digits(rng: Random, low: int, high: int) -> str:
    """A number of `low` to `high` digits that does not begin with 0."""
    count = rng.randint(low, high)
    return str(rng.randint(10 ** (count - 1), 10**count - 1))


def word(rng: Random) -> str:
    """Some common noun, verb or adjective."""
    return rng.choice(rng.choice((ANIMALS, FRUITS, OBJECTS, ADJECTIVES, PLACES, COLOURS, VERBS)))
