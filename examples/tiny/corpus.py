"""The embedded model's corpus: conversations and plain documents drawn from the tables, and the evaluation set."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tiny import skills, stories
from tiny.frames import framed_templates
from tiny.relations import RELATIONS, SUM_CATEGORIES, Relation
from tiny.skills import Exchange, Message, assistant, capitalised, user
from tiny.tables import LISTS, PHRASINGS, Row
from tiny.tools import call_text, random_tools, tool_call

_CHATS = PHRASINGS["chats"]


@dataclass(frozen=True)
class Conversation:
    """A chat for the model's template."""

    messages: list[Message]
    tools: list[Message] | None = None


Sample: TypeAlias = Conversation | str
"""A chat, or a plain text."""


@dataclass(frozen=True)
class Stage:
    """Which facts and skills are drawn.

    Attributes:
        stride: draws only every `stride`-th fact of each relation.
        slow: times the usual share of sums, copying, counting and JSON, which take longest to learn.
    """

    stride: int = 1
    slow: float = 1.0


ALL = Stage()


def vary(rng: random.Random, question: str) -> str:
    """The question as another user might type it: lower case, no punctuation, with a word before or after."""
    if rng.random() < 0.15:
        return rng.choice(PHRASINGS["frames"]["wrappers"]).format(question=question)
    kind = rng.random()
    if kind < 0.55:
        return question
    if kind < 0.67:
        return question.lower()
    if kind < 0.77:
        return question.rstrip("?.!")
    if kind < 0.92:
        opener = rng.choice(_CHATS["openers"])
        first_word = question.split()[0]
        keep_case = first_word not in _SENTENCE_STARTERS
        return capitalised(opener + (question if keep_case else question[0].lower() + question[1:]))
    if kind < 0.97:
        return question + rng.choice(_CHATS["closers"])
    return question.lower().rstrip("?.!")


_SENTENCE_STARTERS = frozenset(
    template.split()[0] for relation in RELATIONS for template in relation.train if not template.startswith(("{", "I "))
)


_FRAMED = {relation.category: framed_templates(relation.category) for relation in RELATIONS}


def ask(rng: random.Random, relation: Relation, row: Row, *, brief: bool = False, held_out: bool = False) -> Exchange:
    """One question about one fact."""
    if held_out:
        templates = relation.held_out
    else:
        # As often from the frames as from the relation's own phrasings.
        templates = relation.train if rng.random() < 0.5 else _FRAMED[relation.category]
    question = capitalised(rng.choice(templates).format(**row))
    answer = capitalised((relation.brief if brief else relation.answer).format(**row))
    if not held_out:
        question = vary(rng, question)
    return Exchange(relation.category, [user(question), assistant(answer)])


def _draw_fact(rng: random.Random, stage: Stage = ALL) -> tuple[Relation, Row]:
    weights = [relation.weight * (stage.slow if relation.category in SUM_CATEGORIES else 1) for relation in RELATIONS]
    relation = rng.choices(RELATIONS, weights)[0]
    return relation, rng.choice(relation.rows[:: stage.stride])


def _draw_exchange(rng: random.Random, stage: Stage) -> Exchange:
    """A fact two times of three, else a skill or a story."""
    kind = rng.random()
    if kind < 0.68:
        return ask(rng, *_draw_fact(rng, stage))
    if kind < 0.70:
        animal, text = stories.story(rng)
        return Exchange("story", [user(stories.request(rng, animal)), assistant(text)])
    weights = [weight * (stage.slow if skill in skills.SLOW else 1) for skill, weight in skills.SKILLS]
    return rng.choices([skill for skill, _ in skills.SKILLS], weights)[0](rng)


def conversation(rng: random.Random, turns: int, stage: Stage = ALL) -> Conversation:
    """A chat of about `turns` exchanges: brief facts, facts and skills, things to remember, or tools."""
    kind = rng.random()
    if kind < 0.08:
        exchanges = [ask(rng, *_draw_fact(rng, stage), brief=True) for _ in range(turns)]
        system = rng.choice(_CHATS["brief_system_prompts"])
        return Conversation([{"role": "system", "content": system}, *_messages(exchanges)])
    tools = None
    if kind < 0.15:
        told, asked = skills.personal(rng)
        exchanges = told + [_draw_exchange(rng, stage) for _ in range(rng.randint(0, turns))] + asked
    elif kind < 0.21:
        called = tool_call(rng)
        tools = called.tools
        around = [ask(rng, *_draw_fact(rng, stage)) for _ in range(rng.randint(0, min(turns, 2)))]
        cut = rng.randint(0, len(around))
        exchanges = [*around[:cut], called, *around[cut:]]
    elif kind < 0.22:
        tools = random_tools(rng)
        exchanges = [ask(rng, *_draw_fact(rng, stage)) for _ in range(turns)]
    else:
        exchanges = [_draw_exchange(rng, stage) for _ in range(turns)]
    messages = _messages(exchanges)
    if rng.random() < 0.35:
        messages = [{"role": "system", "content": rng.choice(_CHATS["system_prompts"])}, *messages]
    return Conversation(messages, tools)


def _messages(exchanges: list[Exchange]) -> list[Message]:
    return [message for exchange in exchanges for message in exchange.messages]


def document(rng: random.Random, stage: Stage = ALL) -> str:
    """A plain text without the chat template: a story, sentences of facts, a sum table or a list."""
    kind = rng.random()
    if kind < 0.3:
        return stories.story(rng)[1]
    if kind < 0.85:
        facts = (_draw_fact(rng, stage) for _ in range(rng.randint(2, 8)))
        return " ".join(capitalised(relation.answer.format(**row)) for relation, row in facts)
    if kind < 0.93:
        what, items = rng.choice(list(LISTS.items()))
        return f"{capitalised(what)}: {', '.join(items)}."
    first = rng.randint(0, 12)
    return "\n".join(f"{first} * {n} = {first * n}" for n in range(1, 11))


def long_chat(rng: random.Random, stage: Stage = ALL) -> Conversation:
    """A chat of many turns."""
    return conversation(rng, rng.randint(12, 30), stage)


def draw(rng: random.Random, longest_chat: int = 4, stage: Stage = ALL) -> Sample:
    """The next training sample: nine chats to one document.

    Args:
        rng: what is drawn from.
        longest_chat: most exchanges of a chat.
        stage: which facts, and how often the slowly learnt kinds.
    """
    if rng.random() < 0.1:
        return document(rng, stage)
    return conversation(rng, rng.randint(1, longest_chat), stage)


def evaluation_rows(seed: int = 2024) -> Iterator[dict]:
    """The evaluation file's rows: every question in a phrasing that `draw` never uses.

    A row has `messages` up to the question, the `answer` expected word for word, its `category`, and `tools` where the
    conversation has any. For a tool call the answer is the text between the template's markers.
    """
    rng = random.Random(seed)
    for relation in RELATIONS:
        rows = rng.sample(relation.rows, min(relation.eval_count, len(relation.rows)))
        for index, row in enumerate(rows):
            brief = index % 7 == 6
            exchange = ask(rng, relation, row, brief=brief, held_out=True)
            system = [{"role": "system", "content": rng.choice(_CHATS["brief_system_prompts"])}] if brief else []
            yield _row(exchange, system)
    counts = {
        skills.listing: 14, skills.counting: 15, skills.json_object: 15, skills.json_fact: 8, skills.copying: 12,
        skills.small_talk: 8, skills.unknown: 10,
    }  # fmt: skip
    for draw_exchange, count in counts.items():
        seen: set[str] = set()
        while len(seen) < count:
            exchange = draw_exchange(rng, held_out=True)
            if exchange.messages[0]["content"] not in seen:
                seen.add(exchange.messages[0]["content"])
                yield _row(exchange)
    for _ in range(15):
        told, asked = skills.personal(rng, held_out=True)
        between = [ask(rng, *_draw_fact(rng)) for _ in range(rng.randint(0, 6))]
        yield _row(asked[0], _messages(told + between))
    for _ in range(16):
        exchange = tool_call(rng, held_out=True)
        call = exchange.messages[1]
        if "tool_calls" in call and rng.random() < 0.6:
            exchange = Exchange("tool_call", [exchange.messages[0], assistant(call_text(call))], exchange.tools)
        yield _row(exchange)


def _row(exchange: Exchange, before: list[Message] | None = None) -> dict:
    row = {
        "category": exchange.category,
        "messages": (before or []) + exchange.messages[:-1],
        "answer": exchange.messages[-1]["content"],
    }
    if exchange.tools:
        row["tools"] = exchange.tools
    return row
