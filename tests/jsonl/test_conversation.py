"""Conversations read from JSON and written back."""

import json
from pathlib import Path

import pytest

from jaxis.errors import RequestError
from jaxis.inference import ContentItem, Conversation, Message, Role, Type

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_a_conversation_survives_reading_and_writing():
    value = {
        "conversation_id": "x",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "content": "1 + 1?"}], "id": "m1"},
            {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "sum"},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ],
        "metadata": {"source": ["a", 1]},
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    conversation = Conversation.from_dict(value)
    assert json.loads(json.dumps(conversation.to_dict())) == value
    assert next(m.content for m in reversed(conversation.messages) if m.role == Role.USER) == [
        ContentItem(Type.TEXT, "1 + 1?")
    ]


def test_items_of_images_are_read_and_written_as_oumi_has_them():
    items = [
        {"type": "image_path", "content": "file:///a/b.png"},
        {"type": "image_url", "content": "data:image/png;base64,aGk="},
        {"type": "image_binary", "binary": "aGk="},
        {"type": "image_path", "content": "c.png", "binary": "aGk="},
        {"type": "text", "content": "What?"},
    ]
    message = Message.from_dict({"role": "user", "content": [*items[:-1], {**items[-1], "binary": ""}]})
    assert message.to_dict() == {"role": "user", "content": items}
    images = [Path("/a/b.png"), "data:image/png;base64,aGk=", b"hi", b"hi"]
    parts = [{"type": "image", "image": image} for image in images]
    assert message.for_template()["content"] == [*parts, {"type": "text", "text": "What?"}]


def test_templates_get_text():
    message = Message.from_dict(
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "content": "b"}], "id": "m"}
    )
    assert message.for_template() == {"role": "assistant", "content": "a\nb"}
    assert Message(Role.ASSISTANT, tool_calls=[CALL]).for_template() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([], "list"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, r"messages\[0\].*role='robot'"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 7}]}, "int"),
        ({"messages": [{"role": "user", "content": "hi", "extra": 1}]}, "'extra'"),
        ({"messages": [{"role": "user", "content": [{"type": "sound", "content": "x"}]}]}, "type 'sound'; known: text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_path"}]}]}, "no content: image_path needs it"),
        ({"messages": [{"role": "user", "content": [{"type": "image_binary", "binary": "!"}]}]}, "not valid base64"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "add"}]}]}, "tool_calls"),
        ({"messages": [], "temperature": 0.2}, "'temperature'.*metadata"),
        ({"messages": [], "tools": ["add"]}, "tools"),
        ({"messages": [], "conversation_id": 7}, "conversation_id=7"),
    ],
)
def test_what_cannot_be_read_is_named(value, named):
    with pytest.raises(RequestError, match=named):
        Conversation.from_dict(value)
