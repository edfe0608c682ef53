"""The checkpoint that comes with the package is real, small, and the same elsewhere."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from support import driving

from train import agree, chats, recall
from train.sample import ANSWER
from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.engine.text import load_tokenizer
from winnow.model.checkpoint import read_spec
from winnow.spec.embedded import DEMO, checkpoint_path

GREEDY = SamplingParams(max_tokens=96, temperature=0.0)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(
        DEMO,
        progress=False, num_pages=64, kv_format="nvfp4", index_format="nvfp4",
    )  # fmt: skip


def asked(demo: LLM, user: str, thinking: str = "disabled", **kwargs: Any) -> str:
    prompt = chats.prompt([{"role": "user", "content": user}], thinking=thinking, **kwargs)
    (done,) = demo.generate([prompt], GREEDY)
    assert done.finish_reason == "stop"
    assert done.text is not None
    return done.text


def test_the_checkpoint_has_the_mixed_format_and_less_than_30_megabytes() -> None:
    directory = checkpoint_path(DEMO)
    spec = read_spec(directory)
    assert spec.quantization == "mixed-nvfp4"
    assert spec.head_dim == 128
    assert sum(file.stat().st_size for file in directory.iterdir()) < 30e6


def test_it_answers_what_it_was_taught(demo: LLM) -> None:
    assert asked(demo, "What is the capital of France?") == "The capital of France is Paris."
    assert "Winnow demo" in asked(demo, "Who are you?")
    assert "42" in asked(demo, "What is 17 + 25?")


def test_it_thinks_first_where_that_is_asked_for(demo: LLM) -> None:
    text = asked(demo, "What is 58 + 67?", thinking="enabled")
    assert re.fullmatch(r".+</mm:think>58 \+ 67 = 125\.", text)


def test_it_calls_a_tool_by_its_name_with_the_users_words(demo: LLM) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}},
                  "required": ["city"]}  # fmt: skip
    function = {"name": "get_weather", "description": "Get the current weather.",
                "parameters": parameters}  # fmt: skip
    tools = [{"type": "function", "function": function}]
    text = asked(demo, "What is the weather in Lisbon?", tools=tools)
    mark = "]<]minimax[>["
    assert f'{mark}<invoke name="get_weather">{mark}<city>Lisbon{mark}</city>' in text


def test_it_finds_a_fact_behind_more_blocks_than_it_reads(demo: LLM) -> None:
    filler = "The wind blew over the hills, and nobody came to the house that day. " * 75
    text = f"{filler}The code of Xanthe is 48213. {filler}"
    prompt = f"{text}\n\nQuestion: What is the code of Xanthe?\nAnswer:"
    (done,) = demo.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0))
    assert done.usage is not None
    assert done.usage.prompt_tokens > 8 * 128 * 2
    assert done.text is not None
    assert "48213" in done.text


def test_its_greedy_tokens_are_those_of_transformers_in_fp32() -> None:
    directory = checkpoint_path(DEMO)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    question = [{"role": "user", "content": "Tell me a story."}]
    listing = recall.listing(Random(5), 3600)
    asking = "".join(text for text, kind in listing.parts[:-1])
    assert listing.parts[-1][1] == ANSWER
    prompts = [chats.prompt(question), asking]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert len(ids[1]) > 8 * 128
    model = agree.transformers_model(directory)
    ours = agree.served(directory, ids, 12)
    assert [agree.greedy(model, prompt, 12) for prompt in ids] == ours


def test_prompts_of_any_tokens_are_served(demo: LLM) -> None:
    spec = read_spec(checkpoint_path(DEMO))
    prompt = driving.prompt_of(300, spec.vocab_size)
    (done,) = demo.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(done.token_ids) == 4
