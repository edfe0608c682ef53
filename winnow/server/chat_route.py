"""/v1/chat/completions: a conversation to be continued by a message, or by `n` of them."""

from __future__ import annotations

import secrets
import time

from winnow.config import Constraint
from winnow.server.answering import answer_in_stream, answer_whole, check_choices, jobs_of, usages
from winnow.server.answers import ChatChoice, ChatChunks, chat_response, usage_of
from winnow.server.chat_request import ChatRequest
from winnow.server.constraints import chat_constraint
from winnow.server.exchange import Call
from winnow.server.m3_parser import chat_parser
from winnow.server.prompts import render_chat
from winnow.server.protocol import parse
from winnow.server.token_logprobs import ChatLogprobs


async def chat(call: Call) -> None:
    """Answer one request."""
    serving = call.serving

    def prepare(body: bytes) -> tuple[ChatRequest, list[int], Constraint | None]:
        request = parse(ChatRequest, body)
        serving.check_model(request.model)
        check_choices(call, request)
        prompt = render_chat(
            serving, request.template_messages(), request.template_tools(), request.thinking_mode
        )
        return request, prompt, chat_constraint(request)

    request, prompt, constraint = await call.prepared(prepare)
    jobs = await jobs_of(call, request, [prompt], constraint)
    logprobs = None if request.num_logprobs() is None else ChatLogprobs(serving.text())
    choices = [ChatChoice(i, chat_parser(request), logprobs) for i in range(len(jobs))]
    response_id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
    if request.stream:
        chunks = ChatChunks(
            response_id, serving.model_name, created, include_usage=request.include_usage
        )
        await answer_in_stream(
            call,
            jobs,
            choices,
            chunks,
            opening=[chunks.role(choice.index) for choice in choices],
            usage=(lambda: usage_of(usages(choices))) if request.include_usage else None,
        )
    else:
        await answer_whole(
            call,
            jobs,
            choices,
            lambda: chat_response(
                response_id, serving.model_name, created, choices, usage_of(usages(choices))
            ),
        )
