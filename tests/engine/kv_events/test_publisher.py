"""Readers of vLLM's KV events get them from an engine: live, and again where they missed some."""

import contextlib
from dataclasses import replace

import msgspec
import pytest
import zmq

from jaxis import LLM, SamplingParams
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.kv_events import KVEventsConfig
from jaxis.engine.kv_events.publisher import CacheEvents, EventPublisher
from jaxis.engine.kv_events.recorder import BlocksCleared, BlocksRemoved, BlocksStored
from jaxis.errors import ConfigError

TOPIC = b"kv@pod@model"
ONE = SamplingParams(max_tokens=1, temperature=0)
A, B, C = (bytes(24) + number.to_bytes(8, "big") for number in (1, 2, 2**64 - 1))


@contextlib.contextmanager
def reading(endpoint, replay_endpoint, topic=""):
    """A reader's sockets: SUB, and DEALER, which gets more than one answer to a request."""
    with zmq.Context() as context, context.socket(zmq.SUB) as events, context.socket(zmq.DEALER) as replays:
        events.connect(endpoint)
        events.subscribe(topic)
        replays.connect(replay_endpoint)
        yield events, replays
        context.destroy(linger=0)


def replay(socket, first, topic=TOPIC):
    """The batches from a number on that are still kept: (number, decoded)."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        assert socket.poll(10_000), "no answer"
        empty, found_topic, number, batch = socket.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert (found_topic, batch) == (b"", b"")
            return batches
        assert found_topic == topic
        batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)))


@pytest.fixture
def publisher(tmp_path):
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic=TOPIC.decode(),
        buffer_steps=3,
    )
    publisher = EventPublisher(config, (FULL_CONTEXT, AttentionSpan(1024)), block_size=2)
    yield publisher
    publisher.close()


def test_batches_have_the_form_that_vllm_publishes(publisher):
    publisher.publish([BlocksStored(0, (A, B), None, [5, 6, 7, 8], "tenant"), BlocksRemoved(1, [C])])
    publisher.publish([])  # nothing happened: no batch
    publisher.publish([BlocksStored(1, (C,), B, [9, 10], None), BlocksCleared()])
    with reading(publisher.endpoint, publisher.replay_endpoint) as (_, replays):
        (first, (time, events, rank)), (second, (_, later, _)) = replay(replays, 0)
    assert (first, second, rank) == (0, 1, 0)
    assert isinstance(time, float)
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["tenant"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert events == [
        stored,
        {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 1},
    ]
    assert later == [
        stored
        | {
            "extra_keys": [None],
            "block_hashes": [2**64 - 1],
            "parent_block_hash": 2,
            "token_ids": [9, 10],
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": 1024,
        },
        {"type": "AllBlocksCleared"},
    ]


def test_the_newest_batches_are_kept_and_a_request_that_is_none_is_survived(publisher):
    for _ in range(5):
        publisher.publish([BlocksCleared()])
    with reading(publisher.endpoint, publisher.replay_endpoint) as (_, replays):
        assert [number for number, _ in replay(replays, 0)] == [2, 3, 4]
        assert [number for number, _ in replay(replays, 4)] == [4]
        assert replay(replays, 5) == []
    with reading(publisher.endpoint, publisher.replay_endpoint) as (_, replays):
        replays.send_multipart([b"", b"what?"])
    with reading(publisher.endpoint, publisher.replay_endpoint) as (_, replays):
        assert len(replay(replays, 3)) == 2


def test_an_engine_publishes_step_by_step(tmp_path):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
        "topic": TOPIC.decode(),
    }
    tokens = list(range(100, 140))
    with (
        LLM(max_num_seqs=1, max_num_batched_tokens=64, kv_cache_memory="4MiB", kv_events_config=config) as llm,
        reading(config["endpoint"], config["replay_endpoint"]) as (live, replays),
    ):
        assert [batch[1] for _, batch in replay(replays, 0)] == [[{"type": "AllBlocksCleared"}]]
        number = 0
        while not live.poll(50):  # until the subscription has arrived
            llm.generate({"prompt_token_ids": [number, *tokens]}, ONE)
            number += 1
        llm.generate({"prompt_token_ids": tokens}, ONE)
        llm.generate({"prompt_token_ids": tokens}, ONE)  # finds what is there
        llm.engine.reset_prefix_cache()
        batches = replay(replays, 0)
        topic, newest, _ = max((live.recv_multipart() for _ in batches if live.poll(0)), key=lambda m: m[1])
    assert topic == TOPIC
    assert int.from_bytes(newest, "big") <= batches[-1][0]
    assert batches[-1][1][1] == [{"type": "AllBlocksCleared"}]
    [event] = batches[-2][1][1]
    assert (event["token_ids"], event["block_size"], event["parent_block_hash"]) == (tokens[:32], 16, None)
    assert len(set(event["block_hashes"])) == 2
    assert len(batches) == number + 3


def test_an_address_in_use_is_one_clear_error(publisher):
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:*", replay_endpoint="tcp://127.0.0.1:*")
    first = EventPublisher(config, (FULL_CONTEXT,), 16)
    try:
        again = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:*", replay_endpoint=first.replay_endpoint)
        with pytest.raises(
            ConfigError, match=r"kv_events_config: tcp://127.0.0.1:\d+ cannot be bound: Address already"
        ):
            EventPublisher(again, (FULL_CONTEXT,), 16)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("endpoint", "of_third"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("tcp://picker:5557", "tcp://picker:5559"),
        ("tcp://*:*", "tcp://*:*"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ipc:///run/events", "ipc:///run/events_dp2"),
        ("inproc://events", "inproc://events_dp2"),
    ],
)
def test_each_data_rank_has_the_address_that_vllm_gives_it(endpoint, of_third):
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=endpoint, topic="t")
    assert config.of_rank(0) == config
    assert config.of_rank(2) == replace(config, endpoint=of_third, replay_endpoint=of_third)
    assert replace(config, replay_endpoint=None).of_rank(2).replay_endpoint is None


def test_publishers_of_data_ranks_say_whose_events_they_are(tmp_path):
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        topic=TOPIC.decode(),
    )
    ranks = CacheEvents(config, (FULL_CONTEXT,), 16, 3)
    try:
        for rank, publisher in enumerate(ranks.publishers):
            publisher.publish([BlocksCleared()] * (rank + 1))
        for rank, suffix in enumerate(["", "_dp1", "_dp2"]):
            with reading(f"ipc://{tmp_path}/e{suffix}", f"ipc://{tmp_path}/r{suffix}") as (_, replays):
                [(number, (_, events, of_rank))] = replay(replays, 0)
            assert (number, len(events), of_rank) == (0, rank + 1, rank)
    finally:
        ranks.close()


def test_a_rank_whose_address_is_in_use_leaves_none_open(tmp_path):
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/e")
    tcp = replace(config, endpoint="tcp://127.0.0.1:*")
    other = EventPublisher(tcp, (FULL_CONTEXT,), 16)
    host, _, port = other.endpoint.rpartition(":")
    first = f"{host}:{int(port) - 1}"
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"{other.endpoint} cannot be bound: Address already"):
                CacheEvents(replace(config, replay_endpoint=first), (FULL_CONTEXT,), 16, 2)
    finally:
        other.close()


def test_events_need_a_prefix_cache():
    with pytest.raises(ConfigError, match="does not combine with enable_prefix_caching=False"):
        LLM(enable_prefix_caching=False, kv_events_config={"enable_kv_cache_events": True})
