import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from winnow.engine.stops import StopMatcher
from winnow.engine.text import IncrementalDetokenizer, Tokenizer, load_tokenizer
from winnow.errors import CheckpointError, RequestError, UnsupportedError

REPLACEMENT = "\ufffd"


def spelt(text):
    """How a byte-level vocabulary writes a text: one character a byte."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return encode.pre_tokenize_str(text)[0][0]


def byte_level_backend():
    """All bytes, some pieces of characters, and added tokens that are no byte spelling."""
    smile, euro, control = spelt("😀"), spelt("€"), spelt("\x80")
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab += [spelt("né"), smile[:3], smile[2:] + spelt(" a"), euro[1:], control[1:] * 3]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["two words", "]<]minimax[>[", "日本", "<image>"])
    return backend


def sentencepiece_backend(decoder, *, byte_tokens=True):
    """Pieces that carry their leading space, a bare space, and byte tokens."""
    pieces = ["<unk>", "▁", "▁▁", "▁a", "▁Hello", "a", "b", "né", "日", "▁日", REPLACEMENT, ","]
    pieces += ["▁" + REPLACEMENT]
    pieces += [
        f"<0x{b:02X}>" for b in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)
    ] * byte_tokens
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tag>"])
    return backend


def word_end_backend():
    """Pieces that carry the space after them."""
    pieces = ["a", "b", "a</w>", "né</w>", "</w>"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(pieces)}, []))
    backend.decoder = decoders.BPEDecoder("</w>")
    return backend


def llama_decoder():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def gemma_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


BACKENDS = {
    "byte level": byte_level_backend(),
    "metaspace": sentencepiece_backend(decoders.Metaspace(), byte_tokens=False),
    "metaspace, first": sentencepiece_backend(decoders.Metaspace(prepend_scheme="first")),
    "metaspace, never": sentencepiece_backend(decoders.Metaspace(prepend_scheme="never")),
    "stripped byte fallback": sentencepiece_backend(llama_decoder()),
    "byte fallback": sentencepiece_backend(gemma_decoder()),
    "word pieces": sentencepiece_backend(decoders.WordPiece("a", cleanup=True)),
    "word ends": word_end_backend(),
    "no decoder": sentencepiece_backend(None),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
KINDS = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def pieces_of(tokenizer, ids, **options):
    stream = IncrementalDetokenizer(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.flush()]


@KINDS
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_pieces_of_any_sequence_make_its_full_text(tokenizer, data):
    # Two ids that no token has stand for a model whose vocabulary is padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    for skip in (True, False):
        pieces = pieces_of(tokenizer, ids, skip_special=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)


@KINDS
def test_long_random_sequences_make_their_full_text_too(tokenizer):
    chance = random.Random(3)
    ids = [chance.randrange(tokenizer.vocab_size) for _ in range(3000)]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.randoms())
@example("né😀€日本", random.Random(0))
def test_no_piece_of_a_real_text_holds_half_a_character(text, chance):
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, skip_special=False)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text
    assert pieces[-1] == ""


def test_a_character_comes_with_the_token_that_completes_it():
    tokenizer = TOKENIZERS["byte level"]
    assert pieces_of(tokenizer, tokenizer.encode("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_a_broken_character_comes_as_soon_as_it_cannot_be_completed():
    tokenizer = TOKENIZERS["byte level"]
    first, *_ = tokenizer.encode("😀")
    a = tokenizer.encode("a")[0]
    assert pieces_of(tokenizer, [first, a, first]) == ["", REPLACEMENT + "a", "", REPLACEMENT]


def test_a_leading_space_is_dropped_at_the_start_alone():
    for name in ("metaspace", "stripped byte fallback"):
        backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
        hello, start = backend.token_to_id("▁Hello"), backend.token_to_id("<s>")
        assert pieces_of(tokenizer, [start, hello, hello]) == ["", "Hello", " Hello", ""]
        assert "".join(pieces_of(tokenizer, [hello] * 50)) == " ".join(["Hello"] * 50)


def test_tokens_without_text_do_not_make_a_start():
    backend = sentencepiece_backend(None)
    backend.add_tokens(["<none>"])
    steps = [decoders.Replace("<none>", ""), decoders.Replace("▁", " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    hello, none = backend.token_to_id("▁Hello"), backend.token_to_id("<none>")
    pieces = pieces_of(Tokenizer(backend), [hello, *[none] * 20, hello])
    assert "".join(pieces) == "Hello Hello"


def test_bytes_of_a_fallback_run_are_certain_only_when_the_run_ends():
    # The library makes every byte of a run that is not UTF-8 as a whole a U+FFFD.
    backend, tokenizer = BACKENDS["byte fallback"], TOKENIZERS["byte fallback"]
    euro = [backend.token_to_id(f"<0x{b:02X}>") for b in "€".encode()]
    a = backend.token_to_id("a")
    assert pieces_of(tokenizer, [*euro, a]) == ["", "", "", "€a", ""]
    assert pieces_of(tokenizer, [*euro, euro[0], a])[-2] == REPLACEMENT * 4 + "a"
    assert pieces_of(tokenizer, euro) == ["", "", "", "€"]


@KINDS
def test_a_token_costs_the_same_late_as_early(tokenizer, monkeypatch):
    decoded = []
    decode = Tokenizer.decode

    def counted(self, ids, **options):
        decoded.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    # The same token again and again: the loops that models fall into.
    for token_id in range(min(tokenizer.vocab_size, 40)):
        stream = IncrementalDetokenizer(tokenizer)
        decoded.clear()
        for _ in range(100):
            stream.push(token_id)
        assert max(decoded, default=0) <= 10
        assert len(decoded) <= 130


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("<s>a]<]minimax[>[</s>")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a]<]minimax[>["
    assert tokenizer.decode(ids, skip_special=False) == "<s>a]<]minimax[>[</s>"
    assert pieces_of(tokenizer, ids) == ["", "a", "]<]minimax[>[", "", ""]
    assert pieces_of(tokenizer, ids, skip_special=False)[0] == "<s>"


def test_ids_beyond_the_tokenizer_have_no_text():
    for tokenizer in TOKENIZERS.values():
        beyond = tokenizer.vocab_size + 5
        assert tokenizer.token(beyond) is None
        assert (
            tokenizer.decode([beyond, beyond]) == "".join(pieces_of(tokenizer, [beyond] * 2)) == ""
        )


def test_a_lone_surrogate_is_the_callers_mistake():
    with pytest.raises(RequestError, match=r"character 1 of the text is '\\ud800'"):
        TOKENIZERS["byte level"].encode("a\ud800")


def test_what_the_tokenizer_puts_around_a_text_can_be_left_out():
    backend = byte_level_backend()
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a")[0] == start
    assert tokenizer.encode("a") == [start, *tokenizer.encode("a", add_special=False)]


def test_a_saved_truncation_or_padding_does_not_touch_prompts():
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("01")) == 2


def test_a_decoder_that_cannot_be_streamed_is_refused():
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(UnsupportedError, match="decodes by ByteLevel, Strip, which cannot"):
        Tokenizer(backend)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert Tokenizer(backend).byte_level


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_checkpoints_tokenizer_is_the_one_it_saved(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size == TOKENIZERS["byte level"].vocab_size
    assert tokenizer.encode("né 日本") == TOKENIZERS["byte level"].encode("né 日本")
    assert {tokenizer.token(i) for i in tokenizer.special_ids} == {"<s>", "</s>"}


def test_the_tokenizer_config_adds_special_tokens_in_every_spelling(checkpoint):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "two words", "special": True},
        "pad_token": None,
        "unk_token": "not in the vocabulary",
        "additional_special_tokens": ["日本"],
        "extra_special_tokens": {"image_token": "<image>"},
        "added_tokens_decoder": {
            "264": {"content": "]<]minimax[>[", "special": True},
            "65": {"content": "a", "special": False},
        },
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(checkpoint)
    specials = {tokenizer.token(i) for i in tokenizer.special_ids}
    assert specials == {"<s>", "</s>", "two words", "日本", "<image>", "]<]minimax[>["}
    ids = tokenizer.encode("a日本two words<image>a")
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "aa"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"added_tokens_decoder": 3}'])
def test_a_damaged_file_is_a_checkpoint_error_that_names_it(checkpoint, name, damage):
    (checkpoint / name).write_bytes(damage)
    with pytest.raises(CheckpointError, match=rf"{name}.*copy the file again"):
        load_tokenizer(checkpoint)


def test_a_cut_off_tokenizer_file_is_a_checkpoint_error(checkpoint):
    path = checkpoint / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read by tokenizers"):
        load_tokenizer(checkpoint)


# Few letters, so that stops overlap themselves, each other and the cuts.
letters = st.text("ab", max_size=20)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def expected(text, stops, include):
    """By str.find on the whole text: (what is shown, the stop string)."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=500, deadline=None)
@given(st.lists(letters, max_size=8), stop_lists, st.booleans())
def test_any_cut_of_a_text_stops_where_the_whole_text_does(parts, stops, include):
    text = "".join(parts)
    matcher = StopMatcher(stops, include=include)
    shown, ended = "", False
    for i, part in enumerate(parts):
        piece, stopped = matcher.push(part)
        shown += piece
        seen = "".join(parts[: i + 1])
        assert stopped == any(stop in seen for stop in stops)
        assert not (ended and piece)
        ended = stopped
    shown += matcher.flush()
    assert (shown, matcher.matched) == expected(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(st.lists(letters, max_size=8), stop_lists)
def test_no_more_text_is_held_back_than_could_begin_a_stop(parts, stops):
    matcher = StopMatcher(stops)
    seen = shown = ""
    for part in parts:
        seen += part
        piece, stopped = matcher.push(part)
        shown += piece
        if stopped:
            return
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert seen == shown + seen[len(seen) - held :]


def test_of_two_stops_the_one_complete_first_ends_the_text():
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", True)


def test_of_stops_complete_together_the_longest_is_left_out():
    matcher = StopMatcher(["b", "ab", "aab"])
    assert matcher.push("caab") == ("c", True)
    assert matcher.matched == "aab"
    assert StopMatcher(["b", "ab"], include=True).push("caabzz") == ("caab", True)


def test_text_after_a_stop_is_dropped_for_good():
    matcher = StopMatcher(["end"])
    assert matcher.push("an e") == ("an ", False)
    assert matcher.push("nd and more") == ("", True)
    assert matcher.push("still more") == ("", True)
    assert matcher.flush() == ""


def test_held_text_comes_at_the_end_when_no_stop_does():
    matcher = StopMatcher(["endless"])
    assert matcher.push("the end") == ("the ", False)
    assert matcher.flush() == "end"


def test_without_stops_nothing_is_held():
    matcher = StopMatcher(())
    assert matcher.push("text") == ("text", False)
    assert matcher.flush() == ""


def test_an_empty_stop_is_our_own_mistake():
    with pytest.raises(ValueError):
        StopMatcher(["a", ""])
