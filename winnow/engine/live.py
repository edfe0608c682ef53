"""A request while it runs: its sampling, its text so far. Knows nothing of pages or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from winnow.config import SamplingParams
from winnow.core.request import Request
from winnow.engine.text import IncrementalDetokenizer, StopMatcher, Tokenizer
from winnow.errors import RequestError, WinnowError
from winnow.ops.sample import SampleRow

if TYPE_CHECKING:
    # Few requests have a grammar, and its library takes long to load.
    from winnow.engine.grammar import Matcher


class LiveRequest:
    """What the engine keeps of a request beside core's own state."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer | None,
        grammar: Matcher | None = None,
    ) -> None:
        self.request = request
        self.params = params
        self.seed = seed
        self.detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, skip_special=params.skip_special_tokens)
        )
        self.matcher = StopMatcher(params.stop)
        self.grammar = grammar
        self.has_started = False
        """Whether any of its rows were computed."""

    def sample_row(self) -> SampleRow:
        """How the next token is chosen."""
        p, request = self.params, self.request
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
        early = len(request.output) < request.min_tokens
        return SampleRow(
            seed=self.seed,
            index=len(request.output),
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            logit_bias=p.logit_bias,
            banned=tuple(request.stop_ids) if early else (),
            allowed=None if self.grammar is None else self.grammar.allowed,
            prompt_ids=request.prompt if penalised else (),
            output_ids=request.output if penalised else (),
            logprobs=p.logprobs,
        )

    def push(self, token: int) -> tuple[str | None, bool]:
        """Take a token that core has appended: (new text, whether it ends the request).

        It does where it completes a stop string, or a grammar after which nothing may follow. A
        token that ended the request by its id is no text. Stop strings count once the output has
        more than `min_tokens` - 1 tokens. RequestError where the grammar cannot go on.
        """
        by_id = self.request.finish_reason == "stop"
        complete = self.grammar is not None and not by_id and self.grammar.accept(token)
        if self.detokenizer is None:
            return None, complete
        ended = self.request.is_finished or complete
        piece = "" if by_id else self.detokenizer.push(token)
        if ended:
            piece += self.detokenizer.flush()
        if len(self.request.output) < self.request.min_tokens:
            return piece, False
        text, stopped = self.matcher.push(piece)
        if ended and not stopped:
            text += self.matcher.flush()
        return text, stopped or complete

    def not_sampled(self) -> WinnowError:
        """Why no token could be chosen: the model's logits, or a grammar without a way on."""
        after = f"after {self.request.num_tokens} tokens"
        if self.grammar is not None and self.grammar.is_stuck:
            return RequestError(
                f"no token of the vocabulary continues the grammar {after}: change the schema or "
                "pattern so that its text can be written"
            )
        return RequestError(
            f"request {self.request.request_id!r}: the model gave NaN or infinite logits {after}; "
            "it is ended, the others go on. Check the checkpoint with kv_format "
            "(--kv-format) model, then its weights"
        )
