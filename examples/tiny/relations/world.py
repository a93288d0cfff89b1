"""Facts about countries, elements and colours."""

from tiny import tables
from tiny.relations.relation import Relation, lines

WORLD = (
    Relation(
        "capital",
        tables.COUNTRIES,
        lines("""
            What is the capital of {country}?
            What's the capital of {country}?
            Which city is the capital of {country}?
            Tell me the capital of {country}.
            Name the capital of {country}.
            Capital of {country}?
            Do you know the capital of {country}?
            What is the name of the capital of {country}?
            What is the capital city of {country}?
            Which city is the seat of government of {country}?
            Give me the capital of {country}.
            {country}: capital?
            I forgot the capital of {country}. What is it?
            The capital of {country} is which city?
            What city serves as the capital of {country}?
            For {country}, what is the capital?
            Can you name the capital city of {country}?
            I am going to {country}. What is its capital?
        """),
        lines("""
            I would like to know which city is the capital of {country}.
            Could you remind me what the capital of {country} is?
            The capital city of {country} is called what?
            Can you tell me the name of the capital city of {country}?
            My teacher asked me for the capital of {country}. What is it?
            What would be the capital of {country}?
        """),
        "The capital of {country} is {capital}.",
        "{capital}",
        3.0,
        70,
    ),
    Relation(
        "country",
        tables.COUNTRIES,
        lines("""
            {capital} is the capital of which country?
            Which country has {capital} as its capital?
            Of which country is {capital} the capital?
            What country is {capital} the capital of?
            In which country is {capital}?
            Which country is {capital} in?
            Where is {capital}?
            {capital} is the capital of what?
            Tell me which country {capital} is the capital of.
            Name the country whose capital is {capital}.
            What country has the capital {capital}?
            {capital}: which country?
            The city of {capital} is in which country?
            To which country does {capital} belong?
            I am in {capital}. Which country is this?
        """),
        lines("""
            Could you tell me the country whose capital is {capital}?
            {capital} is a capital city. Of which country?
            If I travel to {capital}, which country am I in?
            I would like to know what country {capital} is the capital of.
        """),
        "The city of {capital} is the capital of {country}.",
        "{country}",
        3.2,
        25,
    ),
    Relation(
        "continent",
        tables.COUNTRIES,
        lines("""
            On which continent is {country}?
            Which continent is {country} in?
            What continent is {country} on?
            In which part of the world is {country}?
            Tell me the continent of {country}.
            Name the continent where {country} is.
            {country} is on which continent?
            {country}: continent?
            To which continent does {country} belong?
            Continent of {country}?
            What is the continent of {country}?
            Do you know which continent {country} is on?
            On what continent can I find {country}?
            Where in the world is {country}?
            {country} belongs to which continent?
        """),
        lines("""
            Could you tell me on which continent {country} is?
            I would like to know what continent {country} belongs to.
            Which continent would I find {country} on?
            {country} lies on what continent?
        """),
        "The continent of {country} is {continent}.",
        "{continent}",
        2.0,
        25,
    ),
    Relation(
        "symbol",
        tables.ELEMENTS,
        lines("""
            What is the chemical symbol for {element}?
            What is the symbol for {element}?
            What's the symbol of {element}?
            What is the chemical symbol of {element}?
            Which symbol does {element} have?
            Tell me the symbol for {element}.
            Give me the chemical symbol of {element}.
            Name the symbol of the element {element}.
            Symbol for {element}?
            {element}: symbol?
            Which letters stand for {element} in the periodic table?
            What symbol is used for {element}?
            Do you know the chemical symbol for {element}?
            The chemical symbol for {element} is what?
            In chemistry, what is the symbol for {element}?
            How is {element} written in the periodic table?
            What is the symbol of the element {element}?
        """),
        lines("""
            Could you tell me which chemical symbol {element} has?
            I would like to know the symbol of {element}.
            What is the element symbol of {element}?
            What chemical symbol stands for {element}?
            In the periodic table, what is the symbol for {element}?
        """),
        "The chemical symbol for {element} is {symbol}.",
        "{symbol}",
        1.8,
        45,
    ),
    Relation(
        "element",
        tables.ELEMENTS,
        lines("""
            Which element has the symbol {symbol}?
            What element has the chemical symbol {symbol}?
            {symbol} is the symbol of which element?
            Which element is {symbol}?
            What does {symbol} stand for in the periodic table?
            What element is {symbol}?
            Tell me the element with the symbol {symbol}.
            Name the element whose symbol is {symbol}.
            The symbol {symbol} belongs to which element?
            Which chemical element is written {symbol}?
            What is the element {symbol}?
            {symbol} stands for which element?
            In chemistry, what is {symbol}?
            Give me the name of the element {symbol}.
            The element with the symbol {symbol} is what?
        """),
        lines("""
            Could you tell me what element the symbol {symbol} stands for?
            I would like to know which element has the symbol {symbol}.
            {symbol} is the chemical symbol of what element?
            What is the name of the element with the symbol {symbol}?
        """),
        "The element with the symbol {symbol} is {element}.",
        "{element}",
        2.0,
        20,
    ),
    Relation(
        "atomic_number",
        tables.ELEMENTS,
        lines("""
            What is the atomic number of {element}?
            What's the atomic number of {element}?
            Which atomic number does {element} have?
            Tell me the atomic number of {element}.
            Give me the atomic number of {element}.
            Atomic number of {element}?
            {element}: atomic number?
            How many protons does {element} have?
            How many protons are in an atom of {element}?
            The atomic number of {element} is what?
            Do you know the atomic number of {element}?
            What number is {element} in the periodic table?
            Name the atomic number of {element}.
            What is the number of protons in {element}?
            In chemistry, what is the atomic number of {element}?
        """),
        lines("""
            Could you tell me the atomic number of {element}?
            I would like to know which atomic number {element} has.
            What atomic number belongs to {element}?
            In the periodic table, what is the atomic number of {element}?
        """),
        "The atomic number of {element} is {number}.",
        "{number}",
        1.4,
        20,
    ),
    Relation(
        "colour",
        tables.COLOURED_THINGS,
        lines("""
            What colour is {thing}?
            What color is {thing}?
            Which colour is {thing}?
            Which color does {thing} have?
            What colour does {thing} have?
            Tell me the colour of {thing}.
            What is the colour of {thing}?
            What is the color of {thing}?
            {thing}: what colour?
            Name the colour of {thing}.
            Do you know the colour of {thing}?
            Colour of {thing}?
            Give me the color of {thing}.
            Of what colour is {thing}?
            If you see {thing}, what colour is it?
        """),
        lines("""
            Could you tell me what colour {thing} is?
            I would like to know the color of {thing}.
            The colour of {thing} is what?
            What colour would you say {thing} is?
        """),
        "{thing} {verb} {colour}.",
        "{colour}",
        0.9,
        20,
    ),
)
