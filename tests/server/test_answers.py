"""Chat answers on the wire: chunks, whole responses and counts, from the same events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.m3_text import call

from winnow.engine.output import Output, Usage
from winnow.errors import RequestError
from winnow.ops.sample import Logprobs
from winnow.server.answers import ChatChoice, ChatChunks, chat_response, counts, usage_of
from winnow.server.m3_parser import M3Parser

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
ANSWER = "<mm:think>why</mm:think>so\u2028 " + call({"a": "b"})
FUNCTIONS = {"f": {"properties": {"a": {"type": "string"}}}}


class Spelling:
    """Writes logprobs as the ids alone."""

    def entries(self, output: Output) -> list[dict[str, Any]]:
        rest = {"logprob": -1.0, "bytes": None, "top_logprobs": []}
        return [{"token": str(token_id), **rest} for token_id in output.token_ids]


def choice(index: int = 0, logprobs: Any = None) -> ChatChoice:
    return ChatChoice(index, M3Parser(FUNCTIONS, "adaptive", lambda: f"call_{index}"), logprobs)


def last(reason: str = "stop") -> Output:
    return Output("r", text="", finish_reason=reason, usage=USAGE)


def streamed(one: ChatChoice, chunks: ChatChunks, *outputs: Output) -> list[dict[str, Any]]:
    sent = [chunk for output in outputs for chunk in chunks.of(one, one.push(output))]
    return [json.loads(chunk) for chunk in sent]


def test_a_response_is_what_openais_client_takes() -> None:
    one = choice()
    one.push(Output("r", text=ANSWER))
    one.push(last())
    body = chat_response("chat-1", "m", 5, [one], usage_of([USAGE], reasoning_tokens=1))
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.model_dump(exclude_unset=True) == body
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "so\u2028 ",
                "refusal": None,
                "reasoning_content": "why",
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": "b"}'},
                    }
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]


def test_chunks_are_what_openais_client_takes() -> None:
    chunks = ChatChunks("chat-1", 'm"ü', 5, include_usage=True)
    sent = [chunks.role(2), chunks.usage(usage_of([USAGE]))]
    sent_as_json = [json.loads(chunk) for chunk in sent]
    sent_as_json[1:1] = streamed(choice(2), chunks, Output("r", text=ANSWER), last())
    for chunk in sent_as_json:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert parsed.model_dump(exclude_unset=True) == chunk
        assert (chunk["id"], chunk["model"], chunk["created"]) == ("chat-1", 'm"ü', 5)
    deltas = [c["choices"][0]["delta"] for c in sent_as_json if c["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:3] == [{"reasoning_content": "why"}, {"content": "so\u2028 "}]
    function = {"name": "f", "arguments": ""}
    begun = {"index": 0, "id": "call_2", "type": "function", "function": function}
    assert deltas[3] == {"tool_calls": [begun]}
    assert deltas[4] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}
    assert deltas[-1] == {}
    reasons = [c["choices"][0]["finish_reason"] for c in sent_as_json if c["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert sent_as_json[-1]["choices"] == []
    assert sent_as_json[-1]["usage"]["total_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in sent_as_json[:-1])


def test_a_chunk_is_one_line_whatever_its_text() -> None:
    chunks = ChatChunks("c", "m", 0)
    one = ChatChoice(0, M3Parser({}, "disabled"))
    (chunk,) = chunks.of(one, one.push(Output("r", text='a\r\nb"\u2028\x00\U0001f600')))
    assert not {b"\r", b"\n"} & {chunk[i : i + 1] for i in range(len(chunk))}
    assert json.loads(chunk)["choices"][0]["delta"]["content"] == 'a\r\nb"\u2028\x00\U0001f600'


@pytest.mark.parametrize(
    ("text", "engine_reason", "reason"),
    [
        ("so", "stop", "stop"),
        ("so", "length", "length"),
        (call({}), "stop", "tool_calls"),
        (call({}), "length", "length"),
        (call({}), "abort", "abort"),
        (call({}) + call("stray"), "stop", "stop"),
        (call({})[:-40], "stop", "stop"),
    ],
)
def test_calls_are_to_be_run_only_after_an_answer_that_ended_well(
    text: str, engine_reason: str, reason: str
) -> None:
    one = choice()
    one.push(Output("r", text=text))
    assert one.finish_reason is None
    one.push(last(engine_reason))
    assert one.finish_reason == reason


def test_logprobs_of_every_token_come_once_and_with_the_next_chunk() -> None:
    outputs = [
        Output("r", token_ids=(1,), text="a", logprobs=(Logprobs(-1.0, ()),)),
        Output("r", token_ids=(2,), text="", logprobs=(Logprobs(-1.0, ()),)),
        Output("r", token_ids=(3, 4), text="b", logprobs=(Logprobs(-1.0, ()),) * 2),
        Output("r", token_ids=(5,), text="", logprobs=(Logprobs(-1.0, ()),), finish_reason="stop"),
    ]
    one = choice(logprobs=Spelling())
    sent = streamed(one, ChatChunks("c", "m", 0), *outputs)
    found = [c["choices"][0]["logprobs"] for c in sent]
    tokens = [[entry["token"] for entry in given["content"]] for given in found]
    assert tokens == [["1"], ["2", "3", "4"], ["5"]]
    whole = one.choice()["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["1", "2", "3", "4", "5"]


def test_an_engines_error_is_raised_and_not_told_as_an_answer() -> None:
    one = choice()
    with pytest.raises(RequestError, match="no room"):
        one.push(Output("r", finish_reason="error", error=RequestError("no room")))
    assert one.finish_reason is None


def test_the_prompt_of_several_choices_is_counted_once() -> None:
    other = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=0)
    assert usage_of([USAGE, other]) == {
        "prompt_tokens": 7,
        "completion_tokens": 8,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert counts(20, [USAGE, other])["total_tokens"] == 28


def test_empty_answers_have_content_and_answers_of_calls_alone_have_none() -> None:
    empty, called = choice(), choice()
    empty.push(last())
    called.push(Output("r", text=call({})))
    called.push(last())
    assert empty.message()["content"] == ""
    assert called.message()["content"] is None
