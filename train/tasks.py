"""Generated exercises in plain text: copying, variables, arithmetic with its steps."""

from __future__ import annotations

from random import Random

from train import words
from train.sample import ANSWER, IGNORED, Sample


def copying(rng: Random, length: int) -> Sample:
    """Random words, then the same again, forwards or backwards."""
    listed = [words.name(rng) if rng.random() < 0.4 else words.word(rng)
              for _ in range(max(3, length // 16))]  # fmt: skip
    order, again = rng.choice((("Again", listed), ("Again", listed), ("Reversed", listed[::-1])))
    if order == "Reversed" and len(listed) > 12:
        order, again = "Again", listed
    sample = Sample().add(f"Words: {' '.join(listed)}\n{order}:", IGNORED)
    return sample.add(f" {' '.join(again)}\n", ANSWER)


def variables(rng: Random, length: int) -> Sample:
    """Assignments, of which some copy earlier ones, then values asked for: chains of look-ups."""
    values: dict[str, str] = {}
    lines = []
    for _ in range(max(3, length // 14)):
        name = (
            rng.choice(_LETTERS) + rng.choice(_LETTERS) + rng.choice(("", str(rng.randint(1, 9))))
        )
        if values and rng.random() < 0.4:
            source = rng.choice(list(values))
            values[name] = values[source]
            lines.append(f"{name} = {source}\n")
        else:
            values[name] = words.digits(rng, 1, 3)
            lines.append(f"{name} = {values[name]}\n")
    sample = Sample().add("".join(lines), IGNORED)
    for asked in rng.sample(list(values), max(1, min(len(values) // 2, 24))):
        sample.add(f"print({asked})\n#", IGNORED).add(f" {values[asked]}\n", ANSWER)
    return sample


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def sum_steps(a: int, b: int) -> str:
    """a + b by columns from the right, each with what is written and carried."""
    steps, carry = [], 0
    left, right = str(a)[::-1], str(b)[::-1]
    for place in range(max(len(left), len(right))):
        x = int(left[place]) if place < len(left) else 0
        y = int(right[place]) if place < len(right) else 0
        total = x + y + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        keep = f", write {total % 10}, carry 1" if carry else f", write {total % 10}"
        steps.append(f"{x} + {y}{carried} = {total}{keep}.")
    if carry:
        steps.append("Write 1.")
    return " ".join(steps)


def difference_steps(a: int, b: int) -> str:
    """a - b for a >= b, by columns from the right with borrows."""
    steps, borrow = [], 0
    left, right = str(a)[::-1], str(b)[::-1]
    for place, digit in enumerate(left):
        x = int(digit)
        y = int(right[place]) if place < len(right) else 0
        borrowed = f" - {borrow}" if borrow else ""
        total = x - y - borrow
        if total < 0:
            steps.append(f"{x} + 10 - {y}{borrowed} = {total + 10}, write {total + 10}, borrow 1.")
            borrow = 1
        else:
            steps.append(f"{x} - {y}{borrowed} = {total}, write {total}.")
            borrow = 0
    return " ".join(steps)


def product_steps(a: int, b: int) -> str:
    """a times one digit b, by columns from the right."""
    steps, carry = [], 0
    for digit in str(a)[::-1]:
        total = int(digit) * b + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        keep = f", carry {carry}" if carry else ""
        steps.append(f"{digit} * {b}{carried} = {total}, write {total % 10}{keep}.")
    if carry:
        steps.append(f"Write {carry}.")
    return " ".join(steps)


def exercise(rng: Random) -> tuple[str, str, str]:
    """An expression, its steps and its value. Sums of up to five digits, products by one."""
    kind = rng.choice("++--*")
    # Squared, so that small numbers, which people try first, are common.
    size = 1 + int(5 * rng.random() ** 1.7)
    a = rng.randint(0, 10**size - 1)
    b = rng.randint(0, 10 ** max(1, rng.randint(size - 1, size)) - 1)
    if kind == "+":
        return f"{a} + {b}", sum_steps(a, b), str(a + b)
    if kind == "-":
        a, b = max(a, b), min(a, b)
        return f"{a} - {b}", difference_steps(a, b), str(a - b)
    a, b = a % 1000, rng.randint(0, 9)
    return f"{a} * {b}", product_steps(a, b), str(a * b)


def arithmetic(rng: Random, length: int) -> Sample:
    """Exercises one after another; those with steps state the steps first."""
    sample = Sample()
    for _ in range(max(1, length // 60)):
        expression, steps, value = exercise(rng)
        if len(value) <= 2 and rng.random() < 0.6:
            sample.add(f"{expression} =", IGNORED).add(f" {value}\n", ANSWER)
        else:
            sample.add(f"Work out {expression}.\n", IGNORED)
            sample.add(f"{steps}\nAnswer: {value}\n", ANSWER)
    return sample
