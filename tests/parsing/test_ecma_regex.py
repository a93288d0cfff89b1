"""Patterns in the syntax of Rust against ECMAScript's own engine, where there is one, and verdicts of it."""

import json
import random
import re
import shutil
import subprocess

import pytest
import regex

from jaxis.parsing.ecma_pattern import PatternError
from jaxis.parsing.ecma_regex import full_match, rust_searches

# Each pattern, strings in which ECMAScript finds it, and strings in which it does not: verdicts of Node 20.
VERDICTS = [
    (r"^[^[\]]+$", ["abc"], ["a[", ""]),
    (r"^[()[\]{}]$", ["[", "}"], ["x"]),
    (r"^\w[\w[\].]*$", ["a[0]"], ["-", "é"]),
    ("^[+--]$", ["+", ",", "-"], ["a"]),
    ("^[a&&b]$", ["a", "&", "b"], ["c"]),
    ("^[~~]$", ["~"], ["a"]),
    ("^[[:alpha:]]$", [":]", "a]"], ["a"]),
    ("^[[a-z]]$", ["[]", "q]"], ["q"]),
    (r"^\cA[\b]$", ["\x01\x08"], ["cb"]),
    ("^.$", ["a", "\x85", "😀"], ["\n", "\r", "\u2028", "\u2029"]),
    (r"^\s$", ["\ufeff", "\xa0", "\v"], ["\x85", "\u200b"]),
    (r"^\d\D\W$", ["1a-"], ["٣a-", "1aa"]),
    (r"^\u0041\x42\u{1F600}\0$", ["AB😀\0"], ["AB😀"]),
    (r"^\ud83d\ude00[\u{1F600}-\u{1F602}]$", ["😀😁"], ["😀"]),
    (r"^a{1$", ["a{1"], ["a"]),
    ("x{,3}", ["x{,3}"], ["xxx"]),
    (r"^\-\_\1$", ["-_\x01"], ["-_1"]),
    ("^a|b$", ["ax", "xb"], ["xax"]),
    ("(^a|b$)c?", ["a", "xb", "acx"], ["xa", "bx"]),
    ("a$b|c", ["c"], ["ab"]),
    ("^(|a)+?b{2,3}?$", ["bb", "aabbb"], ["b"]),
    (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "ÉÉ"]),
    ("^[^]$", ["\n", "a"], [""]),
    ("^(?<name>a)(?:b)$", ["ab"], ["a"]),
    (r"^(?=.*\d)(?=.*[a-z]).{3,}$", ["a1-"], ["a-b", "a1"]),
    (r"^(?!\.)(?!.*\.\.)[a.]+$", ["a", "a.a."], [".a", "a..a"]),
    ("^(?!a$|b)", ["", "aa", "c"], ["a", "bc"]),
]
REFUSED = [
    (r"\bfoo\b", r"word boundary \\b"),
    ("a(?=b)", r"look-ahead \(\?=...\)"),
    ("(?<=a)b", r"look-behind \(\?<=...\)"),
    (r"(a)\1", r"back-reference \\1"),
    (r"(?<n>a)\k<n>", r"back-reference \\k"),
    ("(?i)a", r"flags \(\?i\)"),
    (r"^(?!\p{L})", r"\\p\{L\} in a look-ahead"),
    (r"\p{L}\-", r"\\p in a pattern that is invalid in Unicode mode"),
    ("a**", "nothing to repeat"),
    ("(a", "unterminated group"),
    ("[b-a]", "range out of order"),
]
ATOMS = (
    *(
        "a",
        "b",
        "-",
        r"\-",
        r"\.",
        ".",
        r"\d",
        r"\W",
        r"\s",
        "[ab]",
        "[^a]",
        "[[a]",
        "[a&&b]",
        "[~~]",
        "[+--]",
        r"[\]a]",
    ),
    *(
        r"[\b]",
        r"[\d-x]",
        "[^]",
        "[]",
        "^",
        "$",
        r"\cA",
        r"\x41",
        r"\u{41}",
        r"\0",
        "{",
        "]",
        "é",
        r"\1",
        r"[\W\d]",
        "[--a]",
    ),
    *("a{1", "{,2}", "[[:alpha:]]", r"[^\d\s]", "\n"),
)


def as_python(search):
    """One of the regular expressions, in Python's syntax."""
    text = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08X}", full_match(search))
    return regex.compile(text) if r"\p" in text.lower() else re.compile(text)


def found(pattern, text):
    return all(as_python(search).fullmatch(text) for search in rust_searches(pattern))


@pytest.mark.parametrize(("pattern", "texts", "others"), VERDICTS)
def test_patterns_are_found_where_ecmascript_finds_them(pattern, texts, others):
    assert [found(pattern, text) for text in texts] == [True] * len(texts)
    assert [found(pattern, text) for text in others] == [False] * len(others)


@pytest.mark.parametrize(("pattern", "message"), REFUSED)
def test_what_cannot_be_written_is_named(pattern, message):
    with pytest.raises(PatternError, match=message):
        rust_searches(pattern)


def random_pattern(rng, depth=0):
    part = rng.random()
    if depth > 2 or part < 0.45:
        return rng.choice(ATOMS)
    inner = random_pattern(rng, depth + 1)
    if part < 0.65:
        return inner + random_pattern(rng, depth + 1)
    if part < 0.8:
        return f"({inner}|{random_pattern(rng, depth + 1)}){rng.choice(['', '*', '+', '?', '{2}', '{0,2}'])}"
    if part < 0.9:
        return f"^(?{rng.choice('!=')}{inner}){random_pattern(rng, depth + 1)}"
    return rng.choice(["^", ""]) + inner + rng.choice(["$", "|b"])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_random_patterns_are_found_where_node_finds_them():
    rng = random.Random(0)
    letters = "abxA-_.0[]{}^$&~:,1dl\n\r\t\0\x01\x08\u2028\ufeffé"
    rows = [
        (random_pattern(rng), ["", *("".join(rng.choices(letters, k=rng.randrange(1, 4))) for _ in range(20))])
        for _ in range(1000)
    ]
    script = (
        "const rows = JSON.parse(require('fs').readFileSync(0)); const read = p => { try { return new RegExp(p, 'u') } "
        "catch { try { return new RegExp(p) } catch { return null } } }; console.log(JSON.stringify(rows.map("
        "([p, texts]) => { const r = read(p); return r && texts.map(t => r.test(t)) })))"
    )
    output = subprocess.run(["node", "-e", script], input=json.dumps(rows), capture_output=True, text=True, check=True)
    num_compared = 0
    for (pattern, texts), verdicts in zip(rows, json.loads(output.stdout), strict=True):
        try:
            rust_searches(pattern)
        except PatternError:
            continue
        assert verdicts is not None, pattern
        assert [found(pattern, text) for text in texts] == verdicts, pattern
        num_compared += 1
    assert num_compared > 500
