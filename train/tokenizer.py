"""The demo's vocabulary: byte-level BPE trained on its own data, digits one by one.

`python -m train.tokenizer` writes build/train/tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from train import chats, corpus, recall, tasks

PATH = corpus.BUILD / "tokenizer.json"
VOCABULARY = 4096
START, END = "]~!b[", "[e~["
SPECIAL = (START, END, "]~b]")
TAGS = (
    "]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>", "<invoke name=\"",
    "</invoke>", "<tools>", "</tools>", "<tool>", "</tool>", "<response>", "</response>",
)  # fmt: skip
"""One token each, but part of the text: parsers of answers must see them."""

_TEXT_CHARACTERS = {"austen": 3e6, "shakespeare": 2e6, "bible": 1.5e6, "docs": 2.5e6, "stdlib": 1e6,
                    "wordnet": 2e6}  # fmt: skip


def main() -> None:
    tokenizer = build(_texts(Random(0)), VOCABULARY)
    tokenizer.save(str(PATH))
    print(f"{tokenizer.get_vocab_size()} tokens in {PATH}")


def load() -> Tokenizer:
    return Tokenizer.from_file(str(PATH))


def build(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A tokenizer of `vocabulary` entries, tags and special tokens the last of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _texts(rng: Random) -> Iterator[str]:
    left = dict(_TEXT_CHARACTERS)
    documents = [d for d in corpus.read() if not d.held_out]
    rng.shuffle(documents)
    for document in documents:
        kind = document.name.partition("/")[0]
        if left[kind] > 0:
            left[kind] -= len(document.text)
            yield document.text
    for _ in range(12000):
        text = chats.chat(rng, 200).text
        for tag in (*SPECIAL, *TAGS):
            text = text.replace(tag, "\n")
        yield text
    for _ in range(500):
        yield recall.listing(rng, 800).text
        yield tasks.arithmetic(rng, 400).text


if __name__ == "__main__":
    main()
