"""Outputs of one request between the engine and whoever reads them: many in, one merged out."""

from __future__ import annotations

from winnow.engine.output import Output, Usage
from winnow.errors import WinnowError
from winnow.ops.sample import Logprobs


class Outbox:
    """Outputs wait here as parts, not as objects, so that 10,000 of them cost what they say."""

    def __init__(self, request_id: str) -> None:
        self.has_output = False
        """Whether there is something to take."""
        self.is_closed = False
        """Whether the last output was put in; it may not have been taken yet."""
        self._request_id = request_id
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._has_text = False
        self._logprobs: list[Logprobs] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._error: WinnowError | None = None

    def put(self, output: Output) -> None:
        """Add an output; nothing may follow one that has a `finish_reason`."""
        assert not self.is_closed
        self.has_output = True
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        if output.text is not None:
            self._has_text = True
            if output.text:
                self._texts.append(output.text)
        if output.finish_reason is not None:
            self.is_closed = True
            self._finish_reason = output.finish_reason
            self._usage, self._error = output.usage, output.error

    def take(self) -> Output:
        """Everything put in since the last call, as one output."""
        assert self.has_output
        taken = Output(
            request_id=self._request_id,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts) if self._has_text else None,
            logprobs=tuple(self._logprobs),
            finish_reason=self._finish_reason,
            usage=self._usage,
            error=self._error,
        )
        self._token_ids, self._texts, self._logprobs = [], [], []
        self.has_output = self._has_text = False
        return taken
