"""Starts a new family from an existing one: its file, its name in the table of architectures, and its test row.

The result is the copied family under another name, and passes that family's tests. From there, change what differs, and
run the tests again after each change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from jaxis.errors import ConfigError
from jaxis.models.registry import built_in_models, supported_architectures
from jaxis.nearest_name import did_you_mean

_SUFFIX = "ForCausalLM"
_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")
_MODELS = Path("src/jaxis/models")
_TABLE = _MODELS / "architectures.json"
_PARITY = Path("tests/data/families.yaml")


@dataclass(frozen=True)
class CopiedModel:
    """The created files, the command that checks them, and what else the new family needs, one line each."""

    architecture: str
    files: list[Path]
    check: str
    next_steps: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    architecture: str
    module: ModuleType
    prefix: str  # of its classes


def new_model(name: str, like: str, root: Path) -> CopiedModel:
    """Writes a family into a checkout of jaxis.

    "Falcon4" makes `Falcon4ForCausalLM` in `models/falcon4.py`. `like` is a file ("qwen3") or architecture
    ("Qwen3ForCausalLM").

    Raises:
      ConfigError: There is no such family, the name is taken or invalid, or `root` is not a checkout.
    """
    source = _find(like)
    architecture = _checked_name(name)
    for path in (_TABLE, _PARITY):
        if not (root / path).exists():
            raise ConfigError(
                f"{root.absolute()} is not a checkout of jaxis (it has no {path}): change to one; "
                "docs/adding-a-model.md shows a package of your own"
            )
    family_file = root / _MODELS / f"{_snake_case(name)}.py"
    if family_file.exists():
        raise ConfigError(f"{family_file} exists: choose another name")
    modules = json.loads((root / _TABLE).read_text()) | {architecture: family_file.stem}
    changes = {
        family_file: _family_source(source, name, architecture),
        root / _TABLE: json.dumps(modules, indent=2, sort_keys=True) + "\n",
        root / _PARITY: _with_parity_row((root / _PARITY).read_text(), source, name, architecture),
    }
    for path, text in changes.items():
        path.write_text(text, encoding="utf-8")
    # Without -m '', only a sample of the families' rows runs.
    check = f"python -m pytest -m '' tests/models/test_parity.py -k '{name}'"
    steps = (
        "python tools/reference_keys.py (now: which keys of config.json its reference reads)",
        "python -m tools.supported_models (at the end: its row in docs/models.md)",
    )
    return CopiedModel(architecture, list(changes), check, steps)


def _find(like: str) -> _Source:
    families = {}
    for architecture, model in sorted(built_in_models().items()):
        if not architecture.endswith(_SUFFIX):
            continue
        module = model.__module__
        families[module.rpartition(".")[2]] = None
        if like in (architecture, module.rpartition(".")[2]):
            return _Source(architecture, importlib.import_module(module), architecture.removesuffix(_SUFFIX))
    raise ConfigError(
        f"--like {like!r} is not a family of jaxis{did_you_mean(like, families)}; jaxis analyze names those that are "
        f"closest to a checkpoint; choose one of: {', '.join(sorted(families))}"
    )


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith(_SUFFIX):
        raise ConfigError(f"{name!r} must be a class name such as Falcon4 (without {_SUFFIX})")
    architecture = name + _SUFFIX
    if architecture in supported_architectures():
        raise ConfigError(f"{architecture} already exists: choose another name")
    return architecture


def _family_source(source: _Source, name: str, architecture: str) -> str:
    """Renames the classes in the family's file, and gives it a new first line and a declaration of the new family."""
    text = inspect.getsource(source.module)
    tree = ast.parse(text)
    declarations = list(_family_rows(tree))
    sizes = "".join(
        f", tiny={ast.get_source_segment(text, keyword.value)}"
        for declaration in declarations
        for keyword in declaration.keywords
        if keyword.arg == "tiny"
    )
    docstring, end = tree.body[0], min(declaration.lineno for declaration in declarations) - 1
    lines = [
        f'"""{name}: so far what {source.prefix} is; say here what differs."""',
        *text.split("\n")[docstring.end_lineno : end],
        f'FAMILY = Family("{name}", ({architecture},), "so far what {source.prefix} has; say what differs"{sizes})\n',
    ]
    copy = "\n".join(lines)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith(source.prefix):
            copy = re.sub(rf"\b{node.name}\b", name + node.name.removeprefix(source.prefix), copy)
    return copy


def _with_parity_row(text: str, source: _Source, name: str, architecture: str) -> str:
    """Repeats the copied family's first row of the parity tests' table under the new name and architecture."""
    rows = re.split(r"^(?=  - name: )", text, flags=re.MULTILINE)
    place = next((place for place, row in enumerate(rows) if _architecture_of(row) == source.architecture), None)
    if place is None:
        raise ConfigError(f"{_PARITY} has no row of {source.architecture}: add one, so that there is something to copy")
    _, *lines = rows[place].rstrip("\n").split("\n")
    kept = [line for line in lines if not re.match(r"    (architecture|slow|every_path):|  #", line)]
    row = "\n".join([f"  - name: {name}", *kept, f"    architecture: {architecture}\n"])
    return "".join([*rows[: place + 1], row, *rows[place + 1 :]])


def _family_rows(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Family":
            yield node


def _architecture_of(row: str) -> str | None:
    """Returns the architecture of a row's transformers config class; None for text that is no row."""
    fields = dict(re.findall(r"^    (config_class|architecture): (\w+)$", row, re.MULTILINE))
    if "config_class" not in fields:
        return None
    return fields.get("architecture") or re.sub(r"(Text)?Config$", "", fields["config_class"]) + _SUFFIX


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
