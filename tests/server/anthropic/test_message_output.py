"""Blocks of a message: whatever order a parser's events come in, they never overlap and lose nothing."""

import json

from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.parsing.parser_events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from jaxis.server.anthropic.message_answer import MessageBlocks, fold

TEXTS = st.text(alphabet="ab \n", min_size=1, max_size=4)
STATUSES = st.sampled_from(["complete", "unfinished", "malformed"])
START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 0, "cache_read_input_tokens": 0},
    },
}
END = {
    "type": "message_delta",
    "delta": {"stop_reason": "end_turn", "stop_sequence": None},
    "usage": {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 3},
}


@st.composite
def interleavings(draw):
    """Events of texts and of calls, whose events keep their order but may stand between those of others."""
    tracks = draw(st.lists(st.builds(lambda text: [ContentDelta(text)], TEXTS), max_size=5))
    tracks += draw(st.lists(st.builds(lambda text: [ReasoningDelta(text)], TEXTS), max_size=4))
    for index in range(draw(st.integers(0, 4))):
        arguments = json.dumps({"a": draw(st.text(max_size=5)), "b": [index]})
        status = draw(STATUSES)
        if status != "complete":
            arguments = arguments[: draw(st.integers(0, len(arguments) - 1))]
        cut = draw(st.integers(0, len(arguments)))
        parts = [part for part in (arguments[:cut], arguments[cut:]) if part]
        tracks.append(
            [
                ToolCallStart(index, f"call_{index:024x}", f"f{index}"),
                *(ToolCallArgumentsDelta(index, part) for part in parts),
                ToolCallEnd(index, status),
            ]
        )
    order = draw(st.permutations([i for i, track in enumerate(tracks) for _ in track]))
    waiting = [list(track) for track in tracks]
    return [waiting[i].pop(0) for i in order]


def check_blocks(told):
    """The events' blocks are numbered without gaps, and each is closed before the next is opened."""
    opened, num_blocks = None, 0
    for event in told:
        if event["type"] == "content_block_start":
            assert (opened, event["index"]) == (None, num_blocks)
            opened, num_blocks = event["index"], num_blocks + 1
        else:
            assert event["index"] == opened
            opened = None if event["type"] == "content_block_stop" else opened
    assert opened is None
    assert num_blocks


@settings(max_examples=120, deadline=None)
@given(interleavings(), st.integers(1, 5))
def test_blocks_never_overlap_and_lose_nothing(events, step):
    output = MessageBlocks()
    told = []
    for i in range(0, len(events), step):
        told += output.add(events[i : i + step])
    told += output.finish()
    check_blocks(told)
    message = fold([START, *told, END, {"type": "message_stop"}])

    snapshot, buffers = None, {}
    for event in [START, *told, END]:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    folded = snapshot.model_dump(include={"content", "stop_reason"}, exclude_unset=True)
    assert [{name: value for name, value in block.items() if value is not None} for block in folded["content"]] == [
        block.model_dump() for block in message.content
    ]

    texts = "".join(event.text for event in events if isinstance(event, ContentDelta))
    shown = "".join(block.text for block in message.content if block.type == "text")
    assert shown.split() == texts.split() or "".join(shown.split()) == "".join(texts.split())
    thoughts = [event.text for event in events if isinstance(event, ReasoningDelta)]
    assert "".join(block.thinking for block in message.content if block.type == "thinking") == "".join(thoughts)
    starts = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    ended = [event for event in events if isinstance(event, ToolCallEnd) and event.status != "malformed"]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.name for call in calls] == [starts[event.index] for event in ended]
    for call, event in zip(calls, ended, strict=True):
        if event.status == "complete":
            assert call.input["b"] == [event.index]
    assert output.num_calls == len(calls)
    assert output.is_cut == any(event.status == "unfinished" for event in ended)


def test_text_begins_without_the_lines_after_reasoning():
    output = MessageBlocks()
    told = output.add([ReasoningDelta("hm"), ContentDelta("\n\n"), ContentDelta("  Yes.\n"), ContentDelta("\nNo.")])
    content = fold([START, *told, *output.finish(), END]).content
    assert [block.model_dump(exclude={"signature"}) for block in content] == [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "  Yes.\n\nNo."},
    ]
