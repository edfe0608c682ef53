"""`python -m train.ngram`: the baseline, an interpolated Kneser-Ney model of order 5 on the
training text, over the model's own tokens and over bytes. Records bits per byte of held-out text.

Source: S. Chen and J. Goodman, 1998, with one absolute discount an order, estimated from the
numbers of n-grams seen once and twice.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from train import corpus
from train.mixture import Source

ORDER = 5
_RECORD = Path(__file__).parent / "records" / "ngram.jsonl"

Array = np.ndarray


class KneserNey:
    """Counts of a text of symbols below 2**bits; ORDER * bits must fit 63."""

    def __init__(self, symbols: Array, bits: int) -> None:
        self.bits = bits
        self.vocabulary = 1 << bits
        self._levels: list[tuple[Array, Array, Array, Array, Array, float]] = []
        grams = _grams(symbols, ORDER, bits)
        keys, counts = np.unique(grams, return_counts=True)
        for order in range(ORDER, 0, -1):
            self._levels.append(self._level(keys, counts))
            # The next lower order counts in how many contexts a gram continues one, not how often.
            shorter = keys & ((1 << (bits * (order - 1))) - 1)
            keys, counts = np.unique(shorter, return_counts=True)
        self._levels.reverse()

    def _level(self, keys: Array, counts: Array) -> tuple[Array, Array, Array, Array, Array, float]:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # A text without n-grams seen once, which no real one is, says nothing of the discount.
        discount = once / (once + 2 * twice) if once else 0.5
        contexts, first = np.unique(keys >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(keys)))
        return keys, counts, contexts, totals, kinds, discount

    def bits_of(self, symbols: Array) -> float:
        """Bits of every symbol that has a full context before it."""
        grams = _grams(symbols, ORDER, self.bits)
        probability = np.full(len(grams), 1 / self.vocabulary)
        for order, level in enumerate(self._levels, 1):
            keys, counts, contexts, totals, kinds, discount = level
            gram = grams & ((1 << (self.bits * order)) - 1)
            own = _found(keys, counts, gram)
            context = gram >> self.bits
            total = _found(contexts, totals, context)
            spare = discount * _found(contexts, kinds, context)
            seen = total > 0
            mixed = (np.maximum(own - discount, 0) + spare * probability) / np.maximum(total, 1)
            probability = np.where(seen, mixed, probability)
        return float(-np.log2(probability).sum())


def _grams(symbols: Array, order: int, bits: int) -> Array:
    """int64: each run of `order` symbols as one number, the last symbol lowest."""
    wide = symbols.astype(np.int64)
    count = len(wide) - order + 1
    grams = np.zeros(count, dtype=np.int64)
    for offset in range(order):
        grams = (grams << bits) | wide[offset : offset + count]
    return grams


def _found(keys: Array, values: Array, wanted: Array) -> Array:
    """Values of the keys wanted, 0 where there is none."""
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def main() -> None:
    documents = corpus.read()
    encode = Source().tokenizer.encode_batch
    with _RECORD.open("w") as out:
        for unit, bits in (("token", 12), ("byte", 8)):

            def symbols(texts: list[str], unit: str = unit) -> list[Array]:
                if unit == "byte":
                    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
                return [np.array(encoding.ids, dtype=np.uint16) for encoding in encode(texts)]

            model = KneserNey(
                np.concatenate(symbols([d.text for d in documents if not d.held_out])), bits
            )
            bits_by, bytes_by = {}, {}
            for kind in sorted({d.name.partition("/")[0] for d in documents}):
                texts = [d.text for d in documents
                         if d.held_out and d.name.startswith(kind + "/")]  # fmt: skip
                found = sum(model.bits_of(part) for part in symbols(texts) if len(part) >= ORDER)
                bits_by[kind], bytes_by[kind] = found, sum(len(t.encode()) for t in texts)
            result = {kind: round(bits_by[kind] / bytes_by[kind], 4) for kind in bits_by}
            result["all"] = round(sum(bits_by.values()) / sum(bytes_by.values()), 4)
            assert all(math.isfinite(value) for value in result.values())
            line = json.dumps({"order": ORDER, "unit": unit, "bits_per_byte": result})
            out.write(line + "\n")
            print(line)


if __name__ == "__main__":
    main()
