"""A user's prices for machines, from TOML. Holds no price of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from winnow.errors import RequestError


@dataclass(frozen=True)
class Price:
    """What one device costs for an hour, in `currency`.

    `machine` is text that a record's machine must hold: the GPU's name, say. With `watts`, the
    mean draw of one device, and `per_kwh`, energy comes on top.
    """

    machine: str
    currency: str
    device_hour: float
    watts: float = 0.0
    per_kwh: float = 0.0

    def __post_init__(self) -> None:
        for name in ("device_hour", "watts", "per_kwh"):
            value = getattr(self, name)
            least = "above 0" if name == "device_hour" else "of at least 0"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or value < 0 or (name == "device_hour" and not value):
                raise RequestError(
                    f"{name} of {self.machine!r} is {value!r}: give a number {least}"
                )

    @property
    def hour(self) -> float:
        """One device for an hour, energy included."""
        return self.device_hour + self.watts / 1e3 * self.per_kwh

    def tokens_per_unit(self, tokens_per_s_per_device: float) -> float:
        """Tokens for one unit of currency at a throughput of one device."""
        return tokens_per_s_per_device * 3600 / self.hour


def load_prices(path: Path) -> list[Price]:
    """The prices of a TOML file: `currency`, then one [[price]] a kind of machine."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not TOML: {error}") from error
    entries = table.get("price")
    if not isinstance(table.get("currency"), str) or not isinstance(entries, list) or not entries:
        raise RequestError(f"{path} needs a currency and at least one [[price]]")
    return [_price(path, table["currency"], entry) for entry in entries]


def price_of(prices: Sequence[Price], machine: Mapping[str, Any]) -> Price | None:
    """The one price whose `machine` is part of a record's machine; None if there is none.

    RequestError if several fit.
    """
    words = " ".join(str(value) for value in machine.values())
    fitting = [price for price in prices if price.machine in words]
    if len(fitting) > 1:
        names = " and ".join(repr(price.machine) for price in fitting)
        raise RequestError(f"prices of {names} both fit the machine {words!r}: make them distinct")
    return fitting[0] if fitting else None


def _price(path: Path, currency: str, entry: Any) -> Price:
    known = [f.name for f in fields(Price) if f.name != "currency"]
    wrong = [name for name in entry if name not in known] if isinstance(entry, dict) else ["?"]
    if wrong or "machine" not in entry or "device_hour" not in entry:
        raise RequestError(
            f"a [[price]] of {path} takes {', '.join(known)}, machine and device_hour always: "
            f"it is {entry!r}"
        )
    return Price(currency=currency, **entry)
