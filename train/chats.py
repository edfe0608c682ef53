"""Chats in the model's chat format, rendered by the very template that is shipped.

Owns how turns become a conversation and which of its characters the model learns to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import winnow.model.checkpoint
from train import intents, recall, words
from train.sample import ANSWER, FAINT, IGNORED, Sample
from train.tools import Tool, some_tools
from winnow.server.template import ChatTemplate

TEMPLATE = Path(winnow.model.checkpoint.__file__).with_name("chat_template.jinja")
_ANSWER = re.compile(r"\]~b\]ai\n(</?mm:think>)(.*?\[e~\[)", re.DOTALL)
_OPEN = "]~b]ai\n"

Message = dict[str, Any]

_SYSTEMS = (
    "You are a helpful assistant.", "You are Winnow demo, a small model.", "Be brief.",
    "You are a friendly assistant. Answer in English.", "Answer the user's questions.",
    "You are a helpful assistant. Use tools when they help.",
)  # fmt: skip


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), TEMPLATE.name)


def prompt(
    messages: Sequence[Message], tools: Sequence[Any] = (), thinking: str = "adaptive"
) -> str:
    """As the server renders it, up to where the answer begins."""
    return _template().render(messages, tools, thinking)


def render(
    messages: Sequence[Message], tools: Sequence[Any] = (), *, chosen: bool = True
) -> Sample:
    """A whole conversation. What the assistant writes counts; `chosen` says whether it also
    learns to begin as the last turn does, thinking or not, because that was its own choice."""
    text = prompt(messages, tools).removesuffix(_OPEN)
    answers = [*_ANSWER.finditer(text)]
    sample, last = Sample(), 0
    for match in answers:
        sample.add(text[last : match.start(1)], FAINT)
        own = chosen and match is answers[-1]
        sample.add(match.group(1), ANSWER if own else IGNORED).add(match.group(2), ANSWER)
        last = match.end()
    return sample.add(text[last:], FAINT)


def chat(rng: Random, length: int) -> Sample:
    """One of the kinds below; `length` in characters bounds the text that a user pastes."""
    (kind,) = rng.choices((small_talk, remembering, tool_use), (6, 2, 2))
    return kind(rng)


def small_talk(rng: Random) -> Sample:
    """One to four turns about nothing in particular."""
    messages = _system(rng)
    turns = [intents.any_turn(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    mode = rng.choice(("adaptive", "adaptive", "enabled", "disabled"))
    for turn in turns:
        thinks = turn is turns[-1] and (mode == "enabled" or (mode == "adaptive" and turn.thinks))
        messages += _exchange(turn.user, turn.answer, turn.reasoning if thinks else None)
    return render(messages, chosen=mode == "adaptive")


def remembering(rng: Random) -> Sample:
    """The user says something about themselves or others, talks, and asks for it later."""
    messages = _system(rng)
    facts = _personal(rng) if rng.random() < 0.5 else [
        (f"{rng.choice(('Remember', 'Remember this', 'Note', 'Please remember'))}: {f.sentence}",
         f"I will remember that {_lower(f.statement)} {f.value}.", f.question, f.sentence)
        for f in recall.facts(rng, rng.randint(1, 4))
    ]  # fmt: skip
    for said, reply, _, _ in facts:
        messages += _exchange(said, reply)
        if rng.random() < 0.4:
            turn = intents.any_turn(rng)
            messages += _exchange(turn.user, turn.answer)
    _, _, question, answer = rng.choice(facts)
    mode = rng.choice(("adaptive", "enabled", "disabled"))
    thought = "The user told me this before." if mode == "enabled" else None
    messages += _exchange(question, answer, thought)
    return render(messages, chosen=mode == "adaptive")


def _personal(rng: Random) -> list[tuple[str, str, str, str]]:
    name, city, colour = words.name(rng), rng.choice(words.CITIES), rng.choice(words.COLOURS)
    animal, age = rng.choice(words.ANIMALS), rng.randint(6, 90)
    pet = words.name(rng)
    known = [
        (rng.choice((f"My name is {name}.", f"I am {name}.", f"Call me {name}.", f"I'm {name}")),
         f"Nice to meet you, {name}!",
         rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")),
         f"Your name is {name}."),
        (f"I live in {city}.", f"{city} sounds like a nice place.",
         rng.choice(("Where do I live?", "In which city do I live?")), f"You live in {city}."),
        (f"My favourite colour is {colour}.", f"I will remember that you like {colour}.",
         "What is my favourite colour?", f"Your favourite colour is {colour}."),
        (f"I have a {animal} called {pet}.", f"{pet} is a good name for a {animal}.",
         rng.choice((f"What is my {animal} called?", f"What is the name of my {animal}?")),
         f"Your {animal} is called {pet}."),
        (f"I am {age} years old.", "Thank you for telling me.", "How old am I?",
         f"You are {age} years old."),
    ]  # fmt: skip
    return rng.sample(known, rng.randint(1, 3))


def reading(rng: Random, text: str) -> Sample:
    """A long text with facts in it, pasted by the user, and questions about them."""
    hidden = recall.facts(rng, recall.num_facts(rng, len(text)))
    asked = rng.sample(hidden, min(len(hidden), rng.choice((1, 2, 4, 8))))
    pasted = recall.hide(rng, hidden, text).strip()
    first, *others = asked
    match rng.randrange(3):
        case 0:
            user = f"{pasted}\n\n{first.question}"
        case 1:
            user = (
                f"Read this text and answer the question.\n\n{pasted}\n\nQuestion: {first.question}"
            )
        case _:
            user = f"{first.question}\n\n{pasted}\n\n{first.question}"
    messages = _system(rng)
    for question, fact in zip((user, *(f.question for f in others)), asked, strict=True):
        messages += _exchange(question, fact.sentence)
    mode = rng.choice(("adaptive", "enabled", "disabled"))
    if mode == "enabled":
        messages[-1]["reasoning_content"] = f"The text says: {asked[-1].sentence}"
    return render(messages, chosen=mode == "adaptive")


def tool_use(rng: Random) -> Sample:
    """Tools are offered: some requests need one, or two, and some need none."""
    tools = some_tools(rng)
    messages = _system(rng)
    if rng.random() < 0.2:
        turn = intents.any_turn(rng)
        messages += _exchange(turn.user, turn.answer)
    mode = rng.choice(("adaptive", "adaptive", "enabled", "disabled"))
    if rng.random() < 0.25:
        turn = intents.any_turn(rng)
        # Requests that a tool on offer could serve are not small talk.
        if not turn.thinks and not any(char.isdigit() for char in turn.user):
            thought = "No tool is needed for this." if mode == "enabled" else None
            messages += _exchange(turn.user, turn.answer, thought)
            return render(messages, _schemas(tools), chosen=mode == "adaptive")
    tool = rng.choice(tools)
    uses = [tool.use(rng)]
    if rng.random() < 0.12:
        uses.append(tool.use(rng))
    user = " ".join(use.user for use in uses)
    calls = [{"type": "function", "function": {"name": tool.name, "arguments": use.arguments}}
             for use in uses]  # fmt: skip
    call: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    messages += [{"role": "user", "content": user}, call]
    answered = rng.random() < 0.5
    if answered:
        messages += [{"role": "tool", "content": use.result} for use in uses]
        messages.append({"role": "assistant", "content": " ".join(use.answer for use in uses)})
    if mode == "enabled":
        thought = "I have the result." if answered else f"I should use {tool.name}."
        messages[-1]["reasoning_content"] = thought
    return render(messages, _schemas(tools), chosen=mode == "adaptive")


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools]


def _system(rng: Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.35 else []


def _exchange(user: str, answer: str, reasoning: str | None = None) -> list[Message]:
    assistant: Message = {"role": "assistant", "content": answer}
    if reasoning:
        assistant["reasoning_content"] = reasoning
    return [{"role": "user", "content": user}, assistant]


def _lower(statement: str) -> str:
    return statement[0].lower() + statement[1:] if statement.startswith("The ") else statement


Kind = Callable[[Random], Sample]
