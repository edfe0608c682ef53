"""/tokenize and /detokenize: what a prompt costs, and what tokens say. Knows no generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from winnow.server.chat_request import Message, Tool
from winnow.server.exchange import Call
from winnow.server.prompts import render_chat
from winnow.server.protocol import Body, FieldError, parse
from winnow.server.serving import Serving

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    thinking_mode: Literal["adaptive", "enabled", "disabled"] = "adaptive"
    add_special_tokens: bool = True
    """Of a prompt only: a chat template writes its own."""
    return_token_strs: bool = False

    def check(self) -> None:
        """FieldError for what the types alone do not show."""
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give prompt or messages, and only one of them")
        for i, message in enumerate(self.messages or []):
            message.check(f"messages[{i}]")


class DetokenizeRequest(Body):
    """Token ids to be read."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(call: Call) -> None:
    """Token ids of a prompt, as the engine would be given them."""
    serving = call.serving

    def count(body: bytes) -> dict[str, Any]:
        request = parse(TokenizeRequest, body)
        serving.check_model(request.model)
        ids = _ids(serving, request)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": serving.model().max_model_len,
            "tokens": ids,
        }
        if request.return_token_strs:
            answer["token_strs"] = [serving.text().token(i) for i in ids]
        return answer

    await call.reply(await call.prepared(count))


async def detokenize(call: Call) -> None:
    """Text of token ids, special tokens included."""
    serving = call.serving

    def read(body: bytes) -> dict[str, Any]:
        request = parse(DetokenizeRequest, body)
        serving.check_model(request.model)
        vocab_size = serving.model().vocab_size
        for place, token_id in enumerate(request.tokens):
            if token_id >= vocab_size:
                raise FieldError(
                    f"tokens[{place}]",
                    f"tokens[{place}] is {token_id}, the vocabulary has {vocab_size}: use ids from "
                    f"0 to {vocab_size - 1}",
                )
        return {"prompt": serving.text().decode(request.tokens, skip_special=False)}

    await call.reply(await call.prepared(read))


def _ids(serving: Serving, request: TokenizeRequest) -> list[int]:
    if request.prompt is not None:
        return serving.text().encode(request.prompt, add_special=request.add_special_tokens)
    messages = [m.for_template(f"messages[{i}]") for i, m in enumerate(request.messages or [])]
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    return render_chat(serving, messages, tools, request.thinking_mode)
