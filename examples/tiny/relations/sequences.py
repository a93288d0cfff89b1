"""Facts about the order of days, months and planets."""

from tiny import tables
from tiny.relations.relation import Relation, Row, lines


def _neighbours(names: tuple[str, ...], step: int) -> tuple[Row, ...]:
    return tuple({"given": name, "wanted": names[(i + step) % len(names)]} for i, name in enumerate(names))


MONTH_ROWS = tuple(
    {"month": month, "days": str(days), "ordinal": ordinal}
    for month, days, ordinal in zip(tables.MONTHS, tables.MONTH_LENGTHS, tables.ORDINALS, strict=True)
)
PLANET_ROWS = tuple(
    {"planet": planet, "ordinal": ordinal} for planet, ordinal in zip(tables.PLANETS, tables.ORDINALS, strict=False)
)

SEQUENCES = (
    Relation(
        "day_after",
        _neighbours(tables.DAYS, 1),
        lines("""
            What day comes after {given}?
            Which day comes after {given}?
            What day follows {given}?
            Which day is after {given}?
            What is the day after {given}?
            Today is {given}. What day is tomorrow?
            If today is {given}, what is tomorrow?
            Tell me the day after {given}.
            Name the day that follows {given}.
            Which day of the week comes after {given}?
            What comes after {given}?
            After {given} comes which day?
            The day after {given} is what?
            What is the next day after {given}?
            Give me the day after {given}.
        """),
        lines("""
            Could you tell me which day follows {given}?
            I would like to know what day comes after {given}.
            It is {given} today. What day is tomorrow?
            What day of the week follows {given}?
        """),
        "{wanted} comes after {given}.",
        "{wanted}",
        0.35,
        7,
    ),
    Relation(
        "day_before",
        _neighbours(tables.DAYS, -1),
        lines("""
            What day comes before {given}?
            Which day comes before {given}?
            What day precedes {given}?
            Which day is before {given}?
            What is the day before {given}?
            Today is {given}. What day was yesterday?
            If today is {given}, what was yesterday?
            Tell me the day before {given}.
            Name the day that precedes {given}.
            Which day of the week comes before {given}?
            What comes before {given}?
            Before {given} comes which day?
            The day before {given} is what?
            Give me the day before {given}.
        """),
        lines("""
            Could you tell me which day comes before {given}?
            I would like to know what day is before {given}.
            It is {given} today. What day was yesterday?
            What day of the week precedes {given}?
        """),
        "{wanted} comes before {given}.",
        "{wanted}",
        0.35,
        7,
    ),
    Relation(
        "month_after",
        _neighbours(tables.MONTHS, 1),
        lines("""
            What month comes after {given}?
            Which month comes after {given}?
            What month follows {given}?
            Which month is after {given}?
            What is the month after {given}?
            It is {given}. What is the next month?
            Tell me the month after {given}.
            Name the month that follows {given}.
            Which month of the year comes after {given}?
            What comes after {given}?
            After {given} comes which month?
            The month after {given} is what?
            Give me the month after {given}.
        """),
        lines("""
            Could you tell me which month follows {given}?
            I would like to know what month comes after {given}.
            What month of the year follows {given}?
        """),
        "{wanted} comes after {given}.",
        "{wanted}",
        0.5,
        10,
    ),
    Relation(
        "month_before",
        _neighbours(tables.MONTHS, -1),
        lines("""
            What month comes before {given}?
            Which month comes before {given}?
            What month precedes {given}?
            Which month is before {given}?
            What is the month before {given}?
            It is {given}. What was the previous month?
            Tell me the month before {given}.
            Name the month that precedes {given}.
            Which month of the year comes before {given}?
            What comes before {given}?
            Before {given} comes which month?
            The month before {given} is what?
            Give me the month before {given}.
        """),
        lines("""
            Could you tell me which month comes before {given}?
            I would like to know what month is before {given}.
            What month of the year precedes {given}?
        """),
        "{wanted} comes before {given}.",
        "{wanted}",
        0.5,
        10,
    ),
    Relation(
        "month_length",
        MONTH_ROWS,
        lines("""
            How many days does {month} have?
            How many days are in {month}?
            How many days are there in {month}?
            How long is {month}?
            What is the number of days in {month}?
            Tell me how many days {month} has.
            Days in {month}?
            {month}: how many days?
            {month} has how many days?
            Give me the number of days in {month}.
            How long is the month of {month} in days?
            Do you know how many days {month} has?
        """),
        lines("""
            Could you tell me how many days are in {month}?
            I would like to know how many days {month} has.
            In {month} there are how many days?
        """),
        "{month} has {days} days.",
        "{days}",
        0.4,
        8,
    ),
    Relation(
        "month_order",
        MONTH_ROWS,
        lines("""
            What is the {ordinal} month of the year?
            Which month is the {ordinal} month of the year?
            Which month is the {ordinal}?
            Name the {ordinal} month.
            Tell me the {ordinal} month of the year.
            The {ordinal} month is which month?
            Give me the {ordinal} month.
            What's the {ordinal} month?
            What month is {ordinal} in the year?
            Which month comes {ordinal} in the year?
            {ordinal} month of the year?
        """),
        lines("""
            Could you tell me which month is the {ordinal} of the year?
            I would like to know the {ordinal} month of the year.
            The {ordinal} month of the year is called what?
        """),
        "{month} is the {ordinal} month of the year.",
        "{month}",
        0.4,
        8,
    ),
    Relation(
        "planet",
        PLANET_ROWS,
        lines("""
            What is the {ordinal} planet from the Sun?
            Which planet is {ordinal} from the Sun?
            Which planet is the {ordinal} planet?
            Name the {ordinal} planet from the Sun.
            Tell me the {ordinal} planet.
            The {ordinal} planet is which one?
            Give me the {ordinal} planet from the Sun.
            What's the {ordinal} planet?
            Counting from the Sun, what is the {ordinal} planet?
            Which planet comes {ordinal} from the Sun?
            {ordinal} planet?
        """),
        lines("""
            Could you tell me which planet is {ordinal} from the Sun?
            I would like to know the {ordinal} planet from the Sun.
            The {ordinal} planet from the Sun is called what?
        """),
        "{planet} is the {ordinal} planet from the Sun.",
        "{planet}",
        0.3,
        7,
    ),
)
