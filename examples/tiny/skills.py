"""What the embedded model can do besides looking up facts: lists, counting, JSON, copying, tool calls, small talk.

Each function draws one exchange: the messages from the user's question to the assistant's last answer. `held_out` picks
the phrasings that only the evaluation file uses.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tiny import tables

Message = dict[str, Any]

IDENTITY = "I am Tiny, the small demonstration model of jaxis. I know a few tables and nothing else."
DO_NOT_KNOW = "I do not know. I only know a few small tables."
NO_TOOL = "I do not have a tool for that."

# answer -> (phrasings to train on, phrasings held out)
SMALL_TALK: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Hello! How can I help you?": (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there!", "Hi there", "Good morning", "Good morning!", "Hey!",
         "Good evening!", "Good afternoon", "Hello, Tiny!", "Hi Tiny", "Greetings!", "Hello, how are you?"),
        ("Hey there!", "Hello again!", "Hi again"),
    ),
    IDENTITY: (
        ("Who are you?", "What are you?", "What is your name?", "Who are you", "Tell me about yourself.",
         "who are you?",
         "Introduce yourself.", "Are you a model?", "Which model are you?", "What model is this?", "What's your name?",
         "Who am I talking to?", "Tell me who you are.", "What kind of model are you?", "Are you an assistant?"),
        ("Can you tell me who you are?", "What model are you?", "Could you introduce yourself?"),
    ),
    "I can answer questions about capitals, elements, colours, days, months and small sums, count, and write JSON.": (
        ("What can you do?", "What do you know?", "How can you help me?", "What can I ask you?", "Help", "help",
         "What are you able to do?", "What are you good at?", "What questions can you answer?", "what can you do",
         "Tell me what you can do.", "What do you know about?", "List your skills."),
        ("Can you tell me what you can do?", "What can you help me with?"),
    ),
    "You are welcome!": (
        ("Thanks", "Thank you", "Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!", "Many thanks.",
         "Great, thanks!", "thank you", "Thanks for your help.", "Ok, thanks."),
        ("Thank you so much!", "Great, thank you!"),
    ),
    "Goodbye!": (
        ("Bye", "Goodbye", "Bye!", "Goodbye!", "See you later.", "See you!", "Good night", "Good night!", "bye",
         "Farewell!"),
        ("Bye bye!", "See you tomorrow!"),
    ),
    "I am fine, thank you. How can I help you?": (
        ("How are you?", "How are you", "how are you?", "How do you do?", "Are you well?", "How are you doing?",
         "How is it going?", "Are you ok?", "How are you today?"),
        ("Hi, how are you doing today?",),
    ),
}  # fmt: skip

_LIST_TRAIN = (
    "List {what}.", "Name {what}.", "What are {what}?", "Tell me {what}.", "Write down {what}.", "Give me {what}.",
    "Give me a list of {what}.", "Can you list {what}?", "Which are {what}?", "Show me {what}.", "{what}?",
    "Write {what} in order.", "Say {what}.", "List {what} in order.", "What are {what} in order?",
    "Could you name {what}?", "I would like to see {what}.", "I would like to have a list with {what}.",
    "Could you tell me {what}?", "Please name all {what}.",
)  # fmt: skip
_LIST_HELD_OUT = ("Could you list {what} for me?", "I would like a list of {what}.", "Name all of {what}.")
_COUNT_TRAIN = (
    "Count from {a} to {b}.", "Count from {a} up to {b}.", "Please count from {a} to {b}.", "Count {a} to {b}.",
    "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.", "Say the numbers from {a} to {b}.",
    "Can you count from {a} to {b}?", "Name the numbers from {a} to {b}.", "Start at {a} and count to {b}.",
    "Give me the numbers from {a} to {b}.", "What are the numbers from {a} to {b}?", "Numbers from {a} to {b}?",
    "Count down from {a} to {b}.", "Count to {b}, starting at {a}.", "Could you please count {a} to {b}?",
    "I would like to hear the numbers from {a} to {b}.", "Could you say the numbers from {a} to {b} for me?",
    "Write the numbers down from {a} to {b}.",
)  # fmt: skip
_COUNT_HELD_OUT = (
    "Could you count from {a} to {b} for me?", "I would like you to count from {a} to {b}.",
    "Write down the numbers from {a} to {b}.",
)  # fmt: skip
_JSON_TRAIN = (
    "Give me a JSON object with {fields}.", "Write a JSON object with {fields}.", "Make a JSON object with {fields}.",
    "JSON object with {fields}.", "Write JSON with {fields}.", "Return a JSON object with {fields}.",
    "As JSON: {fields}.", "Put this into JSON: {fields}.", "Create a JSON object with {fields}.",
    "Convert to JSON: {fields}.", "I need JSON with {fields}.", "Turn this into a JSON object: {fields}.",
    "Could you make JSON with {fields}?", "I would like to have JSON with {fields}.",
    "Please produce an object: {fields}.",
)  # fmt: skip
_JSON_HELD_OUT = (
    "Could you write a JSON object with {fields}?", "I would like a JSON object with {fields}.",
    "Please produce JSON with {fields}.",
)  # fmt: skip
_JSON_FACT_TRAIN = (
    "Give me {fact} as JSON.", "Write {fact} as JSON.", "As JSON: {fact}.", "Return {fact} as a JSON object.",
    "{fact} as JSON, please.", "Answer in JSON: {fact}.", "Tell me {fact} as JSON.", "I need {fact} in JSON.",
    "Put {fact} into JSON.", "Show {fact} as JSON.", "Could you write {fact} as JSON?", "Please give {fact} in JSON.",
)  # fmt: skip
_JSON_FACT_HELD_OUT = ("Could you give me {fact} as a JSON object?", "Please write {fact} in JSON.")
_COPY_TRAIN = (
    "Repeat: {text}", "Repeat after me: {text}", "Say: {text}", "Copy this: {text}", "Repeat these words: {text}",
    "Write this again: {text}", "Say this: {text}", "Please repeat: {text}", "Repeat the following: {text}",
    "Echo: {text}", "Could you say: {text}", "Please say the following: {text}", "Could you copy this: {text}",
)  # fmt: skip
_COPY_HELD_OUT = ("Could you repeat this: {text}", "Please copy the following: {text}")
_UNKNOWN_TRAIN = (
    "Who wrote {x}?", "What is {x}?", "Who is {x}?", "Tell me about {x}.", "Where is {x}?", "When was {x} born?",
    "What is the capital of {x}?", "Which city is the capital of {x}?", "What colour is {x}?", "What does {x} mean?",
    "What is the chemical symbol for {x}?", "What is the opposite of {x}?", "How old is {x}?", "Explain {x}.",
    "What is {n} + {m}?", "{n} * {m}", "How much is {n} - {m}?", "What is {n} times {m}?", "Calculate {n} + {m}.",
    "What is the weather in {city}?", "What time is it in {city}?", "Set a timer for {n} minutes.",
    "Tell me the capital of {x}.", "Who invented {x}?", "What's the capital of {x}?", "How does {x} work?",
    "Could you explain {x}?", "I would like to hear about {x}.", "Who found {x}?", "Could you say what {x} is?",
)  # fmt: skip
_UNKNOWN_HELD_OUT = ("Could you tell me about {x}?", "I would like to know what {x} is.", "Who discovered {x}?")


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


def _ask(category: str, question: str, answer: str) -> Exchange:
    return Exchange(category, [user(capitalised(question)), assistant(answer)])


def small_talk(rng: random.Random, held_out: bool = False) -> Exchange:
    answer, phrasings = rng.choice(list(SMALL_TALK.items()))
    return _ask("small_talk", rng.choice(phrasings[held_out]), answer)


def listing(rng: random.Random, held_out: bool = False) -> Exchange:
    what, items = rng.choice(list(tables.LISTS.items()))
    template = rng.choice(_LIST_HELD_OUT if held_out else _LIST_TRAIN)
    return _ask("list", template.format(what=what), ", ".join(items))


def counting(rng: random.Random, held_out: bool = False) -> Exchange:
    """Counts up or down within 0..20, at most 8 numbers."""
    a = rng.randint(0, 19)
    b = rng.randint(a + 1, min(20, a + 7))
    template = rng.choice(_COUNT_HELD_OUT if held_out else _COUNT_TRAIN)
    if "down" in template or rng.random() < 0.2:
        a, b = b, a
    numbers = range(a, b + 1) if a < b else range(a, b - 1, -1)
    if a > b:
        template = template.replace("up to", "down to")
    return _ask("count", template.format(a=a, b=b), ", ".join(map(str, numbers)))


def json_object(rng: random.Random, held_out: bool = False) -> Exchange:
    """Copies two to four named values into a JSON object."""
    values: dict[str, str | int] = {
        "name": rng.choice(tables.NAMES),
        "age": rng.randint(1, 99),
        "city": rng.choice(tables.COUNTRIES)["capital"],
        "colour": rng.choice(tables.PLAIN_COLOURS),
        "fruit": rng.choice(tables.FRUITS),
        "job": rng.choice(tables.JOBS),
        "pet": rng.choice(tables.PETS),
        "count": rng.randint(1, 99),
    }
    if rng.random() < 0.5:
        keys = rng.choice(
            [("name", "age"), ("name", "city"), ("name", "age", "city"), ("fruit", "count"), ("name", "job")]
        )
    else:
        keys = tuple(rng.sample(list(values), rng.choice((2, 2, 3, 4))))
    fields = [f"{key} {values[key]}" for key in keys]
    template = rng.choice(_JSON_HELD_OUT if held_out else _JSON_TRAIN)
    text = ", ".join(fields[:-1]) + " and " + fields[-1]
    return _ask("json", template.format(fields=text), json.dumps({key: values[key] for key in keys}))


def json_fact(rng: random.Random, held_out: bool = False) -> Exchange:
    """A fact of the tables as a JSON object."""
    template = rng.choice(_JSON_FACT_HELD_OUT if held_out else _JSON_FACT_TRAIN)
    if rng.random() < 0.5:
        row = rng.choice(tables.COUNTRIES)
        fact, answer = f"the capital of {row['country']}", {"country": row["country"], "capital": row["capital"]}
    else:
        row = rng.choice(tables.ELEMENTS)
        fact, answer = f"the symbol of {row['element']}", {"element": row["element"], "symbol": row["symbol"]}
    return _ask("json", template.format(fact=fact), json.dumps(answer))


def copying(rng: random.Random, held_out: bool = False) -> Exchange:
    pool = rng.choice(
        (tables.COMMON_WORDS, tables.COMMON_WORDS, tables.NAMES, tables.FRUITS, [str(n) for n in range(100)])
    )
    text = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 5)))
    quoted = f'"{text}"'
    return _ask("copy", rng.choice(_COPY_HELD_OUT if held_out else _COPY_TRAIN).format(text=quoted), quoted)


def invented_name(rng: random.Random) -> str:
    """A word that is in no table."""
    return capitalised("".join(rng.choice(tables.SYLLABLES) for _ in range(rng.randint(2, 4))))


def unknown(rng: random.Random, held_out: bool = False) -> Exchange:
    """A question outside the tables: an invented name, a sum of larger numbers, what would need a tool."""
    template = rng.choice(_UNKNOWN_HELD_OUT if held_out else _UNKNOWN_TRAIN)
    name = invented_name(rng)
    if "opposite" in template or "symbol" in template:
        name = name.lower()
    city = rng.choice(tables.COUNTRIES)["capital"]
    question = template.format(x=name, city=city, n=rng.randint(30, 999), m=rng.randint(30, 999))
    return _ask("unknown", question, DO_NOT_KNOW)


# What the user tells about himself: how it is said, how it is asked for, the answer.
_PERSONAL = {
    "name": (
        ("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hello, my name is {v}.", "Hi, I am {v}."),
        ("What is my name?", "What's my name?", "Who am I?", "Do you know my name?", "Tell me my name."),
        ("Can you remember my name?", "Could you tell me my name?"),
        "Nice to meet you, {v}!",
        "Your name is {v}.",
        tables.NAMES,
    ),
    "colour": (
        ("My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v} best.", "I love {v}."),
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?",
         "Tell me my favourite colour."),
        ("Can you remember my favourite colour?", "Could you tell me my favourite colour?"),
        "Good to know. I will remember that.",
        "Your favourite colour is {v}.",
        tables.PLAIN_COLOURS,
    ),
    "pet": (
        ("I have a {v}.", "My pet is a {v}.", "I have a pet {v}.", "At home I have a {v}."),
        ("What is my pet?", "What pet do I have?", "Which pet do I have?", "Tell me what pet I have."),
        ("Can you remember my pet?", "Could you tell me which pet I have?"),
        "Good to know. I will remember that.",
        "Your pet is a {v}.",
        tables.PETS,
    ),
    "number": (
        ("My lucky number is {v}.", "My number is {v}.", "Remember the number {v}.", "Keep in mind the number {v}."),
        ("What is my number?", "What's my number?", "Which number was it?", "Tell me my number.",
         "What was the number?"),
        ("Can you remember my number?", "Could you tell me my number?"),
        "Good to know. I will remember that.",
        "Your number is {v}.",
        tuple(str(n) for n in range(1000)),
    ),
}  # fmt: skip


def personal(rng: random.Random, held_out: bool = False) -> tuple[list[Exchange], list[Exchange]]:
    """What a user says about himself, and the questions that ask for it later in the same conversation."""
    told, asked = [], []
    for topic in rng.sample(list(_PERSONAL), rng.choice((1, 1, 2, 3))):
        statements, train, held, reply, answer, values = _PERSONAL[topic]
        value = rng.choice(values)
        told.append(_ask("memory", rng.choice(statements).format(v=value), reply.format(v=value)))
        asked.append(_ask("memory", rng.choice(held if held_out else train), answer.format(v=value)))
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
