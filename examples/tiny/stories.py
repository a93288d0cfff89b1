"""Short coherent stories from a grammar: one hero, one friend, one thing lost and found."""

import random

from tiny.tables import PHRASINGS

_WORDS = PHRASINGS["stories"]


def story(rng: random.Random) -> tuple[str, str]:
    """Draws a story. Returns the hero's animal and the text, six or seven sentences."""
    animal, friend_animal = rng.sample(_WORDS["heroes"], 2)
    hero, friend = rng.sample(_WORDS["names"], 2)
    thing, place, spot = rng.choice(_WORDS["things"]), rng.choice(_WORDS["places"]), rng.choice(_WORDS["spots"])
    the_thing = "the " + thing.split(" ", 1)[1]
    opening = rng.choice(("Once upon a time there was", "Long ago there was", "There once was"))
    article = "an" if friend_animal[0] in "aeiou" else "a"
    sentences = [
        f"{opening} a {rng.choice(_WORDS['traits'])} {animal} named {hero}.",
        f"{hero} lived in {place} and had {thing}.",
        f"One {rng.choice(_WORDS['weather'])} day {hero} could not find {the_thing}.",
        f"{hero} met {article} {friend_animal} named {friend}.",
        f'"Will you help me?" asked {hero}.',
        f"{friend} looked {spot} and there was {the_thing}.",
        rng.choice(_WORDS["endings"]).format(hero=hero, friend=friend, thing=the_thing),
    ]
    if rng.random() < 0.5:
        sentences.insert(6, f'"Thank you, {friend}!" said {hero}.')
    return animal, " ".join(sentences)


def request(rng: random.Random, animal: str) -> str:
    """A user's request that the story about `animal` answers."""
    text = rng.choice(_WORDS["requests"]).format(animal=animal)
    return text.replace("a owl", "an owl")
