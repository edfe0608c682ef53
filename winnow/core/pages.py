"""Page ownership: which pages are free, referenced or cached. Knows nothing of requests, tokens
or tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from winnow.errors import CapacityError

NULL_PAGE = 0
"""The page that padding writes to. It never belongs to a request."""


class PagePool:
    """Pages 1 to `num_pages - 1`, each in exactly one of three states.

    free: its content is worth nothing. referenced: held by one or more requests. cached: held by
    none, but its content may be wanted again; the one released longest ago is evicted first, and
    only when no page is free. `on_evict(page)` is called before a cached page is handed out.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        if num_pages < 2:
            raise CapacityError(
                f"the cache has {num_pages} pages and one is kept for padding: "
                "start with num_pages (--num-pages) 2 or more"
            )
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold together: all but the null page."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return len(self._references)

    @property
    def references(self) -> Mapping[int, int]:
        """Number of holders of each referenced page."""
        return self._references

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def allocate(self) -> int:
        """A page for one holder, with arbitrary content. One must be available."""
        assert self.num_available, "allocate() from an exhausted pool"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._on_evict(page)
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to a cached or referenced page."""
        if page in self._cached:
            del self._cached[page]
            self._references[page] = 1
        else:
            self._references[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """Take a holder away. After the last one the page is cached if `keep`, else free."""
        self._references[page] -= 1
        if self._references[page]:
            return
        del self._references[page]
        if keep:
            self._cached[page] = None
        else:
            self._free.append(page)

    def discard(self, page: int) -> None:
        """Free a cached page whose content must not be found again."""
        del self._cached[page]
        self._free.append(page)

    def check_invariants(self) -> None:
        states = [*self._free, *self._cached, *self._references]
        assert sorted(states) == list(range(1, self.num_pages)), "a page is lost or has two states"
        assert all(count > 0 for count in self._references.values())
