"""Prints the manual page of `jaxis`, from the help of its commands.

python tools/man_page.py > jaxis.1
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from jaxis.cli.main import app
from jaxis.version import __version__


def escaped(text: str) -> str:
    """Text as troff prints it: no markup of the terminal, backslashes and first points as they are."""
    text = re.sub(r"\[/?(?:bold|dim|italic)\]", "", text).replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def paragraphs(text: str) -> Iterator[str]:
    """Those of a help text. One that begins with a backspace keeps its lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.startswith("\b")
        body = escaped(paragraph.removeprefix("\b").strip("\n"))
        yield f".PP\n.nf\n{body}\n.fi" if kept else f".PP\n{body}"


def sections(command: Any, name: str) -> Iterator[str]:
    """The section of a command, and those of the commands below it."""
    context = command.context_class(command, info_name=name)
    if (below := getattr(command, "commands", None)) is None:
        yield f".SH {escaped(name.upper())}"
        yield f".B {escaped(name)}\n{escaped(' '.join(command.collect_usage_pieces(context)))}"
        yield from paragraphs(command.help)
        for parameter in command.params:
            if not parameter.hidden and (record := parameter.get_help_record(context)):
                names = ", ".join(dict.fromkeys(record[0].split(", ")))
                yield f".TP\n.B {escaped(names)}\n{escaped(record[1])}"
        return
    for child in below:
        yield from sections(below[child], f"{name} {child}")


def page() -> str:
    command = typer.main.get_command(app)
    summary, *others = paragraphs(command.help or "")
    head = [f'.TH JAXIS 1 "" "jaxis {__version__}"', ".SH NAME", summary.replace(".PP\n", "jaxis \\- ")]
    return "\n".join([*head, ".SH DESCRIPTION", *others, *sections(command, "jaxis")]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
