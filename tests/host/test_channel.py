"""Messages arrive whole and in order, however the bytes come, and a sender of anything else is cut off."""

import socket
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxis.host.channel import Channel, ChannelClosedError, FrameTooLargeError, MessageReader, to_frame


class Note(msgspec.Struct, tag=True):
    data: bytes


NOTES = msgspec.msgpack.Decoder(Note)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    with near, far:
        yield Channel(near, NOTES, 100), far


@given(st.lists(st.binary(max_size=20)), st.integers(1, 9))
def test_messages_arrive_in_any_pieces(parts, size):
    stream, reader = b"".join(to_frame(Note(part)) for part in parts), MessageReader(NOTES, 60)
    pieces = (stream[i : i + size] for i in range(0, len(stream), size))
    assert [note.data for piece in pieces for note in reader.feed(piece)] == parts


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    frame = to_frame(Note(b"x" * 60))
    length = len(frame) - 8
    with pytest.raises(FrameTooLargeError, match=f"a message of {length} bytes; at most 20 are taken"):
        list(MessageReader(NOTES, 20).feed(frame[:8]))


def test_a_wait_ends_in_time_and_keeps_what_has_come(pair):
    channel, far = pair
    frame = to_frame(Note(b"late"))
    far.sendall(frame[:5])
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    far.sendall(frame[5:])
    assert channel.receive(20).data == b"late"


def test_a_sender_that_trickles_does_not_outlast_the_timeout(pair):
    channel, far = pair
    ended = threading.Event()

    def trickle():
        far.sendall((100).to_bytes(8, "little"))
        while not ended.wait(0.01):
            far.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(0.2)
    assert time.monotonic() - started < 2
    ended.set()
    sender.join()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (to_frame(Note(b"x" * 200)), "at most 100 are taken"),
        ((3).to_bytes(8, "little") + b"abc", "a message of another protocol"),
        (b"", "the connection was closed"),
    ],
)
def test_anything_else_ends_the_channel(pair, sent, message):
    channel, far = pair
    far.sendall(sent)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosedError, match=message):
        channel.receive(20)
