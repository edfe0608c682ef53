"""Tools with varied names and schemas, requests that need them, results, and answers to those.

Owns the wording. Knows nothing of the chat format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from train import words


@dataclass(frozen=True)
class Use:
    """One call: what the user says, the arguments that follow from it, the tool's result, and
    what to say then."""

    user: str
    arguments: dict[str, Any]
    result: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """`schema` is OpenAI's; `use` makes a request for it."""

    schema: dict[str, Any]
    use: Callable[[Random], Use]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def some_tools(rng: Random) -> list[Tool]:
    """One to four tools of different kinds."""
    kinds = rng.sample(_KINDS, rng.choice((1, 1, 2, 3, 4)))
    return [kind(rng) for kind in kinds]


def _schema(
    rng: Random, name: str, description: str, parameters: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    if rng.random() < 0.2:
        for parameter in parameters.values():
            parameter.pop("description", None)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": parameters,
                "required": list(parameters),
            },
        },
    }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _result(rng: Random, values: dict[str, Any]) -> str:
    """As JSON, or as plain words where there is one value."""
    if len(values) == 1 and rng.random() < 0.5:
        return str(*values.values())
    return json.dumps(values)


def _weather(rng: Random) -> Tool:
    name = rng.choice(("get_weather", "weather", "current_weather", "lookup_weather", "forecast"))
    arg = rng.choice(("city", "location", "place", "town"))
    parameters = {arg: _text(f"The {arg} to look up.")}
    with_unit = rng.random() < 0.3
    if with_unit:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}

    def use(rng: Random) -> Use:
        city = rng.choice(words.CITIES)
        unit = rng.choice(("celsius", "fahrenheit"))
        user = rng.choice((
            "What is the weather in {}?", "What's the weather like in {}?", "Is it raining in {}?",
            "How is the weather in {} today?", "Weather in {}?", "Do I need an umbrella in {}?",
            "Tell me the weather in {}.", "How warm is it in {}?",
        )).format(city)  # fmt: skip
        arguments = {arg: city}
        if with_unit:
            user = f"{user.rstrip('?.')} in {unit}?"
            arguments["unit"] = unit
        degrees, sky = (
            rng.randint(-5, 35),
            rng.choice(("sunny", "cloudy", "rainy", "windy", "clear")),
        )
        result = _result(rng, {"temperature": degrees, "conditions": sky})
        return Use(user, arguments, result, f"It is {sky} in {city}, with {degrees} degrees.")

    return Tool(_schema(rng, name, "Get the current weather.", parameters), use)


def _calculator(rng: Random) -> Tool:
    name = rng.choice(("calculate", "calculator", "evaluate", "compute", "math"))
    arg = rng.choice(("expression", "expr", "formula", "input"))

    def use(rng: Random) -> Use:
        a, b = rng.randint(10, 99999), rng.randint(10, 9999)
        sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
        expression = f"{a} {sign} {b}"
        user = rng.choice(("What is {}?", "Calculate {}.", "Work out {}.", "How much is {}?",
                           "Use the tool to compute {}.")).format(expression)  # fmt: skip
        return Use(user, {arg: expression}, _result(rng, {"result": value}),
                   f"{expression} = {value}.")  # fmt: skip

    return Tool(_schema(rng, name, "Evaluate an arithmetic expression.",
                        {arg: _text("The expression to evaluate.")}), use)  # fmt: skip


def _search(rng: Random) -> Tool:
    name = rng.choice(("search", "web_search", "search_web", "find", "lookup", "google"))
    arg = rng.choice(("query", "q", "text", "term"))

    def use(rng: Random) -> Use:
        about = rng.choice(
            (
                f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.OBJECTS)}s",
                f"the history of {rng.choice(words.CITIES)}",
                words.name(rng),
                f"how to {rng.choice(words.VERBS)}",
                f"{rng.choice(words.ANIMALS)} food",
            )
        )
        user = rng.choice(("Search for {}.", "Look up {}.", "Find out about {}.",
                           "Can you search the web for {}?", "Search the web for {}.",
                           "Find {} online.")).format(about)  # fmt: skip
        found = f"{words.name(rng)}'s page about {about}"
        return Use(user, {arg: about}, _result(rng, {"title": found}), f"I found this: {found}.")

    return Tool(_schema(rng, name, "Search the web.", {arg: _text("What to search for.")}), use)


def _time(rng: Random) -> Tool:
    name = rng.choice(("get_time", "current_time", "clock", "time_in"))
    arg = rng.choice(("city", "timezone", "location"))

    def use(rng: Random) -> Use:
        city = rng.choice(words.CITIES)
        user = rng.choice(("What time is it in {}?", "Time in {}?", "Tell me the time in {}."))
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return Use(user.format(city), {arg: city}, _result(rng, {"time": clock}),
                   f"It is {clock} in {city}.")  # fmt: skip

    return Tool(
        _schema(rng, name, "Get the current time in a place.", {arg: _text("The place.")}), use
    )


def _message(rng: Random) -> Tool:
    name = rng.choice(("send_message", "send_email", "email", "text_person"))
    to, body = rng.choice((("to", "body"), ("recipient", "message"), ("name", "text")))

    def use(rng: Random) -> Use:
        who = rng.choice(words.NAMES)
        say = rng.choice(
            (
                f"the {words.word(rng)} is ready",
                f"I will be late on {rng.choice(words.DAYS)}",
                f"meet me at the {rng.choice(words.PLACES)}",
                "thank you for the cake",
            )
        )
        user = rng.choice(("Tell {} that {}.", "Send {} a message: {}", "Write to {}: {}"))
        return Use(user.format(who, say), {to: who, body: say}, _result(rng, {"status": "sent"}),
                   f"I sent the message to {who}.")  # fmt: skip

    return Tool(_schema(rng, name, "Send a message to a person.",
                        {to: _text("Who gets it."), body: _text("What to say.")}), use)  # fmt: skip


def _reminder(rng: Random) -> Tool:
    name = rng.choice(("set_reminder", "add_reminder", "remind", "create_event"))
    what, when = rng.choice((("text", "day"), ("task", "date"), ("title", "when")))

    def use(rng: Random) -> Use:
        task = f"{rng.choice(('buy', 'clean', 'find', 'paint'))} the {rng.choice(words.OBJECTS)}"
        day = rng.choice(words.DAYS)
        user = rng.choice(("Remind me to {} on {}.", "Set a reminder to {} on {}.",
                           "I must {} on {}, please remind me."))  # fmt: skip
        return Use(user.format(task, day), {what: task, when: day}, _result(rng, {"ok": True}),
                   f"I will remind you to {task} on {day}.")  # fmt: skip

    return Tool(_schema(rng, name, "Set a reminder.",
                        {what: _text("What to do."), when: _text("The day.")}), use)  # fmt: skip


def _lights(rng: Random) -> Tool:
    name = rng.choice(("set_light", "light", "change_lamp", "set_lamp_colour"))
    room, colour = rng.choice((("room", "colour"), ("place", "color"), ("where", "value")))

    def use(rng: Random) -> Use:
        where, what = rng.choice(words.PLACES), rng.choice(words.COLOURS)
        user = rng.choice(("Make the light in the {} {}.", "Turn the {} lamp {}.",
                           "Set the {} lights to {}."))  # fmt: skip
        return Use(
            user.format(where, what),
            {room: where, colour: what},
            _result(rng, {"status": "done"}),
            f"The light in the {where} is now {what}.",
        )

    return Tool(
        _schema(
            rng,
            name,
            "Change the colour of a lamp.",
            {room: _text("The room."), colour: _text("The new colour.")},
        ),
        use,
    )


def _price(rng: Random) -> Tool:
    name = rng.choice(("get_price", "price", "check_price", "shop_lookup"))
    arg, number = rng.choice((("item", "count"), ("product", "quantity"), ("name", "amount")))

    def use(rng: Random) -> Use:
        item, amount, cost = rng.choice(words.OBJECTS), rng.randint(2, 20), rng.randint(3, 900)
        user = rng.choice(("How much do {} {}s cost?", "What is the price of {} {}s?",
                           "I want {} {}s. What do I pay?"))  # fmt: skip
        return Use(user.format(amount, item), {arg: item, number: amount},
                   _result(rng, {"price": cost}), f"{amount} {item}s cost {cost}.")  # fmt: skip

    return Tool(
        _schema(
            rng,
            name,
            "Get the price of some items.",
            {arg: _text("The item."), number: {"type": "integer", "description": "How many."}},
        ),
        use,
    )


def _list(rng: Random) -> Tool:
    name = rng.choice(("add_items", "shopping_list", "buy_list", "order"))
    arg = rng.choice(("items", "things", "products"))

    def use(rng: Random) -> Use:
        items = rng.sample(words.FRUITS + words.OBJECTS, rng.randint(1, 4))
        said = f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]
        user = rng.choice(("Add {} to the list.", "Put {} on my list.", "Order {}.", "I need {}."))
        return Use(user.format(said), {arg: items}, _result(rng, {"added": len(items)}),
                   f"I added {said}.")  # fmt: skip

    return Tool(_schema(rng, name, "Add items to a list.", {
        arg: {"type": "array", "items": {"type": "string"}}}), use)  # fmt: skip


_KINDS = (
    _weather,
    _weather,
    _calculator,
    _search,
    _time,
    _message,
    _reminder,
    _lights,
    _price,
    _list,
)
