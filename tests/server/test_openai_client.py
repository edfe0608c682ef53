"""The official client against a real server: what users' programs do must work unchanged.

The model is random, so what it says means nothing; that it is whole, equal and valid does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from support.served import Served

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PLAIN = {"chat_template_kwargs": {"thinking_mode": "disabled"}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"sure": {"type": "boolean"}, "grade": {"enum": ["a", "b", "c"]}},
            "required": ["sure", "grade"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(served_tiny: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served_tiny.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made
    values = served_tiny.idle_metrics()
    assert values["winnow_pages_used"] == 0


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """One answer, the same whenever it is asked for."""
    fields = {"max_tokens": 12, "seed": 3, "extra_body": PLAIN, **fields}
    return client.chat.completions.create(model="tiny", messages=QUESTION, **fields)


def gathered(stream: Any) -> dict[str, Any]:
    """What a program would put together of a stream."""
    content, reason, arguments, name, usage = "", None, "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name = name or call.function.name
                arguments += call.function.arguments or ""
    return {
        "content": content,
        "reason": reason,
        "arguments": arguments,
        "name": name,
        "usage": usage,
    }


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client)
    parts = gathered(chat(client, stream=True, stream_options={"include_usage": True}))
    assert parts["content"] == whole.choices[0].message.content
    assert parts["reason"] == whole.choices[0].finish_reason == "length"
    assert parts["usage"].completion_tokens == whole.usage.completion_tokens == 12


def test_choices_with_a_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    first, second = (chat(client, n=3) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]


def test_logprobs_of_chat_have_the_likeliest_first(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.bytes == entry.top_logprobs[0].bytes


def test_logprobs_of_completions_have_a_place_for_each_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", max_tokens=6, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    for values in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset):
        assert values is not None
        assert len(values) == 6


def test_a_forced_call_has_arguments_of_its_schema_streamed_or_not(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    fields: Any = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
    whole = chat(client, parallel_tool_calls=False, **fields)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in range(1, 10)
    parts = gathered(chat(client, stream=True, parallel_tool_calls=False, **fields))
    assert (parts["name"], parts["reason"]) == ("weather", "tool_calls")
    assert json.loads(parts["arguments"]) == arguments


def test_the_result_of_a_call_goes_back(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 400}
    message = chat(client, parallel_tool_calls=False, **fields).choices[0].message
    call_id = message.tool_calls[0].id
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            *QUESTION,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
        ],
        tools=[WEATHER],
        tool_choice="none",
        max_tokens=4,
    )
    assert answer.choices[0].finish_reason == "length"


def test_structured_output_is_json_of_its_schema(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=SCHEMA, max_tokens=300)
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"sure", "grade"}
    assert isinstance(value["sure"], bool)
    assert value["grade"] in ("a", "b", "c")


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        chat(client, extra_body={"reasoning_effort": "sometimes"})
    with pytest.raises(openai.BadRequestError, match="top_q"):
        chat(client, extra_body={"top_q": 1})
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(model="another", messages=QUESTION)
    bad: Any = {**SCHEMA, "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        chat(client, response_format=bad)


def test_many_at_once_get_what_each_gets_alone(client: openai.OpenAI, served_tiny: Served) -> None:
    def ask(seed: int) -> str:
        return str(chat(client, seed=seed).choices[0].message.content)

    alone = [ask(seed) for seed in range(3)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, [seed for seed in range(3) for _ in range(8)]))
    assert together == [text for text in alone for _ in range(8)]


def test_who_stops_reading_frees_the_pages(client: openai.OpenAI, served_tiny: Served) -> None:
    stream = chat(client, stream=True, max_tokens=4000, extra_body={**PLAIN, "ignore_eos": True})
    next(iter(stream))
    assert served_tiny.metrics()["winnow_pages_used"] > 0
    stream.close()
    values = served_tiny.idle_metrics()
    assert values["winnow_pages_used"] == 0
    assert values["winnow_num_requests_running"] == 0
