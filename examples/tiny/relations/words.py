"""Facts about words, animals and shapes."""

from tiny import tables
from tiny.relations.relation import Relation, Row, lines


def _both_ways(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return rows + tuple({"word": row["opposite"], "opposite": row["word"]} for row in rows)


WORDS = (
    Relation(
        "opposite",
        _both_ways(tables.OPPOSITES),
        lines("""
            What is the opposite of {word}?
            What's the opposite of {word}?
            Which word is the opposite of {word}?
            Tell me the opposite of {word}.
            Give me the opposite of {word}.
            Name the opposite of {word}.
            Opposite of {word}?
            {word}: opposite?
            What word means the opposite of {word}?
            The opposite of {word} is what?
            Give an antonym of {word}.
            What is an antonym of {word}?
            What is the antonym for {word}?
            Do you know the opposite of {word}?
            Which word is an antonym of {word}?
            What is the reverse of {word}?
        """),
        lines("""
            Could you tell me the opposite of the word {word}?
            I would like to know what the opposite of {word} is.
            Name an antonym for {word}.
            What do you call the opposite of {word}?
        """),
        "The opposite of {word} is {opposite}.",
        "{opposite}",
        1.6,
        40,
    ),
    Relation(
        "plural",
        tables.PLURALS,
        lines("""
            What is the plural of {singular}?
            What's the plural of {singular}?
            Tell me the plural of {singular}.
            Give me the plural of {singular}.
            Name the plural of {singular}.
            Plural of {singular}?
            {singular}: plural?
            What is the plural form of {singular}?
            The plural of {singular} is what?
            How do you write the plural of {singular}?
            One {singular}, two what?
            How do I say more than one {singular}?
            Do you know the plural of {singular}?
        """),
        lines("""
            Could you tell me the plural of the word {singular}?
            I would like to know the plural form of {singular}.
            What plural does {singular} have?
        """),
        "The plural of {singular} is {plural}.",
        "{plural}",
        0.7,
        15,
    ),
    Relation(
        "sound",
        tables.ANIMALS,
        lines("""
            What sound does {animal} make?
            Which sound does {animal} make?
            What does {animal} say?
            What noise does {animal} make?
            Tell me the sound {animal} makes.
            What is the sound of {animal}?
            {animal}: sound?
            Name the sound that {animal} makes.
            How does {animal} sound?
            Give me the sound of {animal}.
            Do you know what {animal} says?
        """),
        lines("""
            Could you tell me what sound {animal} makes?
            I would like to know which noise {animal} makes.
            The sound of {animal} is what?
        """),
        "{animal} says {sound}.",
        "{sound}",
        0.4,
        8,
    ),
    Relation(
        "young",
        tables.ANIMALS,
        lines("""
            What is the young of {animal} called?
            What do you call the young of {animal}?
            What is the baby of {animal} called?
            What is the name for the baby of {animal}?
            Tell me what the young of {animal} is called.
            {animal}: what is its baby called?
            What do we call the baby of {animal}?
            Name the young of {animal}.
            How do you call the baby of {animal}?
            What is the young of {animal}?
            Give me the word for the young of {animal}.
        """),
        lines("""
            Could you tell me what the baby of {animal} is called?
            I would like to know the name for the young of {animal}.
            The young of {animal} is called what?
        """),
        "The young of {animal} is {young}.",
        "{young}",
        0.4,
        8,
    ),
    Relation(
        "shape",
        tables.SHAPES,
        lines("""
            How many sides does a {shape} have?
            How many sides are there in a {shape}?
            How many sides has a {shape}?
            What is the number of sides of a {shape}?
            Tell me how many sides a {shape} has.
            A {shape} has how many sides?
            {shape}: how many sides?
            Give me the number of sides of a {shape}.
            Number of sides of a {shape}?
            Do you know how many sides a {shape} has?
        """),
        lines("""
            Could you tell me how many sides a {shape} has?
            I would like to know how many sides there are in a {shape}.
            What number of sides does a {shape} have?
        """),
        "A {shape} has {sides} sides.",
        "{sides}",
        0.3,
        6,
    ),
)
