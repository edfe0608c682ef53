"""One request as the scheduler sees it: its tokens, its progress and how it ends.

Knows nothing of text, sampling or time. The caller sets the fields of the first group; the rest
belongs to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from winnow.core.prefix import block_key, root_key
from winnow.spec.model import BLOCK_TOKENS

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    """Where a request stands: WAITING holds no pages; FINISHED never comes back."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def num_blocks(num_tokens: int) -> int:
    """Blocks, and so pages, that `num_tokens` tokens touch."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(eq=False)
class Request:
    """A prompt and what has been generated after it. Compared by identity.

    `stop_ids` are the model's end tokens and the user's; empty to generate up to `max_tokens`.
    Requests of different `cache_salt` never share pages.
    """

    request_id: str
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    cache_salt: str = ""

    output: list[int] = field(default_factory=list, repr=False)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Place in the order of arrival. Who came later gives way."""
    pages: list[int] = field(default_factory=list, repr=False)
    """Page of each block, from the first."""
    num_computed: int = 0
    """Leading tokens whose K, V and index keys are in pages."""
    num_cached: int = 0
    """Leading tokens found in the cache when the request first ran."""
    num_preemptions: int = 0
    keys: list[bytes] = field(default_factory=list, repr=False)
    """Prefix keys of the leading blocks hashed so far; they outlive a preemption."""

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Rows to compute before the next token can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output. Copies both; `token_ids` copies only a part."""
        return (*self.prompt, *self.output)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens at positions [start, stop)."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return (*self.prompt[start:], *self.output[max(start - split, 0) : stop - split])

    def key(self, block: int) -> bytes:
        """Prefix key of a block whose tokens are all known. A block is hashed once."""
        assert (block + 1) * BLOCK_TOKENS <= self.num_tokens
        while len(self.keys) <= block:
            start = len(self.keys) * BLOCK_TOKENS
            parent = self.keys[-1] if self.keys else root_key(self.cache_salt)
            self.keys.append(block_key(parent, self.token_ids(start, start + BLOCK_TOKENS)))
        return self.keys[block]

    def append(self, token: int) -> None:
        """Add a sampled token, and finish if it is the last one.

        A stop token ends the request once the output, itself included, has `min_tokens` tokens,
        and stays in the output. Where it is also token `max_tokens`, the reason is "stop".
        """
        assert not self.is_finished
        self.output.append(token)
        if token in self.stop_ids and len(self.output) >= self.min_tokens:
            self.finish("stop")
        elif len(self.output) == self.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        self.state = State.FINISHED
        self.finish_reason = reason
