"""Ways of asking that fit any relation: a frame around the name of what is asked for.

They let the model meet each wording with many kinds of facts, so that it learns to look at what is asked for and not
at the sentence around it. No frame with its phrase is a held-out phrasing.
"""

PHRASES: dict[str, tuple[str, ...]] = {
    "capital": ("the capital of {country}", "the capital city of {country}"),
    "country": ("the country with the capital {capital}", "the country of the city {capital}"),
    "continent": ("the continent of {country}", "the continent {country} is part of"),
    "symbol": ("the symbol of the element {element}", "the element symbol for {element}", "the symbol for {element}"),
    "element": ("the element with the symbol {symbol}", "the element that {symbol} stands for"),
    "atomic_number": ("the atomic number of {element}",),
    "colour": ("the colour of {thing}", "the color of {thing}"),
    "day_after": ("the day after {given}", "the day that follows {given}"),
    "day_before": ("the day before {given}",),
    "month_after": ("the month after {given}", "the month that follows {given}"),
    "month_before": ("the month before {given}",),
    "month_length": ("the number of days in {month}",),
    "month_order": ("the {ordinal} month of the year",),
    "planet": ("the {ordinal} planet from the Sun",),
    "opposite": ("the opposite of {word}", "an antonym for {word}", "the opposite of the word {word}"),
    "plural": ("the plural of {singular}", "the plural form of {singular}", "the plural of the word {singular}"),
    "sound": ("the sound of {animal}", "the noise of {animal}"),
    "young": ("the name of the young of {animal}",),
    "shape": ("the number of sides of a {shape}",),
    "addition": ("{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}"),
    "subtraction": ("{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}"),
    "multiplication": ("{a} * {b}", "{a} times {b}", "the product of {a} and {b}"),
}
FRAMES = (
    "Could you give me {phrase}?", "Could you name {phrase}?", "Could you say what {phrase} is?",
    "I would like to hear {phrase}.", "I would like to have {phrase}.", "I would like to be told {phrase}.",
    "I want to know {phrase}.", "Would you tell me {phrase}?", "Please tell me {phrase}.",
    "Remind me of {phrase}.", "What would you say {phrase} is?", "What do people call {phrase}?",
    "My friend asked me for {phrase}.", "May I ask what {phrase} is?", "Can you say {phrase}?",
    "{phrase}, what is it?", "I forgot {phrase}.", "Do you know what {phrase} is?",
)  # fmt: skip
SUM_FRAMES = (
    "Could you compute {phrase}?", "Could you calculate {phrase}?", "Please work out {phrase}.",
    "Can you work out what {phrase} is?", "I would like the result of {phrase}.", "How much does {phrase} make?",
    "{phrase} makes what?", "{phrase} gives how much?", "If I compute {phrase}, what do I get?",
    "Please tell me {phrase}.", "I want to know what {phrase} is.", "Would you calculate {phrase}?",
)  # fmt: skip
OWN_FRAMES: dict[str, tuple[str, ...]] = {
    "country": (
        "{capital} is a city. In which country?", "{capital} is the capital of a country. Which one?",
        "If I go to {capital}, in which country am I?", "{capital} is a capital. Name its country.",
    ),
    "continent": (
        "{country} is located on what continent?", "{country} is a country. On which continent?",
        "Where would I find {country}, on which continent?",
    ),
    "element": ("{symbol} is a chemical symbol. For which element?", "{symbol} is short for which chemical element?"),
    "colour": ("What colour would {thing} have?", "{thing} has what colour?"),
    "opposite": ("How do you call the opposite of {word}?", "Name a word that is an antonym of {word}."),
}  # fmt: skip
SUM_CATEGORIES = ("addition", "subtraction", "multiplication")
WRAPPERS = (
    "Could you answer this: {question}", "I would like to learn this: {question}", "Could you help me? {question}",
    "Please tell me this: {question}", "My teacher asked: {question}", "I would like to ask you: {question}",
    "Would you answer this: {question}", "Could you remind me of this: {question}", "I would like to hear: {question}",
)  # fmt: skip


def framed_templates(category: str) -> tuple[str, ...]:
    """Every question template that the frames make for a relation."""
    frames = SUM_FRAMES if category in SUM_CATEGORIES else FRAMES
    made = tuple(frame.replace("{phrase}", phrase) for frame in frames for phrase in PHRASES[category])
    return (*made, *OWN_FRAMES.get(category, ()))
