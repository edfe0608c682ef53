"""The pages of requests: found by prefix, taken, filled, given back. Joins the pool and the
prefix index; knows nothing of order, budgets or steps.

A page is written by one request only, while that request alone holds it and before it is
registered. Once registered it is complete and is only read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from winnow.core.pages import NULL_PAGE, PagePool
from winnow.core.prefix import PrefixIndex, block_key, root_key
from winnow.core.request import Request, num_blocks
from winnow.spec.model import BLOCK_TOKENS


class Cache:
    """All pages and what is known of their content."""

    def __init__(self, num_pages: int, *, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.pool = PagePool(num_pages, on_evict=self.index.forget)

    def hits(self, request: Request) -> list[int]:
        """Pages that already hold the request's leading blocks.

        They stop short of its last known token, which must be computed to give logits. Costs one
        look-up a hit; blocks are hashed the first time only.
        """
        if not self.prefix_caching:
            return []
        blocks = range((request.num_tokens - 1) // BLOCK_TOKENS)
        return self.index.lookup(request.key(block) for block in blocks)

    def will_hit(self, request: Request, writer: Request, block: int) -> bool:
        """Whether `request` finds its `block` in the cache once `writer` has computed its own."""
        findable = min(request.num_tokens - 1, writer.num_tokens) // BLOCK_TOKENS
        if not self.prefix_caching or block >= findable:
            return False
        return request.key(block) == writer.key(block)

    def num_wanted(self, request: Request, hits: list[int]) -> int:
        """Available pages that the request's known tokens would use up, given its hits.

        A hit costs nothing only while another request holds it.
        """
        shared = sum(not self.pool.is_cached(page) for page in hits)
        return num_blocks(request.num_tokens) - shared

    def attach(self, request: Request, hits: list[int]) -> None:
        """Give a request without pages its hits."""
        assert not request.pages
        for page in hits:
            self.pool.share(page)
        request.pages.extend(hits)
        request.num_computed = len(hits) * BLOCK_TOKENS

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate until the request's pages cover `num_tokens` tokens.

        False where the pool runs out first; the pages taken so far stay with the request.
        """
        while len(request.pages) < num_blocks(num_tokens):
            if not self.pool.num_available:
                return False
            request.pages.append(self.pool.allocate())
        return True

    def advance(self, request: Request, count: int) -> None:
        """Record that `count` more tokens are in pages, and register the pages they completed."""
        first = request.num_computed // BLOCK_TOKENS
        request.num_computed += count
        if self.prefix_caching:
            for block in range(first, request.num_computed // BLOCK_TOKENS):
                self.index.register(request.pages[block], request.key(block), request.arrival)

    def release(self, request: Request) -> None:
        """Take all pages from a request; registered ones stay cached.

        The last page goes first, so that eviction shortens a prefix from its end: without its
        first page, the rest of a prefix cannot be found.
        """
        for page in reversed(request.pages):
            self.pool.release(page, keep=page in self.index)
        request.pages.clear()

    def distrust(self, request: Request) -> None:
        """Make every page that the request ever registered unfindable, whoever holds it now.

        Pages that it hit were computed by others, who had no error.
        """
        for page in self.index.written_by(request.arrival, request.keys):
            self.index.forget(page)
            if self.pool.is_cached(page):
                self.pool.discard(page)

    def check_invariants(self, holders: Iterable[Request]) -> None:
        """Assert that pool, index and the pages of all `holders` agree. Hashes every token."""
        holders = list(holders)
        self.pool.check_invariants()
        self.index.check_invariants()
        held = Counter(page for request in holders for page in request.pages)
        assert held == self.pool.references, "reference counts differ from the pages held"
        assert NULL_PAGE not in self.index
        for page in self.index.entries:
            assert page in held or self.pool.is_cached(page), "a free page is registered"
        assert self.pool.num_cached == sum(page not in held for page in self.index.entries)
        for request in holders:
            assert len(request.pages) >= num_blocks(request.num_computed)
            self._check_content(request)

    def _check_content(self, request: Request) -> None:
        """A page is registered only if full, and then under the key of its holder's tokens."""
        key = root_key(request.cache_salt)
        full = request.num_computed // BLOCK_TOKENS
        for block, page in enumerate(request.pages):
            if block < full:
                start = block * BLOCK_TOKENS
                key = block_key(key, request.token_ids(start, start + BLOCK_TOKENS))
                assert page not in self.index or self.index.entries[page].key == key
            else:
                assert page not in self.index, "a page is registered before it is complete"
                assert self.pool.references[page] == 1, "a page is shared before it is complete"
