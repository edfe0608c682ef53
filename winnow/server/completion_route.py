"""/v1/completions: prompts to be continued as they stand. Knows no chat format."""

from __future__ import annotations

import secrets
import time

from winnow.server.answering import answer_in_stream, answer_whole, check_choices, jobs_of, usages
from winnow.server.answers import counts
from winnow.server.completion_answers import CompletionChoice, CompletionChunks, completion_response
from winnow.server.completion_request import CompletionRequest
from winnow.server.constraints import completion_constraint
from winnow.server.exchange import Call
from winnow.server.prompts import encode_prompt
from winnow.server.protocol import parse
from winnow.server.token_logprobs import CompletionLogprobs


async def complete(call: Call) -> None:
    """Answer one request; its choices are in the order of its prompts, `n` to each."""
    serving = call.serving

    def prepare(body: bytes) -> tuple[CompletionRequest, list[list[int]]]:
        request = parse(CompletionRequest, body)
        serving.check_model(request.model)
        check_choices(call, request)
        return request, [encode_prompt(serving, prompt) for prompt in request.prompts()]

    request, prompts = await call.prepared(prepare)
    jobs = await jobs_of(call, request, prompts, completion_constraint(request))
    wants_logprobs = request.num_logprobs() is not None
    choices = [
        CompletionChoice(i, CompletionLogprobs(serving.tokenizer) if wants_logprobs else None)
        for i in range(len(jobs))
    ]
    response_id, created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
    prompt_tokens = sum(map(len, prompts))
    if request.stream:
        chunks = CompletionChunks(
            response_id, serving.model_name, created, include_usage=request.include_usage
        )
        usage = (lambda: counts(prompt_tokens, usages(choices))) if request.include_usage else None
        await answer_in_stream(call, jobs, choices, chunks, usage=usage)
    else:
        await answer_whole(
            call,
            jobs,
            choices,
            lambda: completion_response(
                response_id,
                serving.model_name,
                created,
                choices,
                counts(prompt_tokens, usages(choices)),
            ),
        )
