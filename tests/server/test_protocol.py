"""Bodies that become requests, bodies that are refused, and what requests ask of sampling."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.config import Constraint, SamplingParams
from winnow.errors import RequestError
from winnow.server.chat_request import ChatRequest
from winnow.server.completion_request import CompletionRequest
from winnow.server.failures import failure_of
from winnow.server.protocol import FieldError, Generation, parse
from winnow.server.sampling import to_sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def sampling(request: Generation, **options: Any) -> SamplingParams:
    given: dict[str, Any] = {"prompt_tokens": 10, "max_model_len": 100, "default_max_tokens": 50}
    return to_sampling(request, **{**given, "vocab_size": 300, **options})


def turn(**fields: Any) -> list[Any]:
    return [{"role": "user", "content": "a", **fields}]


def tools(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def wanted(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"guided_json": {}}, "guided_json", "there is no field guided_json: remove it"),
        ({"messages": turn(cache_control=1)}, "messages[0].cache_control", "no field"),
        ({"tools": tools(schema={})}, "tools[0].function.schema", "there is no field"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot': give a number"),
        ({"temperature": True}, "temperature", "temperature is True: give a number"),
        ({"temperature": 10**400}, "temperature", "a number of 1329 bits"),
        ({"seed": 10**4000}, "seed", "give at most 9223372036854775807"),
        ({"seed": 1.5}, "seed", "seed is 1.5: give a whole number"),
        ({"n": 0}, "n", "n is 0: give at least 1"),
        ({"stop": 5}, "stop", "stop is 5: give a string or an array"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5: give a string"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "give a whole number"),
        ({"messages": []}, "messages", "is a JSON array: give at least 1, it holds 0"),
        ({"messages": [5]}, "messages[0]", "messages[0] is 5: give an object"),
        ({"messages": turn(content=[5])[:1]}, "messages[0].content[0]", "is 5: give an object"),
        ({"messages": turn(content=5)}, "messages[0].content", "is 5: give a string"),
        ({"messages": turn(role="x")}, "messages[0].role", "'x': use 'system', 'developer', 'us"),
        ({"messages": turn(refusal="x")}, "messages[0].refusal", "only as null, so remove it"),
        ({"tools": [5]}, "tools[0]", "tools[0] is 5: give an object"),
        ({"tools": tools() * 129}, "tools", "tools is a JSON array: give at most 128"),
        ({"stream": 1}, "stream", "stream is 1: give true or false"),
        ({"tool_choice": 5}, "tool_choice", "is 5: use 'none', 'auto' or 'required'"),
        ({"response_format": "json"}, "response_format", "is 'json': give an object"),
        ({"logit_bias": []}, "logit_bias", "is a JSON array: give an object"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "its keys are token ids"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "give -100 to 100"),
        ({"logit_bias": {"5": 10**4000}}, "logit_bias", "give -100 to 100"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias names token 300, the vocabulary"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias", "a token of logit_bias is 9999999999"),
        ({"temperature": -1}, "temperature", "temperature is -1.0; it takes a finite number"),
        ({"top_p": 2}, "top_p", "top_p is 2.0; it takes"),
        ({"top_k": -2}, "top_k", "top_k is -2; it takes"),
        ({"min_p": 2}, "min_p", "min_p is 2.0; it takes"),
        ({"seed": 2**63}, "seed", "seed is 9223372036854775808"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1; it takes"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, max_tokens is 8"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3.0; it takes"),
        ({"stop": ""}, "stop", "stop holds an empty string"),
        ({"stop": ["x"] * 65}, "stop", "stop holds 65 strings; it takes up to 64"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "a token of stop_token_ids is -1; it takes"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "stop_token_ids names token 300, the voc"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it takes"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        (wanted("xml"), "response_format.type", "use text, json_object"),
        (wanted("json_schema"), "response_format.json_schema", "lacks its json_schema"),
        (wanted("text", json_schema={}), "response_format.json_schema", "takes no"),
        (
            wanted("json_schema", json_schema={"name": "a"}),
            "response_format.json_schema.schema",
            "has no schema",
        ),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        sampling(chat(**fields))
    assert caught.value.param == param
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON: EOF"),
        (b"{", "not JSON"),
        (b'{"messages": [], "temperature": NaN}', "not JSON"),
        (b'{"messages": [], "temperature": -Infinity}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b"[" * 10_000, "not JSON"),
        (b'{"seed": %s}' % (b"9" * 5000), "not JSON"),
        (b"[]", "the body is a JSON array: send an object"),
        (b"null", "the body is a JSON null: send an object"),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_p": 1e999}', "finite number"),
    ],
)
def test_a_body_that_is_no_request_is_refused_in_a_sentence(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        parse(ChatRequest, body)


IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_cannot_change_the_answer_are_taken(name: str) -> None:
    assert sampling(chat(**{name: "x"})) == sampling(chat())
    assert sampling(completion(**{name: {"a": 1}})) == sampling(completion())


@pytest.mark.parametrize(
    ("name", "asking", "nothing"),
    [
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "x"}, None),
        ("prediction", {"type": "content"}, None),
        ("web_search_options", {}, None),
        ("functions", [{"name": "f"}], []),
        ("function_call", "auto", "none"),
        ("verbosity", "low", "medium"),
        ("chat_template", "{{ evil }}", None),
        ("add_generation_prompt", False, True),
        ("continue_final_message", True, False),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(
    name: str, asking: Any, nothing: Any
) -> None:
    chat(**{name: nothing})
    with pytest.raises(FieldError, match=f"{name} is .*, which is not served"):
        chat(**{name: asking})


@pytest.mark.parametrize(
    ("name", "asking", "nothing"), [("echo", True, False), ("suffix", "a", ""), ("best_of", 3, 2)]
)
def test_a_completion_refuses_what_it_does_not_serve(name: str, asking: Any, nothing: Any) -> None:
    completion(n=2, **{name: nothing})
    with pytest.raises(FieldError, match=f"{name} is .*, which is not served"):
        completion(n=2, **{name: asking})


def test_every_field_of_sampling_arrives() -> None:
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=3,
        stop="end",
        stop_token_ids=[4],
        min_tokens=2,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=20,
    )
    assert sampling(request) == SamplingParams(
        max_tokens=20,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        seed=3,
        stop=("end",),
        stop_ids=(4,),
        min_tokens=2,
        logit_bias={5: -100.0},
        logprobs=3,
        skip_special_tokens=False,
    )


def test_null_is_the_default_everywhere() -> None:
    names = [name for name, field in ChatRequest.model_fields.items() if name != "messages"]
    assert sampling(chat(**dict.fromkeys(names))) == sampling(chat())
    assert sampling(completion(skip_special_tokens=None)) == sampling(completion())
    options = {"include_usage": None}
    assert not chat(stream=True, stream_options=options).include_usage


def test_without_a_limit_an_answer_gets_what_fits_and_no_more_than_the_server_gives() -> None:
    assert sampling(completion()).max_tokens == 50
    assert sampling(completion(), prompt_tokens=70).max_tokens == 30
    assert sampling(completion(max_tokens=80)).max_tokens == 80
    assert sampling(chat(max_tokens=8)).max_tokens == 8
    assert sampling(chat(max_tokens=8, max_completion_tokens=8)).max_tokens == 8


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(FieldError, match="both mean the same"):
        chat(max_tokens=8, max_completion_tokens=9)


def test_a_prompt_that_leaves_no_room_is_refused_with_numbers() -> None:
    with pytest.raises(FieldError, match="shorten the prompt by 3 tokens at least") as caught:
        sampling(completion(), prompt_tokens=102)
    assert caught.value.param == "prompt"
    with pytest.raises(FieldError) as caught:
        sampling(chat(), prompt_tokens=102)
    failure = failure_of(caught.value)
    assert (failure.code, failure.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_beyond_the_room_is_refused_by_its_name_with_what_is_left(field: str) -> None:
    assert sampling(chat(**{field: 90})).max_tokens == 90
    with pytest.raises(FieldError, match=f"100 together: lower {field} to 90") as caught:
        sampling(chat(**{field: 91}))
    failure = failure_of(caught.value)
    assert (failure.code, failure.param) == ("context_length_exceeded", field)


def test_what_may_not_stand_beside_a_constraint_is_named() -> None:
    for fields, param in (({"min_tokens": 2}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")):
        with pytest.raises(FieldError, match="constraint, which decides where") as caught:
            sampling(completion(**fields), constraint=Constraint("json_object"))
        assert caught.value.param == param


def test_each_choice_draws_from_its_own_seed() -> None:
    seeds = [sampling(completion(seed=2**63 - 2), choice=choice).seed for choice in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert sampling(completion(), choice=1).seed is None


def test_a_constraint_is_passed_on_and_top_k_of_minus_one_is_all() -> None:
    constraint = Constraint("json_object")
    assert sampling(completion(), constraint=constraint).constraint is constraint
    assert sampling(completion(top_k=-1)).top_k == 0


def test_special_tokens_are_shown_where_they_are_asked_for_and_always_in_chat() -> None:
    assert sampling(completion()).skip_special_tokens
    assert not sampling(completion(skip_special_tokens=False)).skip_special_tokens
    assert not sampling(chat()).skip_special_tokens


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_text_or_ids_one_or_several(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


NO_PROMPTS: list[Any] = [None, 5, {}, "", [], [[]], ["a", ""], [1, "a"], ["a", 1], [{}]]


@pytest.mark.parametrize("prompt", [*NO_PROMPTS, [True], [1.5], [-1], [2**40], [[10**4000]]])
def test_a_prompt_of_any_other_kind_is_refused(prompt: Any) -> None:
    with pytest.raises(FieldError, match="prompt"):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": [%s1]}]}' % (b"1," * 2_000_000),
        b'{"messages": [%s1]}' % (b"1," * 2_000_000),
        b'{"messages": [], "stop": [%s1]}' % (b"1," * 2_000_000),
        json.dumps({"logit_bias": {str(i): "a" for i in range(300_000)}}).encode(),
        json.dumps({f"k{i}": 1 for i in range(300_000)}).encode(),
        json.dumps({"messages": [{f"k{i}": 1 for i in range(300_000)}]}).encode(),
    ],
    ids=["parts", "messages", "stops", "biases", "fields", "fields of a message"],
)
def test_a_million_mistakes_are_one_error_and_take_no_time_to_tell(body: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, body)
    assert len(str(caught.value)) < 300
    assert time.monotonic() - start < 10


texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["user", "assistant", "tool"])
message_fields = st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id", "x"])
messages = st.lists(st.dictionaries(message_fields, json_values | roles), max_size=2)
chat_fields = st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), json_values)


@given(fields=chat_fields, said=messages | json_values)
@settings(max_examples=200, deadline=None)
def test_any_body_is_a_request_or_a_request_error(fields: dict[str, Any], said: Any) -> None:
    body = json.dumps({"messages": said or MESSAGES, **fields})
    with suppress(RequestError):
        request = parse(ChatRequest, body.encode())
        request.template_messages()
        assert sampling(request).max_tokens > 0


def test_a_request_without_an_option_gets_the_models_own_and_one_with_it_keeps_it() -> None:
    defaults = {"temperature": 0.3, "top_k": 40, "min_p": 0.05}
    params = sampling(chat(top_k=7, temperature=0), defaults=defaults)
    assert (params.temperature, params.top_k, params.min_p) == (0.0, 7, 0.05)
    params = sampling(completion(top_k=-1), defaults=defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 0, 1.0)
