"""Docstrings say first what they describe: a noun, or a verb in the third person."""

import ast
import re

import pytest

from tests.support.places import REPOSITORY

# Words that put off the noun. "True if ..." says what a function returns.
RIDDLES = frozenset(
    {
        *("See", "What", "Whether", "How", "Of", "Those", "That", "Which", "Where", "Why", "Who", "Whose"),
        *("When", "If", "As", "Until", "Beside", "Besides", "Within"),
    }
)
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A line of "Attributes:", "Args:" or "Raises:": the name, then what it is.
FIELD = re.compile(r"^\s+\*{0,2}[A-Za-z_][\w., ]*: ([A-Z][a-z]+)\b", re.MULTILINE)


def docstrings(source):
    """(line, text) of each docstring, those below an attribute too."""
    for node in ast.walk(ast.parse(source)):
        body = node.body if isinstance(node, DEFINITIONS) else []
        for index, each in enumerate(body):
            is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            describes = index == 0 or isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
            if is_text and describes and isinstance(each.value.value, str):
                yield each.lineno, each.value.value


def riddles(source):
    """The lines whose first word names nothing."""
    for line, text in docstrings(source):
        first = re.match(r"\W*(\w+)", text)
        if first is not None and first[1] in RIDDLES:
            yield f"{line}: {text.splitlines()[0]}"
        for match in FIELD.finditer(text):
            if match[1] in RIDDLES:
                yield f"{line + text.count(chr(10), 0, match.end())}: {match[0].strip()} ..."


def headlines(source):
    """Comments that stand alone between two blank lines, as the docstring of a module that was pasted in."""
    lines = source.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("#") and index > 2 and not lines[index - 1]:
            end = next((i for i in range(index, len(lines)) if not lines[i].startswith("#")), len(lines))
            if end < len(lines) and not lines[end] and "noqa" not in line:
                yield f"{index + 1}: {line}"


def found_in(find):
    package = REPOSITORY / "src" / "jaxis"
    return [
        f"{path.relative_to(REPOSITORY)}:{each}"
        for path in sorted(package.rglob("*.py"))
        for each in find(path.read_text(encoding="utf-8"))
    ]


def test_a_docstring_begins_with_the_thing_that_it_describes():
    found = found_in(riddles)
    assert not found, "begin with a noun, or a verb in the third person:\n" + "\n".join(found)


def test_a_module_has_one_subject_and_so_one_headline():
    found = found_in(headlines)
    assert not found, "split the module, or delete the headline:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What a step costs."""',
        'def f():\n    """Whether it is empty."""',
        'class A:\n    """A step.\n\n    Attributes:\n      rows: Of the step, those that are sampled.\n    """',
        'class A:\n    def f(self):\n        """See `B`."""',
        'LIMIT = 1\n"""How many there are at most."""',
    ],
)
def test_riddles_are_found(source):
    assert list(riddles(source))


def test_names_and_verbs_are_no_riddles():
    assert not list(riddles('"""A step: what it costs."""\n\ndef f():\n    """Returns whether it is empty."""\n'))
