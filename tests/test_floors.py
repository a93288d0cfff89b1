"""The floors of src/jaxis: nothing imports upward, and no files import each other in a circle.

`FLOORS` says which floor is above which. `python -m tests.test_floors` prints what breaks it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

SOURCE = REPOSITORY / "src"
FLOORS = (
    "cli",
    "doctor integrations",
    "planning",
    "bench bringup calibration inference training",
    "__init__ server",
    "llm",
    "compilation offline_requests pooling runners",
    "engine.client",
    "engine",
    "engine.drafting engine.experts engine.hosts engine.kv_events engine.kv_store image_encoder lora",
    "engine.embedded_inputs engine.speculation",
    "engine.execution",
    "engine.grammar models.changed_checkpoint models.draft_loader models.written_template quantization.checkpoint",
    "engine.arguments engine.host_group engine.kv_connector models.tied_tables vision.prompt_images",
    "engine.scheduling models.model_loader",
    "engine.argument_groups models models.registry",
    "jsonl models.common packed parsing prompts quantization vision.processors",
    "layers tokenizer",
    "kernels loading sampling_params vision.access vision.video",
    "config vision.decode",
    "host kv_transfer_params parallel prompt_extension quantization_rules rooms structured_outputs",
    "errors nearest_name outputs version vision",
)
"""Rooms of jaxis, the highest floor first; rooms of a floor are neighbours, which do not import each other.

A module belongs to the longest name that its own begins with. Modules of a room import each other.
"""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "bench": (),
    "bringup": ("loading.gguf", "lora"),
    "calibration": (),
    "cli.serve_models": ("server.several",),
    "doctor": ("bench", "bringup", "planning"),
    "engine.drafting": (),
    "engine.follower": ("engine.hosts",),
    "engine.hosts": (),
    "engine.kv_events": (),
    "engine.kv_store": (),
    "inference": (),
    "inference.embedding": ("pooling",),
    "lora": (),
    "integrations": ("engine.drafting", "inference", "lora", "pooling"),
    "loading.gguf": (),
    "planning": ("bench", "bringup"),
    "pooling": (),
    "server.anthropic": (),
    "server.ollama": (),
    "server.pooling": ("pooling",),
    "server.pooling.ollama": ("pooling", "server.ollama"),
    "server.several": (),
    "server.tokens": (),
    "server.weights": (),
    "training": ("lora",),
    "training.hosts": ("engine.hosts",),
}
"""Rooms that an installation may lack -> other such rooms that they need.

`tests/test_optional_rooms.py` takes each out.
The rest of the package imports none of them where a module is imported: it asks `jaxis.rooms`.
"""


@dataclass(frozen=True)
class Import:
    """One import of a module of jaxis by another, wherever in the file it stands.

    Attributes:
      is_at_once: True if it happens when the importer is imported: not in a function, nor for types alone.
    """

    importer: str
    imported: str
    line: int
    is_at_once: bool = True

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def read_floors(lines: Sequence[str] = FLOORS) -> dict[str, tuple[int, str]]:
    """Dotted name of each room -> (the number of its floor from the top, the name)."""
    names = [name for line in lines for name in line.split()]
    assert len(names) == len(set(names)), "a name on two floors"
    return {
        "jaxis" if name == "__init__" else f"jaxis.{name}": (number, name)
        for number, line in enumerate(lines)
        for name in line.split()
    }


def read_modules(source: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    modules = {}
    for path in source.glob("jaxis/**/*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def read_sources(modules: Mapping[str, Path]) -> tuple[list[Import], list[tuple[str, str]]]:
    """All modules, parsed once: the imports among them, and their public classes as (module, class).

    Imports in functions and under TYPE_CHECKING count.
    """
    imports: list[Import] = []
    classes: list[tuple[str, str]] = []
    for name, path in sorted(modules.items()):
        tree = ast.parse(path.read_text("utf-8"))
        late = {id(node) for block in ast.walk(tree) if _is_late(block) for node in ast.walk(block)}
        imports += [Import(name, *found) for found in sorted(set(_imports_of(tree, modules, late)))]
        classes += [(name, n.name) for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    return imports, classes


def _is_late(block: ast.AST) -> bool:
    is_for_types = isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
    return is_for_types or isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)


def _imports_of(
    tree: ast.Module, modules: Mapping[str, Path], late: Collection[int] = ()
) -> Iterator[tuple[str, int, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "jaxis":
                    yield alias.name, node.lineno, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if (node.module or "").partition(".")[0] == "jaxis":
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    yield submodule if submodule in modules else str(node.module), node.lineno, id(node) not in late


def floor_of(module: str, floors: Mapping[str, tuple[int, str]]) -> tuple[int, str] | None:
    """The longest name of a room that the module's begins with; `jaxis` itself is the package's __init__ alone."""
    while module not in floors and "." in module:
        module = module.rpartition(".")[0]
        if module == "jaxis":
            return None
    return floors.get(module)


def upward_imports(imports: list[Import], floors: Mapping[str, tuple[int, str]]) -> list[Import]:
    """Imports that the floors do not allow: of a floor above, or of a neighbour on the same floor."""
    return [found for found in imports if not _is_allowed(found, floors)]


def _is_allowed(found: Import, floors: Mapping[str, tuple[int, str]]) -> bool:
    importer, imported = floor_of(found.importer, floors), floor_of(found.imported, floors)
    return importer is not None and imported is not None and (importer == imported or importer[0] < imported[0])


def circles(imports: list[Import]) -> list[list[str]]:
    """Groups of files each of which reaches every other by imports (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        graph.setdefault(found.importer, set()).add(found.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.get(module, ()):
            if imported not in index:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in graph.get(module, ()):
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(groups)


def test_every_module_has_a_floor_and_every_floor_a_module():
    floors, modules = read_floors(), read_modules(SOURCE)
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    assert [name for name in modules if name not in packages and floor_of(name, floors) is None] == []
    assert [name for name in floors if name not in modules] == []


@pytest.fixture(scope="module")
def sources():
    return read_sources(read_modules(SOURCE))


def test_nothing_imports_upward(sources):
    floors = read_floors()
    upward = upward_imports(sources[0], floors)
    assert not upward, "\n".join(map(str, upward))


def test_no_files_import_each_other(sources):
    found = circles(sources[0])
    assert not found, "\n".join(map(" <-> ".join, found))


def test_imports_in_functions_and_for_types_count():
    modules = {"jaxis": Path(), "jaxis.a": Path(), "jaxis.a.b": Path(), "jaxis.c": Path()}
    tree = ast.parse(
        "import jaxis.c\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxis.a import b, name\n"
        "def f():\n    from jaxis import c\n"
    )
    found = sorted(_imports_of(tree, modules))
    assert [each[:2] for each in found] == [("jaxis.a", 4), ("jaxis.a.b", 4), ("jaxis.c", 1), ("jaxis.c", 6)]


def test_imports_are_held_to_the_longest_name():
    floors = read_floors(("a.top", "b c", "a"))
    allowed = [("a.top.x", "a.y"), ("b.x", "b.y"), ("b", "a")]
    refused = [("a.y", "a.top"), ("b", "c"), ("a", "b"), ("b", "unknown")]
    for imports, expected in ((allowed, []), (refused, refused)):
        found = upward_imports([Import(f"jaxis.{x}", f"jaxis.{y}", 1) for x, y in imports], floors)
        assert found == [Import(f"jaxis.{x}", f"jaxis.{y}", 1) for x, y in expected]


def optional_room(module: str) -> str | None:
    names = [room for room in OPTIONAL if f"{module}.".startswith(f"jaxis.{room}.")]
    return max(names, key=len, default=None)


def imports_of_optional_rooms(imports: list[Import]) -> list[Import]:
    """Imports of an optional room by a module that neither belongs to it nor may need it."""
    found = []
    for each in imports:
        importer, imported = optional_room(each.importer), optional_room(each.imported)
        if each.is_at_once and imported not in (None, importer) and not (importer and _needs(importer, str(imported))):
            found.append(each)
    return found


def _needs(room: str, other: str) -> bool:
    return room.startswith(f"{other}.") or other in OPTIONAL[room]


def test_only_those_who_need_an_optional_room_import_it(sources):
    found = imports_of_optional_rooms(sources[0])
    assert not found, "\n".join(map(str, found))


def test_imports_for_types_and_in_functions_may_be_of_optional_rooms(tmp_path):
    text = (
        "from jaxis.server.ollama import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from jaxis.server.ollama import b\ndef f():\n    import jaxis.server.ollama.c\n"
    )
    modules = {}
    for name in ("server.app", "server.ollama.d", "server.pooling.ollama", "server.tokens.e"):
        modules[f"jaxis.{name}"] = tmp_path / f"{name}.py"
        modules[f"jaxis.{name}"].write_text(text)
    found = imports_of_optional_rooms(read_sources(modules)[0])
    assert [(each.importer, each.line) for each in found] == [("jaxis.server.app", 1), ("jaxis.server.tokens.e", 1)]


def test_circles_are_found():
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "d"), ("f", "g"), ("g", "f")]
    assert circles([Import(x, y, 1) for x, y in pairs]) == [["a", "b", "c"], ["f", "g"]]


def test_a_public_class_name_stands_for_one_thing(sources):
    places: dict[str, list[str]] = {}
    for module, name in sources[1]:
        places.setdefault(name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


if __name__ == "__main__":
    all_imports, _ = read_sources(read_modules(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE))
    all_circles = circles(all_imports)
    all_upward = upward_imports(all_imports, read_floors())
    print(f"{len(all_circles)} circles", *map(" <-> ".join, all_circles), sep="\n  ")
    print(f"{len(all_upward)} upward imports", *map(str, all_upward), sep="\n  ")
    all_optional = imports_of_optional_rooms(all_imports)
    print(f"{len(all_optional)} imports of optional rooms", *map(str, all_optional), sep="\n  ")
