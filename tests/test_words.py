"""Sources, tests and pages use the words of CONTRIBUTING.md's table, and none that it advises against."""

import re

import pytest

from tests.support.places import REPOSITORY

# The table's "not" column -> what finds those words, in identifiers too; None where no pattern can.
PATTERNS = {
    "form": r"\banswers?'?s? forms?\b|\banswers? of a( given)? form\b|\bforms? (is|was|are|be|been) compiled\b"
    r"|\btells? (a|the) form\b|(\b|_)form[ _]that[ _]is[ _]an[ _]attack",
    "turn": r"\b(turn|turns|turned|turning) ((the |its |their |both )?(queries|heads?|pairs)|(the|its|their) keys)\b"
    r"|\b(queries|keys|heads?|pairs|dimensions|quarter of which|half of which)( is| are| were)? turned\b"
    r"|\bturned_in_float",
    "in any company": r"\b(in|its|any|other) company\b|_company(\b|_)",
    "widen": r"(\b|_)widen(s|ed|ing)?(\b|_)",
    "narrow": r"(\b|_)narrow(s|ed|er|est|ing)?(\b|_)",
    "numbers": r"\b(stored|packed|rounded|low-precision|quantized) numbers\b"
    r"|\bnumbers of (the|a|each|its) (weights?|tensors?|arrays?|vectors?)\b|\bof \d+ numbers\b",
    'text (as a noun with "a")': r"(\b|_)(a|one)[ _]text(\b|_)(?!-)"
    r"(?![ _]?(block|config|editor|encoder|field|file|item|model|part|prompt)s?(\b|_))",
    "what is no folder": r"\b(what|that|which) is (no|not a) folder\b",
    "tap": r"\b(activation|calibration|layer|linear|module)s?[ _]taps?\b|\btapp(ed|ing)\b|(?-i:\b_?([A-Z]\w*)?Tap\b)",
    "passed": r"\bpassed[ _](the |its |their )?(blocks?|window)\b"
    r"|\bblocks? (that )?(is |are |was |were |has |have )?passed\b|\bwindow (has |had )?passed\b",
    # One word for each of two things: only a reader can tell whether a "request" should be a sequence.
    "request, for both": None,
    "equal to the bit": r"\bto the bit\b",
    "who, whoever (for a part of a program)": r"\bwhoever\b|_whoever_"
    r"|(?<!user\s)(?<!users\s)(?<!reader\s)(?<!readers\s)\bwho (asks?|knows?|reads?|waits?)\b"
    r"|_who_(asks?|knows?|reads?|waits?)(\b|_)",
}
SUFFIXES = {".cc", ".css", ".h", ".html", ".js", ".md", ".py", ".sh", ".yaml", ".yml"}
# Pages of others, and text to calibrate on.
LEFT_OUT = ("src/jaxis/server/static/vendor/", "benchmarks/texts/")


def rows():
    """(what to write, what not) of each row of the table."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.search(r"^\| write \| not \|\n\|[-|]+\|\n((?:\|.+\n)+)", page, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table[1].splitlines()]


def files():
    for folder in ("src", "tests", "docs", "native", "benchmarks", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            name = path.relative_to(REPOSITORY).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not name.startswith(LEFT_OUT):
                yield name, path
    for name in ("README.md", "CHANGELOG.md"):
        yield name, REPOSITORY / name


@pytest.fixture(scope="module")
def texts():
    """The text of each file, and in lower case; but for this one, which has to quote the words."""
    read = {name: path.read_text(encoding="utf-8") + "\n" for name, path in files() if name != "tests/test_words.py"}
    return {name: (text, text.lower()) for name, text in read.items()}


def places(words, texts):
    """(file, index) of all that can begin or end a match: the last word of the table's cell, where it begins a word."""
    word = re.findall(r"[a-z]+", words.partition(" (")[0].partition(",")[0])[-1]
    for name, (text, lower) in texts.items():
        at = -1
        while (at := lower.find(word, at + 1)) >= 0:
            if text[at].isupper() or not lower[max(0, at - 1) : at].isalpha():
                yield name, at


def test_each_row_of_the_table_has_a_pattern():
    assert sorted(PATTERNS) == sorted(words for _, words in rows())


@pytest.mark.parametrize("words", [words for words, pattern in PATTERNS.items() if pattern])
def test_words_that_the_table_advises_against_are_nowhere(words, texts):
    # Also where a line ends within the words, with the next line's indent and comment sign.
    pattern = re.compile(PATTERNS[words].replace(" ", r"(?: |\s*\n\s*(?://|#)?\s*)"), re.IGNORECASE)
    instead = next(write for write, row in rows() if row == words)
    found = []
    for name, at in places(words, texts):
        text = texts[name][0]
        if match := pattern.search(text, max(0, at - 100), text.find("\n", min(at + 100, len(text) - 1))):
            found.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}")
    assert not found, f"write {instead!r} instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("words", "example"),
    [
        ("form", "before the form is compiled"),
        ("turn", "turns the queries and keys"),
        ("in any company", "def test_a_token_gets_the_same_in_any_company(name):"),
        ("widen", "_widen_while_running"),
        ("narrow", "narrower weights"),
        ("numbers", "the packed numbers"),
        ('text (as a noun with "a")', "the tokens of a text"),
        ("what is no folder", "what is no folder is looked for on the Hub"),
        ("tap", "a layer tap"),
        ("passed", "blocks that are passed"),
        ("equal to the bit", "equal to the bit"),
        ("who, whoever (for a part of a program)", "whoever opens a job"),
        ("who, whoever (for a part of a program)", "the death is told to who waits"),
    ],
)
def test_a_pattern_finds_the_words(words, example):
    [*found] = places(words, {"": (example, example.lower())})
    assert found
    assert re.search(PATTERNS[words], example)


@pytest.mark.parametrize(
    "sentence",
    [
        "the user who reads the page",
        "a text model's block tables",
        "the taps of the convolution",
        "arguments that are passed on",
        "the conversation's next turn and its keys",
        "a form of weight",
        "the number of tokens",
        "bit for bit",
    ],
)
def test_no_pattern_finds_other_uses(sentence):
    assert not [words for words, pattern in PATTERNS.items() if pattern and re.search(pattern, sentence, re.IGNORECASE)]
