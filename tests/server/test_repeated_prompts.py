"""A server that computes a long prompt for the second time says once what would have kept it."""

import logging

import pytest

from jaxis.server.generation.repeated_prompts import LONG_PROMPT, RepeatedPrompts

PROMPT = list(range(5000))


def no_disk():
    return False


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="jaxis.server.generation.repeated_prompts")
    return lambda: [record.getMessage() for record in caplog.records]


def test_it_is_said_once_and_names_the_option(said):
    prompts = RepeatedPrompts()
    prompts.note(PROMPT, 0, None, no_disk)
    assert not said()
    for _ in range(3):
        prompts.note([*PROMPT, 1, 2, 3], 0, None, no_disk)
    [line] = said()
    assert line.startswith(f"{LONG_PROMPT} tokens of a prompt were computed for the second time")
    assert "--kv-disk" in line


@pytest.mark.parametrize(
    ("again", "num_cached", "salt"),
    [
        (PROMPT, len(PROMPT) - 100, None),  # the cache had it
        (PROMPT, 2000, None),  # not enough was computed anew
        (PROMPT, 0, "another"),
        ([7, *PROMPT], 0, None),
        (PROMPT[:1000], 0, None),
    ],
)
def test_what_a_disk_would_not_have_saved_is_not_suggested(said, again, num_cached, salt):
    prompts = RepeatedPrompts()
    prompts.note(PROMPT, 0, None, no_disk)
    prompts.note(again, num_cached, salt, no_disk)
    assert not said()


def test_a_server_that_has_a_disk_is_told_nothing_and_memory_is_bounded(said):
    prompts = RepeatedPrompts()
    prompts.note(PROMPT, 0, None, lambda: True)
    prompts.note(PROMPT, 0, None, lambda: True)
    assert not said()
    assert prompts.num_parts == 0
    prompts = RepeatedPrompts()
    for number in range(1200):
        prompts.note([number, *PROMPT], 0, None, no_disk)
    assert prompts.num_parts <= 4096
    assert not said()
