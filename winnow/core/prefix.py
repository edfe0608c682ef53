"""Which page holds which stretch of text: keys of full blocks, and the pages registered under
them. Knows nothing of requests, nor of who holds a page.

The key of a block is a digest of the salt and of every token up to the block's end. K, V and
index keys depend on nothing else, so equal keys mean equal pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from winnow.spec.model import BLOCK_TOKENS

MAX_TOKEN_ID = 2**32 - 1
"""A key takes token ids as unsigned 32-bit integers, little-endian on every machine."""

# Two texts with one key would be served each other's pages, so keys are long enough that nobody
# can look for such texts.
_KEY_BYTES = 32
_BLOCK = struct.Struct(f"<{BLOCK_TOKENS}I")


def root_key(salt: str) -> bytes:
    """The parent of the first block's key. Any string is a salt, lone surrogates included."""
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=_KEY_BYTES, person=b"winnow salt").digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the BLOCK_TOKENS tokens that follow the block whose key is `parent`."""
    data = parent + _BLOCK.pack(*token_ids)
    return blake2b(data, digest_size=_KEY_BYTES, person=b"winnow block").digest()


class Entry(NamedTuple):
    """What a registered page holds (`key`) and who computed it (`writer`)."""

    key: bytes
    writer: int


class PrefixIndex:
    """Pages by key and keys by page. Only pages whose content is complete may be registered."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}

    @property
    def entries(self) -> Mapping[int, Entry]:
        """Every registered page."""
        return self._entries

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of leading `keys` that are all registered.

        Reads no key past the first that is missing, so the keys may be made on the way.
        """
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes, writer: int) -> bool:
        """Make a page findable. False, and no change, where another page has the key already."""
        assert page not in self._entries
        if key in self._pages:
            return False
        self._pages[key] = page
        self._entries[page] = Entry(key, writer)
        return True

    def forget(self, page: int) -> None:
        """Make a registered page unfindable."""
        del self._pages[self._entries.pop(page).key]

    def written_by(self, writer: int, keys: Iterable[bytes]) -> list[int]:
        """Pages registered by `writer` under any of `keys`."""
        found = (self._pages.get(key) for key in keys)
        return [page for page in found if page is not None and self._entries[page].writer == writer]

    def check_invariants(self) -> None:
        assert self._pages == {entry.key: page for page, entry in self._entries.items()}
        assert len(self._pages) == len(self._entries)
