"""Keys of blocks and the pages found under them."""

from __future__ import annotations

import pytest

from winnow.core.prefix import MAX_TOKEN_ID, PrefixIndex, block_key, root_key

BLOCK = tuple(range(128))


def chain(salt, *blocks):
    keys, parent = [], root_key(salt)
    for block in blocks:
        parent = block_key(parent, block)
        keys.append(parent)
    return keys


def test_a_key_depends_on_salt_parent_tokens_and_their_order():
    a = chain("", BLOCK, BLOCK)
    assert len({*a, *chain("x", BLOCK, BLOCK), *chain("", BLOCK[::-1])}) == 5
    assert a == chain("", BLOCK, BLOCK)


def test_keys_are_the_same_on_every_machine():
    assert root_key("").hex()[:16] == "7def75c338f7013a"
    assert chain("", BLOCK)[0].hex()[:16] == "9322d19447017032"


def test_every_token_id_and_every_string_of_a_json_document_has_a_key():
    assert chain("\ud800", (MAX_TOKEN_ID,) * 128) != chain("\ud801", (MAX_TOKEN_ID,) * 128)


def test_lookup_finds_the_longest_registered_prefix():
    keys = chain("", BLOCK, BLOCK, BLOCK)
    index = PrefixIndex()
    assert index.lookup(keys) == []
    index.register(5, keys[0], writer=0)
    index.register(3, keys[2], writer=0)
    assert index.lookup(keys) == [5]
    index.register(9, keys[1], writer=0)
    assert index.lookup(keys) == [5, 9, 3]
    assert index.lookup(keys[:2]) == [5, 9]


def test_lookup_makes_no_key_past_the_first_that_is_missing():
    keys = chain("", BLOCK, BLOCK, BLOCK)
    index = PrefixIndex()
    index.register(5, keys[0], writer=0)
    read = []
    index.lookup(read.append(key) or key for key in keys)
    assert read == keys[:2]


def test_the_first_registration_of_a_key_wins():
    index = PrefixIndex()
    (key,) = chain("", BLOCK)
    assert index.register(1, key, writer=0)
    assert not index.register(2, key, writer=1)
    assert index.lookup([key]) == [1]
    assert 2 not in index
    index.check_invariants()


def test_a_page_has_one_key():
    index = PrefixIndex()
    a, b = chain("", BLOCK, BLOCK)
    index.register(1, a, writer=0)
    with pytest.raises(AssertionError):
        index.register(1, b, writer=0)


def test_a_forgotten_page_is_not_found_and_its_key_is_free_again():
    index = PrefixIndex()
    (key,) = chain("", BLOCK)
    index.register(1, key, writer=0)
    index.forget(1)
    assert index.lookup([key]) == []
    assert 1 not in index
    assert index.register(2, key, writer=0)
    index.check_invariants()


def test_written_by_gives_the_writers_own_pages_only():
    keys = chain("", BLOCK, BLOCK, BLOCK)
    index = PrefixIndex()
    for page, (key, writer) in enumerate(zip(keys, (4, 8, 4), strict=True), start=1):
        index.register(page, key, writer)
    assert index.written_by(4, keys) == [1, 3]
    assert index.written_by(4, keys[:1]) == [1]
    assert index.written_by(5, keys) == []
