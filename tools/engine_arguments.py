"""Writes all lists of the engine's arguments from their declaration, `jaxis.engine.argument_groups.fields`.

    python -m tools.engine_arguments            # writes them, and docs/api.md
    python -m tools.engine_arguments --check    # exit code 1 if one is out of date

tests/engine/test_arguments.py fails where they differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from jaxis.engine.argument_groups.fields import EngineArgFields, argument_infos, argument_types
from jaxis.engine.argument_groups.info import ArgumentInfo
from tools import api_reference

ROOT = Path(__file__).resolve().parent.parent
LINE = 120
TYPES: dict[str, str] = {field.name: str(field.type) for field in fields(EngineArgFields)}
_LINK = re.compile(r"\[[^\]]*\]\(([\w-]+\.md)(#[\w-]+)?\)")


def rendered() -> dict[Path, str]:
    """Each file with a list, as it should be."""
    config_classes = dict.fromkeys(info.config for info in argument_infos().values() if info.config is not None)
    changes: dict[str, list[Callable[[str], str]]] = {
        "src/jaxis/engine/arguments.py": [_with_docstring],
        "src/jaxis/engine/argument_groups/engine_kwargs.py": [_with_typed_dict],
        "src/jaxis/config/vllm_config.py": [
            lambda text, name=name: _with_config_fields(text, name) for name in config_classes
        ],
        "docs/loading.md": [_with_table],
    }
    files = {}
    for name, functions in changes.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for function in functions:
            text = function(text)
        files[ROOT / name] = text
    return files


def _with_docstring(text: str) -> str:
    start, stop = _span(text, *_attributes_of("EngineArgs"))
    return text[:start] + _entries(argument_infos()) + text[stop:]


def _attributes_of(class_name: str) -> tuple[str, str]:
    """What is before and after the attributes that a class describes."""
    return rf"^class {class_name}\b.*?^    Attributes:\n", r'(?=^\n^    \w+:$|^    """$)'


def _entries(infos: Mapping[str, ArgumentInfo]) -> str:
    return "".join(map(_entry, infos, infos.values()))


def _entry(name: str, info: ArgumentInfo) -> str:
    """An entry of a docstring, in which a link is the path of its page."""
    text = f"{name}: {_LINK.sub(lambda link: f'docs/{link[1]}', info.description)}"
    indent = " " * 6
    lines = textwrap.wrap(
        text,
        LINE,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def _with_typed_dict(text: str) -> str:
    start, stop = _span(text, r'^class EngineKwargs\(.*?^    """[^"]*"""\n\n', r"(?=^\n\n)")
    return text[:start] + "".join(f"    {name}: {TYPES[name]}\n" for name in TYPES if name != "model") + text[stop:]


def _with_config_fields(text: str, class_name: str) -> str:
    """The module of the configuration with the arguments that go to a class as they are, as its last fields."""
    infos = {name: info for name, info in argument_infos().items() if info.config == class_name}

    def is_own(line: str) -> bool:
        return line.split(":")[0].strip() not in infos

    start, stop = _span(text, *_attributes_of(class_name))
    own = filter(is_own, re.split(r"^(?=      \w)", text[start:stop], flags=re.MULTILINE))
    text = text[:start] + "".join(own) + _entries(infos) + text[stop:]
    start, stop = _span(text, rf'^class {class_name}\b.*?^    """\n\n', r"(?=^\n\n)")
    own = filter(is_own, text[start:stop].splitlines(keepends=True))
    added = [f"    {name}: {_spelled_out(name)} = {_python(_default(name))}\n" for name in infos]
    return text[:start] + "".join([*own, *added]) + text[stop:]


def _with_table(page: str) -> str:
    start, stop = _span(page, r"^## Engine arguments\n\n.*?^\|---\|---\|---\|\n", r"(?=^\n)")
    return page[:start] + "".join(map(_row, argument_infos(), argument_infos().values())) + page[stop:]


def _row(name: str, info: ArgumentInfo) -> str:
    value = _default(name)
    default = info.documented_default or ("none" if value is None else f"`{_python(value)}`")
    meaning = info.description.replace("(loading.md#", "(#")
    if info.documented_default or default == "none":  # the column says it
        meaning = re.sub(r"[;.] None is (?:none|\d[^.]*|the checkpoint's)(?=\.( |$))", "", meaning)
    cells = (f"`{name}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(name: str) -> object:
    return EngineArgFields.__dataclass_fields__[name].default


def _spelled_out(name: str) -> str:
    """An argument's type without names of `argument_groups`, which the configuration may not import."""
    hint = argument_types()[name]
    return f"Literal[{', '.join(map(_python, get_args(hint)))}]" if get_origin(hint) is Literal else TYPES[name]


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _span(text: str, before: str, after: str) -> tuple[int, int]:
    """Where what follows a pattern begins, and where it ends before another."""
    found = re.search(f"(?:{before})(.*?){after}", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"nothing is between {before!r} and {after!r}")
    return found.span(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes all lists of the engine's arguments from their declaration.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a list is out of date")
    arguments = parser.parse_args()
    stale = {path: text for path, text in rendered().items() if path.read_text(encoding="utf-8") != text}
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m tools.engine_arguments", file=sys.stderr)
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    api_reference.PAGE.write_text(api_reference.render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
