"""A request while it runs: its sampling, its text so far. Knows nothing of pages or steps."""

from __future__ import annotations

from winnow.config import SamplingParams
from winnow.core.request import Request
from winnow.engine.text import IncrementalDetokenizer, StopMatcher, Tokenizer
from winnow.ops.sample import SampleRow


class LiveRequest:
    """What the engine keeps of a request beside core's own state."""

    def __init__(
        self, request: Request, params: SamplingParams, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.params = params
        self.seed = seed
        self.detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self.matcher = StopMatcher(params.stop)

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
            prompt_ids=request.prompt if penalised else (),
            output_ids=request.output if penalised else (),
            logprobs=p.logprobs,
        )

    def push(self, token: int) -> tuple[str | None, bool]:
        """Take a token that core has appended: (new text, whether a stop string ended it).

        A token that ended the request by its id is no text. Stop strings count once the output
        has more than `min_tokens` - 1 tokens.
        """
        if self.detokenizer is None:
            return None, False
        ended = self.request.is_finished
        piece = "" if self.request.finish_reason == "stop" else self.detokenizer.push(token)
        if ended:
            piece += self.detokenizer.flush()
        if len(self.request.output) < self.request.min_tokens:
            return piece, False
        text, stopped = self.matcher.push(piece)
        if ended and not stopped:
            text += self.matcher.flush()
        return text, stopped
