"""Writes docs/api.md, the reference of the public Python API, from signatures and docstrings.

    python tools/api_reference.py            # writes the page
    python tools/api_reference.py --check    # exit code 1 if the page is out of date

The sources are parsed by griffe (part of the `test` extra) and not imported. `SECTIONS` says what is public;
tests/test_docs.py fails where the page and the docstrings differ.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

# Headings of the page, and the public names under each, by the path from which users import them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Generating text": ("jaxis.LLM", "jaxis.engine.arguments.EngineArgs"),
    "Request parameters": ("jaxis.SamplingParams", "jaxis.StructuredOutputs", "jaxis.LoRARequest"),
    "Outputs": (
        "jaxis.RequestOutput",
        "jaxis.CompletionOutput",
        "jaxis.Logprob",
        "jaxis.StreamOutput",
        "jaxis.RenderedChat",
        "jaxis.PromptExtension",
        "jaxis.EmbeddingRequestOutput",
        "jaxis.EmbeddingOutput",
        "jaxis.ClassificationRequestOutput",
        "jaxis.ClassificationOutput",
        "jaxis.ScoringRequestOutput",
        "jaxis.ScoringOutput",
    ),
    "Model families": ("jaxis.register_model",),
    "Batch inference": (
        "jaxis.inference.JAXInferenceEngine",
        "jaxis.inference.ModelParams",
        "jaxis.inference.GenerationParams",
        "jaxis.inference.GuidedDecodingParams",
        "jaxis.inference.InferenceConfig",
        "jaxis.inference.Conversation",
        "jaxis.inference.Message",
        "jaxis.inference.ContentItem",
    ),
    "Errors": (
        "jaxis.errors.JaxisError",
        "jaxis.errors.ConfigError",
        "jaxis.errors.CheckpointError",
        "jaxis.errors.RequestError",
        "jaxis.errors.EngineError",
    ),
}
# Public by name, but for other parts of jaxis.
INTERNAL = {
    "jaxis.host.closing.Closing",
    "jaxis.inference.engine.JAXInferenceEngine.run",
    "jaxis.jsonl.conversation.ContentItem.for_template",
    "jaxis.jsonl.conversation.Message.for_template",
}
# Classes whose fields a guide explains: the page has a link in place of a second table.
EXPLAINED = {
    "jaxis.engine.arguments.EngineArgs": "The arguments are [those of loading](loading.md#engine-arguments).",
    "jaxis.SamplingParams": "The attributes are [those of sampling](sampling.md#parameters).",
    "jaxis.StructuredOutputs": "The attributes are [the kinds of grammars](structured-output.md#kinds-of-grammars).",
    "jaxis.inference.ModelParams": "The fields are [those of `model:`](inference.md#parameters).",
    "jaxis.inference.GenerationParams": "The fields are [those of `generation:`](inference.md#parameters).",
}
INTRODUCTION = """\
# API reference

<!-- Written by tools/api_reference.py from the docstrings: change those, and run it again. -->

The public Python API. Everything that is not on this page is internal and may change at any time. The guides explain
how the parts work together: [loading](loading.md), [sampling](sampling.md), [structured output](structured-output.md),
[batch inference](inference.md), [adding a model](adding-a-model.md).
"""


def render() -> str:
    """The page, as Markdown."""
    package = griffe.load("jaxis", search_paths=[ROOT / "src"], docstring_parser="google")
    parts = [INTRODUCTION]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for public in names:
            item = package[public.removeprefix("jaxis.")]
            parts.extend(_render(public, item.final_target if item.is_alias else item))
    return "\n".join(parts).rstrip() + "\n"


def _render(public: str, item: griffe.Object | griffe.Alias) -> Iterator[str]:
    name = public.rpartition(".")[2]
    yield f"### {name}\n"
    module = public.rpartition(".")[0]
    if item.is_function:
        yield f"```text\n{_signature(item, public)}\n```\n"
        yield from _docstring(item)
        return
    public_bases = [base for base in item.bases if getattr(base, "canonical_path", "") not in INTERNAL]
    bases = ", ".join(f"`{base}`" for base in map(str, public_bases) if not base.startswith("_"))
    yield f"`from {module} import {name}`" + (f", a subclass of {bases}\n" if bases else "\n")
    if public in EXPLAINED:
        yield f"{_text(item)} {EXPLAINED[public]}\n"
        return
    yield from _docstring(item, _fields(item))
    members = _methods(item)
    yield from (f"- `{m.name}` (`{_annotation(m.annotation)}`): {_text(m)}" for m in members if not m.is_function)
    yield ""
    for member in members:
        if member.is_function:
            yield f"#### {name}.{member.name}\n"
            yield f"```text\n{_signature(member, member.name)}\n```\n"
            yield from _docstring(member)


def _text(item: griffe.Object | griffe.Alias) -> str:
    """The docstring's sentences, without its sections."""
    sections = item.docstring.parse("google") if item.docstring else []
    return " ".join(_one_line(each.value) for each in sections if each.kind is griffe.DocstringSectionKind.text)


def _methods(item: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    """Public methods and properties that have a docstring, in the order of the source; last, inherited ones."""
    members = [
        member
        for name, member in (item.members | _inherited(item)).items()
        if not name.startswith("_")
        and member.docstring
        and member.canonical_path not in INTERNAL
        and (member.is_function or "property" in member.labels)
    ]
    return sorted(members, key=lambda member: (member.is_alias, member.lineno or 0))


def _inherited(item: griffe.Object | griffe.Alias) -> dict[str, griffe.Object | griffe.Alias]:
    """What a public class has of a base that is internal."""
    members = item.inherited_members if item.is_class else {}
    return {name: member for name, member in members.items() if member.canonical_path.rpartition(".")[0] in INTERNAL}


def _fields(item: griffe.Object | griffe.Alias) -> dict[str, tuple[str, str]]:
    """(type, default) of each argument of a class: of a dataclass its fields, otherwise of `__init__`."""
    return {
        parameter.name: (_annotation(parameter.annotation), _default(parameter)) for parameter in _parameters(item)
    } | {
        name: (_annotation(member.annotation), "")
        for name, member in item.members.items()
        if member.is_attribute and not name.startswith("_") and name not in {p.name for p in _parameters(item)}
    }


def _parameters(item: griffe.Object | griffe.Alias) -> list[griffe.Parameter]:
    parameters = item.parameters if item.is_function else getattr(item, "parameters", [])
    return [parameter for parameter in parameters if parameter.name not in ("self", "cls")]


def _default(parameter: griffe.Parameter) -> str:
    default = "" if parameter.default is None else str(parameter.default)
    return {"list()": "[]", "dict()": "{}"}.get(default, default)


def _annotation(annotation: object) -> str:
    return "" if annotation is None else str(annotation)


def _signature(item: griffe.Object | griffe.Alias, name: str) -> str:
    """The signature, one parameter a line where it is long."""
    parts: list[str] = []
    keyword_only = False
    for parameter in _parameters(item):
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            parts.append("*")
        text = {"variadic positional": "*", "variadic keyword": "**"}.get(
            kind.value if kind else "", ""
        ) + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and "variadic" not in (kind.value if kind else ""):
            text += f" = {_default(parameter)}"
        parts.append(text)
    returns = "" if item.annotation is None else f" -> {item.annotation}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _docstring(item: griffe.Object | griffe.Alias, fields: dict[str, tuple[str, str]] | None = None) -> Iterator[str]:
    if item.docstring is None:
        return
    for section in item.docstring.parse("google"):
        kind, value = section.kind, section.value
        if kind is griffe.DocstringSectionKind.text:
            yield f"{value}\n"
        elif kind is griffe.DocstringSectionKind.parameters:
            yield from _table("argument", value, fields)
        elif kind is griffe.DocstringSectionKind.attributes:
            yield from _table("attribute", value, fields)
        elif kind is griffe.DocstringSectionKind.returns:
            yield "Returns: " + " ".join(_one_line(entry.description) for entry in value) + "\n"
        elif kind is griffe.DocstringSectionKind.raises:
            yield "Raises:\n"
            for entry in value:
                errors = ", ".join(f"`{name}`" for name in re.findall(r"\w+", str(entry.annotation)))
                yield f"- {errors}: {_one_line(entry.description)}"
            yield ""
        else:
            raise ValueError(
                f"{item.path}: the docstring has a section {kind.value!r}, which this page has no form for"
            )


def _table(
    what: str, entries: Iterable[griffe.DocstringNamedElement], fields: dict[str, tuple[str, str]] | None
) -> Iterator[str]:
    """A row an entry with its type and default, or a list where a signature has those. Names in `a, b:` share one."""
    rows = [] if fields is None else [f"| {what} | type | default | meaning |", "|---|---|---|---|"]
    for entry in entries:
        # Of "a, b: ..." in a list of attributes, griffe takes "a," as the name and "b" as its type.
        names = re.findall(r"\w+", entry.name if entry.name[-1] != "," else f"{entry.name} {entry.annotation}")
        label, meaning = ", ".join(f"`{name}`" for name in names), _one_line(entry.description)
        if fields is None:
            rows.append(f"- {label}: {meaning}")
            continue
        known = [fields.get(name, ("", "")) for name in names]
        cells = [
            ", ".join(dict.fromkeys(f"`{value}`" for value in column if value)) for column in zip(*known, strict=True)
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (label, *cells, meaning)) + " |")
    yield "\n".join(rows) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    arguments = parser.parse_args()
    logging.getLogger("griffe").setLevel(logging.ERROR)
    page = render()
    if not arguments.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/api_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
