"""Elements to JSON, while they come: the arguments of one call. Knows no tags and no events.

The format has no types, so the schema says what an element is: text that is a string, or something
else; elements that are the properties of an object, or the items of a list. What the schema leaves
open is read once the element has ended; everything else is written as it comes.

- Elements inside an element are properties by name. They are items where the schema says list, or
  where it says nothing and all are called `item`.
- Elements of one name that follow each other are one list: where the schema says list, one of them
  is a list of one.
- Text beside elements is the property `$text` of an object; beside items, and between the
  arguments of a call, it is a fault.
"""

from __future__ import annotations

from typing import Protocol

from winnow.server.m3_literals import as_json, escaped, may_be_literal
from winnow.server.m3_schema import Shape

MAX_DEPTH = 64
"""Elements inside each other."""
_ITEM = "item"
_TEXT = "$text"


class MalformedError(Exception):
    """The elements are no arguments."""


class Frame(Protocol):
    """An element that is open. Every method gives the JSON that it makes certain, often none."""

    tail: str
    """What is to follow its JSON, unless a sibling of the same name goes on with its list."""

    def text(self, text: str) -> str: ...
    def child(self, name: str) -> tuple[str, Frame]:
        """An element begins inside; its frame gets what follows."""
        ...

    def take(self, frame: Frame) -> str:
        """The element inside has ended."""
        ...

    def close(self) -> str: ...


class Elements:
    """Elements that are open inside each other; what its methods give is the JSON of the root."""

    def __init__(self, root: Frame) -> None:
        self._open: list[tuple[str, Frame]] = [("", root)]

    @property
    def depth(self) -> int:
        """Elements that are open inside the root."""
        return len(self._open) - 1

    def text(self, text: str) -> str:
        """Text inside the innermost element. MalformedError where there can be none."""
        return self._open[-1][1].text(text)

    def begin(self, name: str) -> str:
        """An element begins. MalformedError where there can be none of this name."""
        if len(self._open) > MAX_DEPTH:
            raise MalformedError
        piece, frame = self._open[-1][1].child(name)
        self._open.append((name, frame))
        return piece

    def end(self, name: str) -> str:
        """The innermost element ends. MalformedError if it has another name, or none is open."""
        opened, frame = self._open[-1]
        if not self.depth or opened != name:
            raise MalformedError
        self._open.pop()
        return self._open[-1][1].take(frame)

    def close(self) -> str:
        """The root ends. MalformedError if an element is open."""
        if self.depth:
            raise MalformedError
        root = self._open[0][1]
        return root.close() + root.tail


def arguments(shape: Shape) -> Elements:
    """The root of a call whose arguments have this shape: always an object."""
    return Elements(_Object(shape.only("object"), strict=True))


def _frame(shape: Shape) -> Frame:
    return _Recorded(shape) if shape.kinds >= {"array", "object"} else _Element(shape)


class _Element:
    """An element of a shape that tells lists from objects."""

    def __init__(self, shape: Shape) -> None:
        self.tail = ""
        self._shape = shape
        self._held = ""
        self._is_string = False
        self._inside: _Object | _Array | None = None
        self._listed: int | None = None
        """Items that siblings before have written to the list; None if there is no list yet."""

    def text(self, text: str) -> str:
        if self._inside is not None:
            return self._inside.text(text)
        if self._is_string:
            return escaped(text)
        self._held += text
        return "" if self._may_be_no_string() else self._begin_string()

    def _may_be_no_string(self) -> bool:
        kinds = self._shape.kinds
        if "string" not in kinds or self._listed is not None:
            return True
        if kinds & {"array", "object"} and not self._held.strip():
            return True
        return may_be_literal(self._held, kinds)

    def _begin_string(self) -> str:
        self._is_string = True
        return f'"{escaped(self._held)}'

    def child(self, name: str) -> tuple[str, Frame]:
        if self._inside is None:
            self._inside = self._begin()
        return self._inside.child(name)

    def _begin(self) -> _Object | _Array:
        kinds = self._shape.kinds
        if "object" in kinds and not self._is_string:
            inside = _Object(self._shape.only("object"))
            inside.text(self._held)
            return inside
        if "array" in kinds and not self._held.strip() and not self._is_string:
            return _Array(self._shape.only("array"), self._listed)
        raise MalformedError

    def take(self, frame: Frame) -> str:
        assert self._inside is not None
        return self._inside.take(frame)

    def close(self) -> str:
        if self._is_string:
            return '"'
        if self._inside is None:
            return self._close_text()
        piece = self._inside.close()
        self.tail = self._inside.tail
        if isinstance(self._inside, _Array):
            self._listed = self._inside.count
        return piece

    def _close_text(self) -> str:
        value = as_json(self._held, self._shape)
        if not value.startswith("["):
            if self._listed is not None:
                raise MalformedError
            return value
        # The list stays open, for siblings of the same name.
        self.tail = "]"
        items = value[1:-1].strip()
        lead = "[" if self._listed is None else ", " if self._listed and items else ""
        self._listed = (self._listed or 0) + bool(items)
        return lead + items

    def again(self) -> bool:
        """Go on with the list of the element that has ended; False if it was none."""
        self._inside, self._held = None, ""
        return self._listed is not None


class _Object:
    """Elements that are properties."""

    def __init__(self, shape: Shape, *, strict: bool = False) -> None:
        """`strict` allows no text beside the elements."""
        self.tail = ""
        self._shape = shape
        self._strict = strict
        self._loose: list[str] = []
        self._seen: set[str] = set()
        self._last: tuple[str, Frame] | None = None
        self._unwritten: list[str] = []
        """Values of the last property, where it takes a sibling to know if they are a list."""

    def text(self, text: str) -> str:
        if self._strict and text.strip():
            raise MalformedError
        self._loose.append(text)
        return ""

    def child(self, name: str) -> tuple[str, Frame]:
        if self._last is not None and self._last[0] == name:
            return "", self._sibling(self._last[1])
        if name in self._seen:
            raise MalformedError  # its first value is written already
        shape = self._shape.property(name)
        frame = _frame(shape)
        piece = f"{self._finished()}{self._key(name)}"
        self._last = (name, frame)
        return piece, frame

    def _sibling(self, last: Frame) -> Frame:
        if isinstance(last, _Recorded):
            return _Recorded(last.shape)
        if isinstance(last, _Element) and last.again():
            return last
        raise MalformedError

    def _key(self, name: str) -> str:
        lead = ", " if self._seen else "{"
        self._seen.add(name)
        return f'{lead}"{escaped(name)}": '

    def _finished(self) -> str:
        """What completes the last property."""
        if self._last is None:
            return ""
        values, self._unwritten = self._unwritten, []
        if not values:
            return self._last[1].tail
        return values[0] if len(values) == 1 else f"[{', '.join(values)}]"

    def take(self, frame: Frame) -> str:
        piece = frame.close()
        if not isinstance(frame, _Recorded):
            return piece
        self._unwritten.append(piece)
        return ""

    def close(self) -> str:
        piece = self._finished()
        loose = "".join(self._loose).strip()
        if loose:
            if _TEXT in self._seen:
                raise MalformedError
            piece += f'{self._key(_TEXT)}"{escaped(loose)}"'
        return f"{piece}}}" if self._seen else "{}"


class _Array:
    """Elements that are items, of whatever name; or one item that came without a tag of its own."""

    def __init__(self, shape: Shape, listed: int | None) -> None:
        """`listed` items are written already; None if nothing of the list is."""
        self.tail = "]"
        self.count = listed or 0
        self._shape = shape
        self._begun = listed is not None
        self._bare: _Object | None = None
        """An object whose properties stand where items should: its element is one of the list."""

    def text(self, text: str) -> str:
        if self._bare is not None:
            return self._bare.text(text)
        if text.strip():
            raise MalformedError
        return ""

    def child(self, name: str) -> tuple[str, Frame]:
        if self._bare is not None:
            return self._bare.child(name)
        shape = self._shape.item(self.count)
        lead = ("" if self._begun else "[") + (", " if self.count else "")
        self.count += 1
        self._begun = True
        if name != _ITEM and shape.names(name):
            self._bare = _Object(shape.only("object"))
            piece, frame = self._bare.child(name)
            return lead + piece, frame
        return lead, _frame(shape)

    def take(self, frame: Frame) -> str:
        return self._bare.take(frame) if self._bare is not None else frame.close() + frame.tail

    def close(self) -> str:
        if self._bare is not None:
            return self._bare.close()
        return "" if self._begun else "["


class _Recorded:
    """An element that may be list or object: what is in it says which, once it has ended."""

    def __init__(self, shape: Shape) -> None:
        self.tail = ""
        self.shape = shape
        self._steps: list[tuple[str, str]] = []
        self._names: set[str] = set()
        self._text: list[str] = []

    def text(self, text: str) -> str:
        self._text.append(text)
        self._steps.append(("text", text))
        return ""

    def child(self, name: str) -> tuple[str, Frame]:
        self._names.add(name)
        self._steps.append(("begin", name))
        return "", _RecordedInside(self._steps, name)

    def take(self, frame: Frame) -> str:
        return frame.close()

    def close(self) -> str:
        text = "".join(self._text)
        if not self._names:
            return as_json(text, self.shape)
        is_list = self._names == {_ITEM} and not text.strip()
        elements = Elements(_Element(self.shape.only("array" if is_list else "object")))
        do = {"text": elements.text, "begin": elements.begin, "end": elements.end}
        return "".join(do[step](value) for step, value in self._steps) + elements.close()


class _RecordedInside:
    """An element inside a recorded one."""

    def __init__(self, steps: list[tuple[str, str]], name: str) -> None:
        self.tail = ""
        self._steps = steps
        self._name = name

    def text(self, text: str) -> str:
        self._steps.append(("text", text))
        return ""

    def child(self, name: str) -> tuple[str, Frame]:
        self._steps.append(("begin", name))
        return "", _RecordedInside(self._steps, name)

    def take(self, frame: Frame) -> str:
        return frame.close()

    def close(self) -> str:
        self._steps.append(("end", self._name))
        return ""
