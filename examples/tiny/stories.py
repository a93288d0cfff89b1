"""Short coherent stories from a grammar: one hero, one friend, one thing lost and found."""

import random

_HEROES = ("fox", "bear", "rabbit", "mouse", "owl", "frog", "cat", "dog", "duck", "horse", "turtle", "hedgehog")
_NAMES = ("Milo", "Luna", "Pip", "Ruby", "Toby", "Nelly", "Oscar", "Daisy", "Max", "Poppy", "Finn", "Molly")
_TRAITS = ("little", "brave", "clever", "shy", "kind", "curious", "gentle", "merry")
_PLACES = ("a quiet forest", "a green valley", "an old garden", "a village by the sea", "a warm house", "a tall tree")
_THINGS = ("a red ball", "a golden key", "a blue hat", "a small bell", "a warm scarf", "a silver spoon", "a paper boat")
_SPOTS = ("under a big stone", "behind the old mill", "beside the river", "in the tall grass", "near the bridge")
_WEATHER = ("sunny", "windy", "rainy", "cold", "warm", "foggy")
_ENDINGS = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "That night {hero} slept well and dreamed of {thing}.",
    "Then {hero} and {friend} went home and drank hot tea.",
    "And {hero} never lost {thing} again.",
)

REQUESTS = (
    "Tell me a story about a {animal}.", "Tell me a short story about a {animal}.", "Write a story about a {animal}.",
    "Can you tell me a story about a {animal}?", "Story about a {animal}, please.", "I want a story about a {animal}.",
    "Write a short story about a {animal}.", "Make up a story about a {animal}.",
    "Please tell a story about a {animal}.",
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?",
)  # fmt: skip


def story(rng: random.Random) -> tuple[str, str]:
    """Draws a story. Returns the hero's animal and the text, six or seven sentences."""
    animal, friend_animal = rng.sample(_HEROES, 2)
    hero, friend = rng.sample(_NAMES, 2)
    thing, place, spot = rng.choice(_THINGS), rng.choice(_PLACES), rng.choice(_SPOTS)
    the_thing = "the " + thing.split(" ", 1)[1]
    opening = rng.choice(("Once upon a time there was", "Long ago there was", "There once was"))
    article = "an" if friend_animal[0] in "aeiou" else "a"
    sentences = [
        f"{opening} a {rng.choice(_TRAITS)} {animal} named {hero}.",
        f"{hero} lived in {place} and had {thing}.",
        f"One {rng.choice(_WEATHER)} day {hero} could not find {the_thing}.",
        f"{hero} met {article} {friend_animal} named {friend}.",
        f'"Will you help me?" asked {hero}.',
        f"{friend} looked {spot} and there was {the_thing}.",
        rng.choice(_ENDINGS).format(hero=hero, friend=friend, thing=the_thing),
    ]
    if rng.random() < 0.5:
        sentences.insert(6, f'"Thank you, {friend}!" said {hero}.')
    return animal, " ".join(sentences)


def request(rng: random.Random, animal: str) -> str:
    """A user's request that the story about `animal` answers."""
    text = rng.choice(REQUESTS).format(animal=animal)
    return text.replace("a owl", "an owl")
