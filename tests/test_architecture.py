"""The import rule, the size of modules and what messages name, as promises that are checked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.config import EngineConfig

PACKAGE = Path(__file__).parents[1] / "winnow"

MAY_SEE: dict[str, set[str]] = {
    "errors": set(),
    "spec": {"errors"},
    "config": {"errors", "spec"},
    "core": {"errors", "spec"},
    "ops": {"errors", "spec"},
    "parallel": {"errors", "spec"},
    "model": {"errors", "spec", "config", "core", "ops", "parallel"},
    "transfer": {"errors", "spec", "config", "core", "ops", "parallel"},
    "speculate": {"errors", "spec", "config", "core", "ops", "parallel", "model", "transfer"},
}
MAY_SEE["engine"] = {*MAY_SEE["speculate"], "speculate"}
MAY_SEE["server"] = MAY_SEE["bench"] = {*MAY_SEE["engine"], "engine"}

WITHOUT_TORCH = ["winnow", "winnow.errors", "winnow.config", "winnow.cli"]
WITHOUT_TORCH += [
    f"winnow.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}"
    for layer in ("spec", "core")
    for path in sorted((PACKAGE / layer).glob("*.py"))
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, lazily or for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their layer"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_sees_only_the_layers_below_its_own(path: Path) -> None:
    layer = layer_of(path)
    if layer in ("__init__", "__main__", "cli", "commands"):
        return
    seen = {name.split(".")[1] for name in imports(path) if name.startswith("winnow.")}
    forbidden = seen - MAY_SEE[layer] - {layer, "__version__"}
    assert not forbidden, f"{layer} must not import {sorted(forbidden)}"


@pytest.mark.parametrize("kind", ["cuda", "hopper"])
def test_only_the_table_and_its_own_kind_import_a_gpu_module(kind: str) -> None:
    for path in modules():
        if path != PACKAGE / "ops" / "table.py" and path.name not in (f"{kind}.py", "hopper.py"):
            assert not [n for n in imports(path) if kind in n.split(".")[2:]], path


def test_only_the_table_brings_triton_in() -> None:
    """It is not installed where there is no GPU."""
    kernels = [path for path in modules() if "triton" in imports(path)]
    assert {layer_of(path) for path in kernels} <= {"ops"}
    names = {".".join(("winnow", *p.relative_to(PACKAGE).with_suffix("").parts)) for p in kernels}
    for path in modules():
        if path not in kernels and path != PACKAGE / "ops" / "table.py":
            assert not names & set(imports(path)), path


def test_light_modules_import_without_torch() -> None:
    script = (
        f"import sys, importlib\nfor m in {WITHOUT_TORCH!r}: importlib.import_module(m)\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules), 'something heavy came in'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_says_what_it_owns_and_stays_short(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    limit = 600 if path.name == "hopper.py" else 400
    assert len(text.splitlines()) <= limit


def test_no_handler_swallows_every_exception() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                broad = node.type is None or (
                    isinstance(node.type, ast.Name) and node.type.id == "Exception"
                )
                assert not (silent and broad), f"{path}:{node.lineno}"


def test_a_message_names_a_field_beside_the_option_that_a_command_has_for_it() -> None:
    """Who calls from Python has no option: where layers speak that an LLM reaches, an option stands
    in brackets behind its field."""
    options = {name.replace("_", "-"): name for name in EngineConfig.__dataclass_fields__}
    options |= {"layers": "num_layers", "random-weights": "random_weights"}
    seen = 0
    for path in modules():
        if layer_of(path) in ("core", "engine", "model", "ops", "config"):
            for text in texts(path):
                for option in re.findall(r"--([a-z-]+)", text):
                    if option in options:
                        seen += 1
                        assert f"{options[option]} (--{option})" in text, f"{path}: {text}"
    assert seen > 20


def texts(path: Path) -> Iterator[str]:
    """Strings as they are put together, what is filled in left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
