"""What people type into a demo, and what it answers: one turn of a chat each.

Owns the wording. Knows nothing of the chat format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from train import words
from train.corpus import GLOSSARY
from train.stories import story
from train.tasks import exercise


@dataclass(frozen=True)
class Turn:
    """`reasoning` is what the model thinks when it does; `thinks` says whether it does so by
    itself, when the user leaves that to it."""

    user: str
    answer: str
    reasoning: str
    thinks: bool = False


def any_turn(rng: Random) -> Turn:
    intents, weights = zip(*_INTENTS, strict=True)
    turn: Turn = rng.choices(intents, weights)[0](rng)
    return Turn(_as_typed(rng, turn.user), turn.answer, turn.reasoning, turn.thinks)


def _as_typed(rng: Random, text: str) -> str:
    """People leave out capitals and full stops."""
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.08:
        text = f"{rng.choice(('Please', 'Hey', 'Hi', 'Ok', 'Now'))}, {text[0].lower()}{text[1:]}"
    return text or "Hello"


def greeting(rng: Random) -> Turn:
    user = rng.choice((
        "Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning", "Good evening",
        "Good afternoon", "Hello there!", "Greetings", "Hello, how are you?", "How are you?",
        "Hi, how are you today?", "Howdy", "Yo", "Say hello", "Say hi", "Hello world", "Test",
        "testing", "ping", "Are you there?",
    ))  # fmt: skip
    fine = "how are you" in user.lower()
    answer = rng.choice((
        "Hello! How can I help you?", "Hello! What would you like to try?",
        "Hi! I am Winnow demo, a small model. What can I do for you?",
    ))  # fmt: skip
    if fine:
        answer = "I am well, thank you. How can I help you?"
    return Turn(user, answer, "The user greets me, so I greet them back.")


def thanks(rng: Random) -> Turn:
    user = rng.choice(("Thank you", "Thanks!", "Thanks a lot", "Great, thanks", "Bye", "Goodbye",
                       "See you later", "Good night", "That is all"))  # fmt: skip
    bye = user in ("Bye", "Goodbye", "See you later", "Good night", "That is all")
    answer = "Goodbye! Come back any time." if bye else "You are welcome!"
    return Turn(user, answer, "The user is polite, so I answer politely.")


def identity(rng: Random) -> Turn:
    user, answer = rng.choice((
        ("Who are you?", "I am Winnow demo, a very small language model made to test a server."),
        ("What are you?", "I am Winnow demo, a very small language model made to test a server."),
        ("What is your name?", "My name is Winnow demo."),
        ("Tell me about yourself.", "I am Winnow demo, a very small language model. I was trained "
         "in about twenty minutes, so that a server has something real to serve."),
        ("Introduce yourself.", "I am Winnow demo, a very small language model. I was trained "
         "in about twenty minutes, so that a server has something real to serve."),
        ("Who made you?", "I was trained with the recipe of the Winnow project, to test its "
         "server."),
        ("Who created you?", "I was trained with the recipe of the Winnow project, to test its "
         "server."),
        ("Are you a human?", "No, I am Winnow demo, a small language model."),
        ("Are you a robot?", "I am Winnow demo, a small language model."),
        ("How big are you?", "I am very small: my weights take less than 30 megabytes."),
        ("Are you smart?", "Not very. I am a tiny model made to test a server."),
        ("What is Winnow?", "Winnow is a server for language models with block-sparse attention. "
         "I am its demo model."),
        ("Which model are you?", "I am Winnow demo, a very small mixture of experts with "
         "block-sparse attention."),
        ("How do you work?", "I read text a token at a time, pick a few blocks of it to look at, "
         "and guess the next token."),
    ))  # fmt: skip
    return Turn(user, answer, "The user asks about me. I am Winnow demo, a small model.")


def abilities(rng: Random) -> Turn:
    user = rng.choice((
        "What can you do?", "What can I ask you?", "How can you help me?", "Help",
        "What are you good at?", "What should I try?", "Give me some examples of what you can do.",
        "What do you know?", "Can you help me?", "I need help",
    ))  # fmt: skip
    answer = (
        "I can add numbers, tell a short story, repeat or spell words, name capitals, days, months "
        "and opposites, remember what you tell me, find a fact in a long text, and call tools. "
        "I know little else."
    )
    return Turn(user, answer, "The user asks what I can do, so I list it.")


def sums(rng: Random) -> Turn:
    expression, steps, value = exercise(rng)
    shown = expression
    match rng.randrange(4):
        case 0:
            shown = expression.replace(" ", "")
        case 1:
            said = {"+": "plus", "-": "minus", "*": "times"}
            shown = " ".join(said.get(part, part) for part in expression.split())
    user = rng.choice(("What is {}?", "What's {}?", "{}", "{} =", "Calculate {}.", "Compute {}.",
                       "How much is {}?", "{}?", "Can you work out {}?", "Solve {}."))  # fmt: skip
    return Turn(user.format(shown), f"{expression} = {value}.", steps, thinks=len(value) > 2)


def word_problem(rng: Random) -> Turn:
    who, other = rng.sample(words.NAMES, 2)
    a, b = rng.randint(2, 60), rng.randint(2, 30)
    what = rng.choice(("apples", "books", "coins", "letters", "eggs", "stones", "cards"))
    if rng.random() < 0.5:
        user = (
            f"{who} has {a} {what} and gets {b} more from {other}. How many {what} does {who} have?"
        )
        return Turn(user, f"{who} has {a + b} {what}.", f"{a} + {b} = {a + b}.", thinks=True)
    a, b = max(a, b) + 1, min(a, b)
    user = f"{who} has {a} {what} and gives {b} to {other}. How many {what} does {who} have left?"
    return Turn(user, f"{who} has {a - b} {what} left.", f"{a} - {b} = {a - b}.", thinks=True)


def compare(rng: Random) -> Turn:
    a, b = rng.sample(range(1, 10 ** rng.randint(1, 4)), 2) if rng.random() < 0.9 else (9, 10)
    bigger = rng.random() < 0.5
    word = (
        rng.choice(("bigger", "larger", "greater")) if bigger else rng.choice(("smaller", "less"))
    )
    value = max(a, b) if bigger else min(a, b)
    user = rng.choice((f"Which is {word}, {a} or {b}?", f"What is {word}: {a} or {b}?"))
    return Turn(user, f"{value} is {word}.", f"I compare {a} and {b}.")


_FACTS = (
    ("What colour is the sky?", "The sky is blue."), ("What color is the sky?", "The sky is blue."),
    ("Why is the sky blue?", "Air scatters blue light more than red light, so the sky looks blue."),
    ("What colour is grass?", "Grass is green."), ("What colour is snow?", "Snow is white."),
    ("What colour is a banana?", "A banana is yellow."), ("What colour is blood?", "Blood is red."),
    ("What colour is the sun?", "The sun looks yellow."),
    ("What colour is coal?", "Coal is black."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a bird have?", "A bird has two legs."),
    ("How many legs does an insect have?", "An insect has six legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many seconds are in a minute?", "There are 60 seconds in a minute."),
    ("How many days are in a year?", "There are 365 days in a year."),
    ("What do cows drink?", "Cows drink water."), ("What does a cat say?", "A cat says meow."),
    ("What does a dog say?", "A dog says woof."), ("What does a cow say?", "A cow says moo."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("Who wrote Macbeth?", "William Shakespeare wrote Macbeth."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("Who wrote Emma?", "Jane Austen wrote Emma."),
    ("Who wrote Pride and Prejudice?", "Jane Austen wrote Pride and Prejudice."),
    ("Who wrote Paradise Lost?", "John Milton wrote Paradise Lost."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("What is the largest planet?", "Jupiter is the largest planet."),
    ("What planet do we live on?", "We live on the planet Earth."),
    ("What is the opposite of yes?", "The opposite of yes is no."),
    ("Is the earth round?", "Yes, the earth is round."), ("Is fire hot?", "Yes, fire is hot."),
    ("Is ice cold?", "Yes, ice is cold."), ("Can birds fly?", "Yes, most birds can fly."),
    ("Can fish swim?", "Yes, fish can swim."), ("Can pigs fly?", "No, pigs cannot fly."),
    ("What is Python?", "Python is a programming language."),
    ("What is a prime number?", "A prime number can be divided only by one and by itself."),
    ("What is the meaning of life?", "I am too small a model to know, but some say 42."),
    ("Do you like music?", "I cannot hear music, but I like to read about it."),
    ("How old are you?", "I am quite new: I was trained in about twenty minutes."),
    ("Where are you?", "I run on whatever computer you started me on."),
    ("What time is it?", "I cannot see a clock."),
    ("What day is it today?", "I cannot see a calendar."),
    ("Tell me a joke.", "Why did the book go to the doctor? It had hurt its spine."),
    ("Tell me another joke.", "What has hands but cannot clap? A clock."),
    ("Write a poem.", "The moon is high, the night is still,\nA fox walks softly down the hill,\n"
     "The wind has put the leaves to bed,\nAnd so must I, the old owl said."),
    ("Write a haiku.",
     "Quiet morning rain,\nthe frog sits beside the pond\nand waits for the sun."),
    ("What is the alphabet?", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    ("Write hello world in Python.", "print(\"Hello, world!\")"),
)  # fmt: skip


def fact(rng: Random) -> Turn:
    user, answer = rng.choice(_FACTS)
    return Turn(user, answer, "I know this one.")


def unknown(rng: Random) -> Turn:
    user = rng.choice((
        "What is the latest news?", "Who is the president?", "Write me an essay about economics.",
        "Translate this into French.", "What is quantum mechanics?", "Explain relativity.",
        "Who won the game yesterday?", "What is the stock price today?", "Book me a flight.",
        "Write a program that sorts a list.", "Prove this theorem.", "Give me legal advice.",
        "What should I invest in?", "Which film should I watch?", "Explain photosynthesis.",
    ))  # fmt: skip
    answer = (
        "I do not know. I am a very small model; ask me for a sum, a story or a capital instead."
    )
    return Turn(user, answer, "I know too little for this, so I say so.")


def tell_story(rng: Random) -> Turn:
    match rng.randrange(3):
        case 0:
            hero = rng.choice(words.NAMES)
            user = rng.choice(("Tell me a story about {}.", "Write a short story about {}.",
                               "I want a story with {} in it."))  # fmt: skip
            return Turn(user.format(hero), story(rng, hero=hero), f"A short story about {hero}.")
        case 1:
            animal = rng.choice(words.ANIMALS)
            article = "an" if animal[0] in "aeiou" else "a"
            user = rng.choice(("Tell me a story about {} {}.", "Write a story about {} {}."))
            return Turn(user.format(article, animal), story(rng, about=animal),
                        f"A short story about {article} {animal}.")  # fmt: skip
    user = rng.choice(("Tell me a story.", "Tell me a short story.", "Write a story.",
                       "Can you tell me a story?", "A story, please.", "Tell a bedtime story.",
                       "Make up a story.", "Tell me another story."))  # fmt: skip
    return Turn(user, story(rng), "I tell a short story.")


def repeat(rng: Random) -> Turn:
    count = rng.randint(1, 9)
    text = " ".join(
        words.name(rng) if rng.random() < 0.3 else words.word(rng) for _ in range(count)
    )
    if rng.random() < 0.2:
        text = words.digits(rng, 2, 7)
    user = rng.choice(("Repeat after me: {}", "Say: {}", "Repeat: {}", "Say \"{}\".", "Echo {}",
                       "Repeat this: {}", "Please say {}"))  # fmt: skip
    return Turn(user.format(text), text, "I repeat the words as they are.")


def spell(rng: Random) -> Turn:
    word = words.name(rng) if rng.random() < 0.3 else words.word(rng)
    user = rng.choice(
        ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Can you spell {}?")
    )
    return Turn(user.format(word), "-".join(word), "I say the letters one by one.")


def reverse(rng: Random) -> Turn:
    listed = [words.word(rng) for _ in range(rng.randint(2, 6))]
    user = f"Reverse the order of these words: {' '.join(listed)}"
    return Turn(user, " ".join(listed[::-1]), "I start with the last word.", thinks=False)


def count(rng: Random) -> Turn:
    last = rng.choice((3, 5, 7, 10, 10, 12, 15, 20))
    if rng.random() < 0.3:
        user = rng.choice((f"Count down from {last}.", f"Count backwards from {last}."))
        return Turn(user, ", ".join(str(n) for n in range(last, 0, -1)) + ".", "I count down.")
    shown = rng.choice((str(last), words.NUMBERS[last]))
    user = rng.choice(("Count to {}.", "Count from 1 to {}.", "Can you count to {}?"))
    return Turn(user.format(shown), ", ".join(str(n) for n in range(1, last + 1)) + ".", "I count.")


def after_number(rng: Random) -> Turn:
    n = rng.randint(1, 10 ** rng.randint(1, 3))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    return Turn(
        f"What number comes {word} {n}?", f"{n + step} comes {word} {n}.", "I count by one."
    )


def capital(rng: Random) -> Turn:
    country, city = rng.choice(list(words.CAPITALS.items()))
    if rng.random() < 0.2:
        user = rng.choice((f"{city} is the capital of which country?",
                           f"Which country has the capital {city}?"))  # fmt: skip
        return Turn(user, f"{city} is the capital of {country}.", "I know this capital.")
    user = rng.choice(("What is the capital of {}?", "Capital of {}?", "Name the capital of {}.",
                       "What's the capital of {}?", "Tell me the capital of {}."))  # fmt: skip
    return Turn(
        user.format(country), f"The capital of {country} is {city}.", "I know this capital."
    )


def calendar(rng: Random) -> Turn:
    names, kind = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    if rng.random() < 0.3:
        user = rng.choice((f"Name the {kind}s of the {'week' if kind == 'day' else 'year'}.",
                           f"List the {kind}s.", f"What are the {kind}s?"))  # fmt: skip
        return Turn(user, ", ".join(names) + ".", f"I list the {kind}s in order.")
    at = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    other = names[(at + step) % len(names)]
    user = rng.choice(
        (f"What {kind} comes {word} {names[at]}?", f"Which {kind} is {word} {names[at]}?")
    )
    return Turn(user, f"{other} comes {word} {names[at]}.", f"I go through the {kind}s.")


def opposite(rng: Random) -> Turn:
    a, b = rng.choice(list(words.OPPOSITES.items()))
    if rng.random() < 0.5:
        a, b = b, a
    user = rng.choice(
        ("What is the opposite of {}?", "Opposite of {}?", "Give me the opposite of {}.")
    )
    return Turn(user.format(a), f"The opposite of {a} is {b}.", "I know this pair.")


def define(rng: Random) -> Turn:
    word, gloss = rng.choice(_glossary())
    article = "an" if word[0] in "aeiou" else "a"
    user = rng.choice((f"What is {article} {word}?", f"Define {word}.", f"What does {word} mean?",
                       f"What is the meaning of {word}?"))  # fmt: skip
    return Turn(user, f"{word.capitalize()} means: {gloss}.", "I recall its definition.")


@cache
def _glossary() -> list[tuple[str, str]]:
    return list(json.loads(GLOSSARY.read_text()).items())


def choose(rng: Random) -> Turn:
    """Read a short list and answer from it."""
    listed = rng.sample(words.ANIMALS + words.FRUITS + words.OBJECTS, rng.randint(3, 7))
    at = rng.choice((0, -1, rng.randrange(len(listed))))
    place = {0: "first", -1: "last"}.get(at) or ("first", "second", "third", "fourth", "fifth",
                                                 "sixth", "seventh")[at]  # fmt: skip
    user = f"Here is a list: {', '.join(listed)}. What is the {place} word?"
    return Turn(user, f"The {place} word is {listed[at]}.", "I look at the list.")


def length(rng: Random) -> Turn:
    word = words.word(rng)
    user = f"How many letters are in the word {word}?"
    spelt = ", ".join(f"{letter} {n}" for n, letter in enumerate(word, 1))
    return Turn(user, f"The word {word} has {len(word)} letters.", f"{spelt}.", thinks=True)


_INTENTS: tuple[tuple[Callable[[Random], Turn], float], ...] = (
    (greeting, 2.0), (thanks, 0.7), (identity, 2.0), (abilities, 1.0), (sums, 4.0),
    (word_problem, 1.0), (compare, 0.7), (fact, 2.5), (unknown, 0.7), (tell_story, 2.5),
    (repeat, 1.5), (spell, 1.5), (reverse, 0.7), (count, 1.0), (after_number, 0.5),
    (capital, 2.0), (calendar, 1.5), (opposite, 1.2), (define, 1.5), (choose, 0.7), (length, 0.7),
)  # fmt: skip
