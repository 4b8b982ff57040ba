"""The walls of the house, as rules over source text: which file may import what, how long files may be."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

PACKAGES = ("overlapfx", "models", "configs", "launch", "experiments")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

GROUND_FILES = ("types", "fields", "families", "config", "chips", "mesh", "compat")
LEVELS = {
    **{f"overlapfx.{name}": 0 for name in GROUND_FILES},
    "overlapfx.plan": 1,
    "overlapfx.ops": 2,
    "overlapfx.layers": 3,
    "overlapfx.train": 4,
    "overlapfx.aot": 4,
    "overlapfx": 4,  # the package itself, which hands out public names of all below
    "models": 5,
    "configs": 5,
    "launch": 6,
    "experiments": 6,
}
# Module (with all inside it): the only file that may import it.
ONLY_IMPORTER = {
    "orbax": "overlapfx/train/checkpoint.py",
    "tensorflow_datasets": "overlapfx/train/sources.py",
    "grain": "overlapfx/train/data.py",
    "jax._src": "overlapfx/ops/order.py",
}
# Name: the only file that may use or import it.
ONLY_USER = {"ppermute": "overlapfx/ops/ring.py"}


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken rule at one place."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def check_tree(project: pathlib.Path) -> tuple[list[str], list[Violation]]:
    """The checked paths, relative to the project, with every violation found in them."""
    files = sorted(file for package in PACKAGES for file in (project / package).rglob("*.py"))
    paths = [file.relative_to(project).as_posix() for file in files]
    return paths, [v for path, file in zip(paths, files, strict=True) for v in check_source(path, file.read_text())]


def check_source(path: str, source: str) -> list[Violation]:
    """Every violation in one file, given as its path relative to the project and its text."""
    tree = ast.parse(source, path)
    module = _module_name(path)
    found = [(line, what) for line, name in _imports(tree, module, path) for what in _check_import(path, module, name)]
    found += _check_users(path, tree)
    found += _check_lengths(source, tree)
    return [Violation(path, line, what) for line, what in sorted(found)]


def _module_name(path: str) -> str:
    parts = list(pathlib.PurePosixPath(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, module: str, path: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file; `from a import b` counts as a.b."""
    package = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            literal = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if called in ("import_module", "__import__") and isinstance(literal, str):
                yield node.lineno, literal


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _level(name: str) -> tuple[str, int] | None:
    """The longest entry of LEVELS that holds the dotted name, with its level; None for what is not ours."""
    entries = [(entry, level) for entry, level in LEVELS.items() if _inside(name, entry)]
    return max(entries, key=lambda found: len(found[0]), default=None)


def _check_import(path: str, module: str, name: str) -> Iterator[str]:
    """The rules that importing `name` in the file `path` breaks."""
    for limited, importer in ONLY_IMPORTER.items():
        if _inside(name, limited) and path != importer:
            yield f"imports {name}; only {importer} may import {limited}"
    top = name.split(".")[0]
    if _inside(module, "configs") and top not in ("ml_collections", "__future__", "configs"):
        yield f"imports {name}; configs/ imports only ml_collections"
    if _inside(module, "overlapfx.plan") and top != "overlapfx" and top not in sys.stdlib_module_names:
        yield f"imports {name}; plan/ is plain Python without arrays"
    from_config = _inside(name, "overlapfx.config") or _inside(name, "overlapfx.families")
    if _inside(module, "overlapfx.layers") and from_config and name != "overlapfx.config.Overlap":
        yield f"imports {name}; layers take the numbers they need, never the config"
    yield from _check_level(path, module, name)


def _check_level(path: str, module: str, name: str) -> Iterator[str]:
    """Imports point down only, or stay on their level."""
    own, other = _level(module), _level(name)
    if own is None or (own[0] == "overlapfx" and path != "overlapfx/__init__.py"):
        yield f"{module} belongs to no level; add it to LEVELS and to the design"
    elif other is None:
        return
    elif other[0] == "overlapfx" and _inside(module, "overlapfx"):
        yield f"imports {name} from the package's front door; inside the package import it where it is defined"
    elif other[1] > own[1]:
        yield f"imports {name} of level {other[1]} from level {own[1]}; imports point down only"


def _check_users(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, (ast.Name, ast.alias)):
            name = node.id if isinstance(node, ast.Name) else node.name
        else:
            continue
        if name in ONLY_USER and path != ONLY_USER[name]:
            yield node.lineno, f"uses {name}; only {ONLY_USER[name]} may"


def _check_lengths(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    num_lines = len(source.splitlines())
    if num_lines >= MAX_FILE_LINES:
        yield 1, f"the file has {num_lines} lines; files stay under {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length >= MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; functions stay under {MAX_FUNCTION_LINES}"
