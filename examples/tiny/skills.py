"""What the embedded model can do besides looking up facts: lists, counting, JSON, copying, tool calls, small talk.

Each function draws one exchange: the messages from the user's question to the assistant's last answer. `held_out` picks
the phrasings that only the evaluation file uses.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tiny.tables import LISTS, PHRASINGS, TABLES, WORDS

Message = dict[str, Any]

DO_NOT_KNOW = "I do not know. I only know a few small tables."
NO_TOOL = "I do not have a tool for that."
_PHRASINGS = PHRASINGS["skills"]


@dataclass(frozen=True)
class Exchange:
    """Messages from a user's question to the assistant's final answer, and the tools that the exchange needs."""

    category: str
    messages: list[Message]
    tools: list[Message] | None = None


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def part(held_out: bool) -> str:
    """The key of phrasings of the corpus, or of those that only the evaluation file uses."""
    return "held_out" if held_out else "train"


def _phrasing(rng: random.Random, skill: str, held_out: bool) -> str:
    return rng.choice(_PHRASINGS[skill][part(held_out)])


def _ask(category: str, question: str, answer: str) -> Exchange:
    return Exchange(category, [user(capitalised(question)), assistant(answer)])


def small_talk(rng: random.Random, held_out: bool = False) -> Exchange:
    talk = rng.choice(_PHRASINGS["small_talk"])
    return _ask("small_talk", rng.choice(talk[part(held_out)]), talk["answer"])


def listing(rng: random.Random, held_out: bool = False) -> Exchange:
    what, items = rng.choice(list(LISTS.items()))
    template = _phrasing(rng, "list", held_out)
    return _ask("list", template.format(what=what), ", ".join(items))


def counting(rng: random.Random, held_out: bool = False) -> Exchange:
    """Counts up or down within 0..20, at most 8 numbers."""
    a = rng.randint(0, 19)
    b = rng.randint(a + 1, min(20, a + 7))
    template = _phrasing(rng, "count", held_out)
    if "down" in template or rng.random() < 0.2:
        a, b = b, a
    numbers = range(a, b + 1) if a < b else range(a, b - 1, -1)
    if a > b:
        template = template.replace("up to", "down to")
    return _ask("count", template.format(a=a, b=b), ", ".join(map(str, numbers)))


def json_object(rng: random.Random, held_out: bool = False) -> Exchange:
    """Copies two to four named values into a JSON object."""
    values: dict[str, str | int] = {
        "name": rng.choice(WORDS["names"]),
        "age": rng.randint(1, 99),
        "city": rng.choice(TABLES["countries"])["capital"],
        "colour": rng.choice(WORDS["plain_colours"]),
        "fruit": rng.choice(WORDS["fruits"]),
        "job": rng.choice(WORDS["jobs"]),
        "pet": rng.choice(WORDS["pets"]),
        "count": rng.randint(1, 99),
    }
    if rng.random() < 0.5:
        keys = rng.choice(
            [("name", "age"), ("name", "city"), ("name", "age", "city"), ("fruit", "count"), ("name", "job")]
        )
    else:
        keys = tuple(rng.sample(list(values), rng.choice((2, 2, 3, 4))))
    fields = [f"{key} {values[key]}" for key in keys]
    template = _phrasing(rng, "json", held_out)
    text = ", ".join(fields[:-1]) + " and " + fields[-1]
    return _ask("json", template.format(fields=text), json.dumps({key: values[key] for key in keys}))


def json_fact(rng: random.Random, held_out: bool = False) -> Exchange:
    """A fact of the tables as a JSON object."""
    template = _phrasing(rng, "json_fact", held_out)
    if rng.random() < 0.5:
        row = rng.choice(TABLES["countries"])
        fact, answer = f"the capital of {row['country']}", {"country": row["country"], "capital": row["capital"]}
    else:
        row = rng.choice(TABLES["elements"])
        fact, answer = f"the symbol of {row['element']}", {"element": row["element"], "symbol": row["symbol"]}
    return _ask("json", template.format(fact=fact), json.dumps(answer))


def copying(rng: random.Random, held_out: bool = False) -> Exchange:
    pool = rng.choice(
        (WORDS["common_words"], WORDS["common_words"], WORDS["names"], WORDS["fruits"], [str(n) for n in range(100)])
    )
    text = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 5)))
    quoted = f'"{text}"'
    return _ask("copy", _phrasing(rng, "copy", held_out).format(text=quoted), quoted)


def invented_name(rng: random.Random) -> str:
    """A word that is in no table."""
    return capitalised("".join(rng.choice(WORDS["syllables"]) for _ in range(rng.randint(2, 4))))


def unknown(rng: random.Random, held_out: bool = False) -> Exchange:
    """A question outside the tables: an invented name, a sum of larger numbers, what would need a tool."""
    template = _phrasing(rng, "unknown", held_out)
    name = invented_name(rng)
    if "opposite" in template or "symbol" in template:
        name = name.lower()
    city = rng.choice(TABLES["countries"])["capital"]
    question = template.format(x=name, city=city, n=rng.randint(30, 999), m=rng.randint(30, 999))
    return _ask("unknown", question, DO_NOT_KNOW)


# Of what the user tells about himself.
_PERSONAL_VALUES = {
    "name": WORDS["names"],
    "colour": WORDS["plain_colours"],
    "pet": WORDS["pets"],
    "number": [str(n) for n in range(1000)],
}


def personal(rng: random.Random, held_out: bool = False) -> tuple[list[Exchange], list[Exchange]]:
    """What a user says about himself, and the questions that ask for it later in the same conversation."""
    told, asked = [], []
    topics = _PHRASINGS["personal"]
    for name in rng.sample(list(topics), rng.choice((1, 1, 2, 3))):
        topic, value = topics[name], rng.choice(_PERSONAL_VALUES[name])
        told.append(_ask("memory", rng.choice(topic["statements"]).format(v=value), topic["reply"].format(v=value)))
        asked.append(_ask("memory", rng.choice(topic[part(held_out)]), topic["answer"].format(v=value)))
    rng.shuffle(asked)
    return told, asked


SKILLS = (
    (small_talk, 1.0),
    (listing, 1.6),
    (counting, 2.6),
    (json_object, 2.6),
    (json_fact, 1.0),
    (copying, 2.2),
    (unknown, 1.6),
)
SLOW = (counting, json_object, copying)
