"""Renders chat templates, in a process with limits (`host/limited_worker.py`) that `template_process` starts.

A template is untrusted code. It runs in Jinja's immutable sandbox and sees nothing but plain JSON values: no attribute
of a Python object, no file, no other template. What the sandbox cannot bound, the system does: the process has limits
on its processor time and memory. The environment (block trimming, loop controls, `tojson`, `raise_exception`,
`strftime_now`, the `generation` block) is the one that transformers documents for templates. The file imports nothing
of jaxis, so that the process starts in a tenth of a second and is small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Variables that are written where a block begins and where it ends; not given, they are nothing.
GENERATION_MARKS = ("generation_begins", "generation_ends")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = (nodes.Output([nodes.Name(name, "load")]) for name in GENERATION_MARKS)
        return nodes.Scope([begins, *body, ends], lineno=lineno)


class _DictFunction:
    """The template's `dict`, without the attributes of the Python class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """The template's `namespace`, whose attributes cannot shadow Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        Namespace.__init__(self)
        for name, value in dict(*values, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
        Namespace.__setitem__(self, name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "dict": _DictFunction(),
        "namespace": _PlainNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment.from_string(template)


def _render(template: str, variables: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    """Returns the answer: {"text"}, or {"kind", "reason"} of an error; see also `limited_worker`."""
    parts, num_characters = [], 0
    try:
        for part in _compile(template).generate(variables):
            parts.append(part)
            num_characters += len(part)
            if num_characters > max_characters:
                return {"limit": "output"}
        return {"text": "".join(parts)}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "line": error.lineno, "reason": error.message}
    except MemoryError:
        raise
    except Exception as error:  # the operations in a template can raise anything
        return {"kind": "refused", "reason": " ".join(str(error).split()) or type(error).__name__}


def answer(request: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], int, tuple[()]]:
    """Answers a request (see `limited_worker`)."""
    del data
    return _render(request["template"], request["variables"], request["max_characters"]), 0, ()
