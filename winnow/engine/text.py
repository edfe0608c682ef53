"""Text to tokens and back, whole or one token at a time. Knows no model, request or template."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from winnow.engine.stops import StopMatcher as StopMatcher
from winnow.errors import CheckpointError, RequestError, UnsupportedError

_NAMED_SPECIALS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTEXT_TOKENS = 4
"""Tokens decoded again before new ones, so that these join as they would in the whole text."""


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None for a directory without `tokenizer.json`.

    Special are the tokens that `tokenizer.json` or `tokenizer_config.json` marks so or gives a
    role. CheckpointError for a file that cannot be read, UnsupportedError for a decoder that
    cannot stream.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(
            f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; "
            "copy the file again, or remove it to serve token ids alone"
        ) from error
    return Tokenizer(backend, special=_declared_specials(directory / "tokenizer_config.json"))


class Tokenizer:
    """The text side of a vocabulary; token ids are those of the model."""

    def __init__(self, backend: tokenizers.Tokenizer, *, special: Iterable[str] = ()) -> None:
        """`special` names more special tokens than `backend` marks; those it lacks never occur."""
        # A saved tokenizer may cut or pad what it is given, as its training did.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        marked = {i for i, t in added.items() if t.special}
        named = (backend.token_to_id(text) for text in special)
        self.special_ids = frozenset(marked.union(i for i in named if i is not None))
        self.marker_ids = frozenset(added) - self.special_ids
        """Tokens that mark a place in a format and are text all the same."""
        self.byte_level, self.byte_fallback = _decoder_kind(backend)

    @property
    def vocab_size(self) -> int:
        """Tokens with a text; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` adds what the tokenizer puts around a text, such as a start.

        RequestError for text that holds half of a character (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the text is {text[error.start]!r}, half of a "
                "character: send whole characters"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; those that the tokenizer does not know have none."""
        if skip_special:
            ids = [i for i in ids if i not in self.special_ids]
        return self._backend.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id without one."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that a token stands for in the middle of a text; none for an id without one.

        It may be part of a character.
        """
        token = self.token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return _spelt_bytes(token)
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        # What such a decoder writes for one token alone depends on whether it begins the text.
        before = self.decode([token_id], skip_special=False)
        both = self.decode([token_id, token_id], skip_special=False)
        return both.removeprefix(before).encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling; None if there is none."""
        return self._backend.token_to_id(token)


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens, each character given out once and whole.

    The pieces of `push` and the last one of `flush` together are `Tokenizer.decode` of all the
    tokens. A token that ends inside a character is held until the character is whole, or cannot
    become so. The cost of a token does not grow with the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._stream: _Bytes | _Window = (
            _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)
        )

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often none."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def flush(self) -> str:
        """The text still held, unfinished characters as U+FFFD; call it once, after the last."""
        return self._stream.flush()


class _Bytes:
    """For byte-level vocabularies: a token's spelling is its bytes, whatever stands around it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(_spelt_bytes(self._tokenizer.token(token_id) or ""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """For other vocabularies: what the newest tokens add to the text of the few before them.

    A token's text depends on whether one stands before it (a leading space is dropped at the very
    start, and only there), so the window always begins with tokens that already have a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        """Characters of the window's text that were given out."""
        self._context_start = 0
        """Where a shorter window may begin: before it, all text was given out."""

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._tokenizer.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            # One wrong byte turns its whole run into U+FFFD: certain only when the run has ended.
            return ""
        new = self.flush()
        if len(self._window) - self._context_start >= _CONTEXT_TOKENS:
            self._shorten()
        return new

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special=False)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _shorten(self) -> None:
        context = self._window[self._context_start :]
        text = self._tokenizer.decode(context, skip_special=False)
        if text:
            self._window, self._shown, self._context_start = context, len(text), len(context)


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens spell bytes, and whether some tokens stand for single bytes."""
    if backend.decoder is None:
        return False, False
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = [d["type"] for d in decoder.get("decoders", [decoder])]
    if "ByteLevel" not in kinds:
        return False, "ByteFallback" in kinds
    if kinds[0] != "ByteLevel" or set(kinds[1:]) - {"Fuse"}:
        raise UnsupportedError(
            f"the tokenizer decodes by {', '.join(kinds)}, which cannot be streamed; "
            "ByteLevel is served alone or followed by Fuse"
        )
    return True, False


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones of Latin-1 as themselves, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _spelt_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with any other character is its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _declared_specials(path: Path) -> list[str]:
    """Texts of the special tokens that a `tokenizer_config.json` names; none without the file."""
    if not path.exists():
        return []
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): copy the file again") from error
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{path} holds no JSON object: copy the file again")
    entries = [config.get(f"{name}_token") for name in _NAMED_SPECIALS]
    # The same list under transformers' older and newer name; the newer may be a map by role.
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries += _listed(config, key, path)
    added = _listed(config, "added_tokens_decoder", path)
    entries += [token for token in added if isinstance(token, Mapping) and token.get("special")]
    texts = (entry.get("content") if isinstance(entry, Mapping) else entry for entry in entries)
    return [text for text in texts if isinstance(text, str)]


def _listed(config: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    """What a list or a map of the config holds; nothing if it has none."""
    value = config.get(key) or []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list):
        return value
    raise CheckpointError(f"{path}: {key} is neither list nor map: copy the file again")
