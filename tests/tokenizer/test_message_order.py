"""Conversations of agents in the order that a template takes: nothing is lost, and what is past stays as it was."""

import itertools

import pytest

from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.message_order import MessageOrder, arrange_messages, move_tool_images
from tests.support.agent_templates import AGENT_TEMPLATES

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "abcde1234", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE_SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Hello?"}
MORE_USER = {"role": "user", "content": "Are you there?"}
LATE = {"role": "system", "content": "It is late."}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "It is there.", "tool_call_id": "abcde1234", "name": "look"}
ANSWER = {"role": "assistant", "content": "Yes."}
REMINDER = "<system-reminder>\nIt is late.\n</system-reminder>"


def order_of(name):
    return MessageOrder.of(AGENT_TEMPLATES[name], SPECIAL_TOKENS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", MessageOrder(system=True, late_system=True, adjacent_users=True, user_after_tool=True)),
        ("first_system_only", MessageOrder(system=True, late_system=False, adjacent_users=True, user_after_tool=True)),
        ("gathers_system", MessageOrder(system=True, late_system=False, adjacent_users=True, user_after_tool=True)),
        ("alternates", MessageOrder(system=True, late_system=False, adjacent_users=False, user_after_tool=False)),
        ("no_system", MessageOrder(system=False, late_system=False, adjacent_users=False, user_after_tool=True)),
        (
            "silent_about_system",
            MessageOrder(system=False, late_system=False, adjacent_users=True, user_after_tool=True),
        ),
    ],
)
def test_what_a_template_takes_is_found_out(name, expected):
    assert order_of(name) == expected


def test_a_template_that_writes_no_message_teaches_nothing():
    assert MessageOrder.of("{{ raise_exception('no') }}", {}) == MessageOrder(True, True, True, True)


@pytest.mark.parametrize("name", AGENT_TEMPLATES)
def test_every_order_of_messages_is_rendered_with_all_its_texts(name):
    order = order_of(name)
    turns = [[USER], [USER, LATE], [MORE_USER, USER], [SYSTEM, MORE_SYSTEM, USER], [LATE]]
    for first, second in itertools.product(turns, turns):
        for between in ([ANSWER], [CALLING, RESULT], [CALLING, RESULT, ANSWER]):
            messages = [*first, *between, *second]
            if messages[0]["role"] == "system" and len(first) == 1:
                continue  # an answer to nothing
            text = render_chat_template(AGENT_TEMPLATES[name], arrange_messages(messages, order), **SPECIAL_TOKENS)
            end = 0
            for message in messages:
                assert (end := text.find(message["content"], end)) >= 0, (message, text)


@pytest.mark.parametrize("name", AGENT_TEMPLATES)
def test_the_past_does_not_change(name):
    order = order_of(name)
    messages = [SYSTEM, MORE_SYSTEM, USER, LATE, ANSWER, MORE_USER, USER, CALLING, RESULT, USER, LATE, ANSWER, USER]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = arrange_messages(messages, order)
    for i in answers:
        part = arrange_messages(messages[:i], order)
        assert whole[: len(part)] == part


def test_the_head_is_one_message_and_later_ones_are_reminders():
    order = order_of("first_system_only")
    assert arrange_messages([SYSTEM, {"role": "developer", "content": "Be kind."}, USER, LATE], order) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        USER,
        {"role": "user", "content": REMINDER},
    ]
    wrapped = {"role": "system", "content": REMINDER}
    assert arrange_messages([USER, wrapped], order)[1] == {"role": "user", "content": REMINDER}


def test_messages_join_the_one_before_where_they_must():
    assert arrange_messages([SYSTEM, USER, MORE_USER, LATE, CALLING, RESULT, USER], order_of("alternates")) == [
        SYSTEM,
        {"role": "user", "content": f"Hello?\n\nAre you there?\n\n{REMINDER}"},
        CALLING,
        {**RESULT, "content": "It is there.\n\nHello?"},
    ]
    assert arrange_messages([SYSTEM, USER], order_of("no_system")) == [
        {"role": "user", "content": "Be brief.\n\nHello?"}
    ]


# Writes images in the messages that it is told of, and contents that are lists elsewhere as Python shows them.
SEES = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string or message.role not in ROLES %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text if part.text else '<image>' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
IMAGES = [{"type": "image", "image": f"data:{i}"} for i in range(2)]


def moved(roles, messages, **order):
    order = MessageOrder(**{**vars(order_of("chatml")), **order})
    return move_tool_images(messages, SEES.replace("ROLES", repr(roles)), SPECIAL_TOKENS, order)


def test_images_of_results_stand_where_the_template_writes_them():
    texts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "there."}]
    results = [{**RESULT, "content": [texts[0], image, texts[1]]} for image in IMAGES]
    messages = [USER, CALLING, *results, MORE_USER]
    assert moved(("user", "tool"), messages) == messages
    without = [{**RESULT, "content": "It is\nthere."}] * 2
    shown = {"role": "user", "content": IMAGES}
    assert moved(("user",), messages) == [USER, CALLING, *without, shown, MORE_USER]
    assert moved(("user",), messages[:-1]) == [USER, CALLING, *without, shown]
    assert moved(("user",), messages, user_after_tool=False) == [
        *(USER, CALLING, *without, {"role": "assistant", "content": "Show me the image."}, shown, MORE_USER)
    ]
