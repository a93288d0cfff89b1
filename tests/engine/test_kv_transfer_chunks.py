"""Prompts that another engine decodes while they are still computed: chunk by chunk, to the end or not."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading

import numpy as np
import pytest

from jaxis.engine.client.engine_thread import EngineThread
from jaxis.engine.client.generation_core import GenerationCore
from jaxis.engine.client.wire import AbortRequest, AddRequest
from jaxis.engine.kv_store.block_layout import BlockArray, StoredBlockLayout
from jaxis.engine.kv_store.promises import ExpectedBlocks
from jaxis.prompts import TokenizedPrompt
from tests.engine.tcp_between import between
from tests.engine.test_kv_transfer import (
    BLOCK_BYTES,
    alone,
    decode,
    engines,
    num_leases,
    prefill,
    prompt,
    same_bits,
    with_params,
)
from tests.support.quick_rows import quick_rows
from tests.support.waiting import wait_until

CHUNK, BLOCK = 64, 16
LONG = prompt(5, 400)
NUM_BLOCKS = (len(LONG) - 1) // BLOCK
PRODUCER = {"kv_role": "kv_producer", "kv_port": 0}
KEEP = {"do_remote_decode": True, "transfer_id": "xfer-1"}


@pytest.fixture(scope="module")
def both(start_llm):
    with engines(start_llm, "kv_producer", "kv_consumer") as both:
        yield both


@pytest.fixture
def pair(both):
    """Two engines that have computed nothing."""
    for llm in both:
        llm.engine.reset_prefix_cache()
        llm.engine.connector.store._expected = ExpectedBlocks()
        stats = llm.engine.connector.peers._stats
        for field in dataclasses.fields(stats):
            setattr(stats, field.name, 0)
    return both


def blocks_of(llm, tokens):
    """The keys of a prompt's blocks, and how many of them are in the engine's store."""
    request = llm.engine.factory.make(
        "x",
        tokens,
        with_params(None),
        prompt=None,
        priority=0,
        client=None,
        cache_salt=None,
        grammar=None,
    )
    blocks = llm.engine.scheduler.block_manager
    digests = blocks.prompt_digests(request.completions[0].sequence)
    keys = [(group, digests[index]) for group, index in blocks.search.blocks_of(len(digests))]
    return keys, sum(llm.engine.connector.store.has(*key) for key in keys)


def address(producer):
    return {"remote_host": "127.0.0.1", "remote_port": producer.engine.connector.peers._server.port}


def ask_early(producer, **more):
    """What a proxy sends to the decoding engine at the same time as `KEEP` to the other one."""
    return {"do_remote_prefill": True, "transfer_id": "xfer-1", **address(producer), **more}


@contextlib.contextmanager
def decoding(consumer, params):
    """The consumer's answer to LONG, in a list, once this has ended; it is asked for at once."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(decode(consumer, LONG, params)))
    thread.start()
    yield answers
    thread.join(60)
    assert answers, "it still waits"


def check_nothing_is_left(*llms):
    """No block is held, kept, or waited for, some seconds later at the latest."""
    for llm in llms:
        store, blocks = llm.engine.connector.store, llm.engine.scheduler.block_manager
        wait_until(lambda llm=llm: num_leases(llm) == 0, seconds=20)
        assert not store._expected._counts
        assert not store.is_awaited
        assert blocks.num_free_blocks == blocks.num_blocks
        assert not store._host._pinned


def add(producer, request_id="a", params=KEEP, tokens=LONG):
    producer.engine.add_request(request_id, tokens, with_params(params, max_tokens=1))


@same_bits
class TestChunks:
    def test_blocks_of_early_chunks_are_found_before_the_prompt_ends(self, pair):
        producer, _ = pair
        add(producer)
        found = []
        while producer.engine.has_unfinished:
            requests = producer.engine.step()
            keys, num_found = blocks_of(producer, LONG)
            found.append(num_found)
        assert len(keys) == NUM_BLOCKS
        # Each step that was read has left its blocks there; the last of them ends in the midst of one.
        assert found == [CHUNK // BLOCK * (step + 1) for step in range(len(LONG) // CHUNK)] + [NUM_BLOCKS]
        [request] = requests
        assert request.kv_transfer_params is not None
        assert not producer.engine.connector.store.is_awaited, "blocks were left for later"

    def test_they_arrive_while_the_rest_is_computed(self, pair, llm):
        producer, consumer = pair
        expected, arrived = alone(llm, LONG), []
        with decoding(consumer, ask_early(producer)) as answers:
            add(producer)
            while producer.engine.has_unfinished:
                producer.engine.step()
                _, num_found = blocks_of(producer, LONG)
                wait_until(lambda n=num_found: consumer.engine.connector.stats["peer"].loaded_blocks == n, seconds=20)
                arrived.append(consumer.engine.connector.stats["peer"].loaded_blocks)
        assert sorted(set(arrived)) == [CHUNK // BLOCK * (chunk + 1) for chunk in range(len(LONG) // CHUNK)]
        assert answers == [(expected, NUM_BLOCKS * BLOCK)]
        assert consumer.engine.connector.stats["peer"].loaded_bytes == NUM_BLOCKS * BLOCK_BYTES
        check_nothing_is_left(producer, consumer)

    def test_two_prompts_with_one_beginning_and_a_preempted_one(self, start_llm, llm):
        sizes = {"max_num_seqs": 2, "kv_cache_memory": 40 * BLOCK_BYTES, "max_model_len": 512}
        other = LONG[:300] + prompt(6, 50)
        with engines(start_llm, "kv_producer", "kv_consumer", **sizes) as (producer, consumer):
            given = prefill(producer, LONG, other, prompt(7, 450))
            for tokens, params in zip((LONG, other), given, strict=False):
                assert decode(consumer, tokens, params) == (alone(llm, tokens), (len(tokens) - 1) // BLOCK * BLOCK)
            assert decode(consumer, prompt(7, 450), given[2])[1] == 448
            check_nothing_is_left(producer, consumer)

    @pytest.mark.parametrize("drafts", quick_rows([False, True], [True]))
    def test_early_copies_are_of_the_last_contents(self, start_llm, checkpoint, drafts):
        """Those of layers that draft included, which see a chunk after the model."""
        config = {"method": "draft_model", "model": str(checkpoint())} if drafts else None
        with start_llm(kv_transfer_config=PRODUCER, speculative_config=config) as producer:
            add(producer)
            while producer.engine.has_unfinished:
                producer.engine.step()
            assert bool(producer.engine.runner.executor.stages[-1].context.num_draft_caches) == drafts
            keys, _ = blocks_of(producer, LONG)
            store, blocks = producer.engine.connector.store, producer.engine.scheduler.block_manager
            early = [store.find(*key) for key in keys]
            store.clear()
            for key in keys:
                blocks.connector.save(*key, blocks.block_of(*key))
            store.promise(keys)
            producer.engine.connector.idle()
            # What drafts has not seen the last chunk: nothing follows it here.
            for key, copy in list(zip(keys, early, strict=True))[: (len(LONG) - 1) // CHUNK * CHUNK // BLOCK]:
                np.testing.assert_array_equal(store.find(*key), copy)

    def test_blocks_of_a_prompt_that_is_computed_stay_when_memory_is_full(self, start_llm):
        config = PRODUCER | {"kv_buffer_size": (NUM_BLOCKS + 2) * BLOCK_BYTES}
        with start_llm(kv_transfer_config=config, max_num_seqs=2) as producer:
            add(producer)
            producer.engine.step()
            add(producer, "b", {"do_remote_decode": True}, prompt(9, 200))
            done = {}
            while producer.engine.has_unfinished:
                done |= {request.request_id: request for request in producer.engine.step()}
            assert blocks_of(producer, LONG)[1] == NUM_BLOCKS
            assert blocks_of(producer, prompt(9, 200))[1] == 2
            assert done["a"].kv_transfer_params is not None


@same_bits
class TestFaults:
    def test_a_prefill_that_never_comes_is_not_waited_for_long(self, pair, llm, monkeypatch):
        monkeypatch.setattr("jaxis.engine.kv_store.peers.TRANSFER_SECONDS", 0.2)
        producer, consumer = pair
        assert decode(consumer, LONG, ask_early(producer)) == (alone(llm, LONG), 0)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        assert decode(consumer, prompt(8), ask_early(producer, remote_port=port)) == (alone(llm, prompt(8)), 0)
        check_nothing_is_left(producer, consumer)

    def test_a_prefill_that_is_aborted_midway_leaves_a_beginning_that_is_used(self, pair, llm):
        producer, consumer = pair
        expected = alone(llm, LONG)
        with decoding(consumer, ask_early(producer)) as answers:
            add(producer)
            for _ in range(3):
                producer.engine.step()
            wait_until(lambda: consumer.engine.connector.stats["peer"].loaded_blocks == 12, seconds=20)
            producer.engine.abort_request("a")
        assert answers == [(expected, 12 * BLOCK)]
        assert consumer.engine.connector.stats["peer"].failed_blocks == NUM_BLOCKS - 12
        check_nothing_is_left(producer, consumer)

    def test_a_prefill_whose_engine_fails_is_computed(self, pair, llm):
        producer, consumer = pair
        expected = alone(llm, LONG)
        with decoding(consumer, ask_early(producer)) as answers:
            add(producer)
            producer.engine.step()
            producer.engine.reset("a fault")
        [(answer, _)] = answers
        assert answer == expected
        check_nothing_is_left(producer, consumer)

    @pytest.mark.parametrize("after_blocks", [0, 5])
    def test_a_server_killed_during_the_transfer_is_noticed_at_once(self, pair, llm, after_blocks):
        producer, consumer = pair
        [params] = prefill(producer, LONG)
        expected = alone(llm, LONG)
        most = after_blocks * BLOCK_BYTES + 1000

        def cut(data, position):
            return data[: max(0, most - position)] or None

        with between(params["remote_port"], cut) as port:
            answer, found = decode(consumer, LONG, {**params, "remote_port": port})
        assert answer == expected
        assert found == max(0, after_blocks) * BLOCK
        check_nothing_is_left(consumer, producer)

    def test_a_lease_that_is_over_keeps_nothing(self, start_llm):
        config = PRODUCER | {"kv_connector_extra_config": {"lease_seconds": 0.1}}
        with start_llm(kv_transfer_config=config) as producer:
            assert prefill(producer, LONG)[0] is not None
            check_nothing_is_left(producer)

    @pytest.mark.parametrize("is_computed", [True, False])
    def test_a_request_that_is_aborted_while_it_fetches_leaves_nothing(self, pair, is_computed):
        producer, consumer = pair
        add(producer)
        for _ in range(2):
            producer.engine.step()
        ended, outputs = threading.Event(), []

        def deliver(new):
            outputs.extend(new.outputs)
            if any(output.finished for output in new.outputs):
                ended.set()

        thread = EngineThread(GenerationCore(consumer._generator), deliver, lambda error: pytest.fail(str(error)))
        thread.start()
        params = with_params(ask_early(producer))
        thread.take(AddRequest("b", TokenizedPrompt(None, LONG), params, final_only=True))
        wait_until(lambda: consumer.engine.connector.stats["peer"].loaded_blocks == 8, seconds=20)
        thread.take(AbortRequest("b"))
        assert ended.wait(5), "it waited for the other engine"
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert thread.stop(10)
        if is_computed:
            while producer.engine.has_unfinished:
                producer.engine.step()
        else:
            producer.engine.abort_request("a")
        check_nothing_is_left(producer, consumer)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_blocks_with_repeated_heads_have_each_head_once_on_their_way(copies):
    once = np.arange(3 * 2 * 5, dtype=np.int16).reshape(3, 2, 5)
    repeated, other = np.repeat(once, copies, axis=1), np.arange(7, dtype=np.float32)
    here = np.concatenate([repeated.ravel().view(np.uint8), other.view(np.uint8)])
    shared = np.concatenate([once.ravel().view(np.uint8), other.view(np.uint8)])
    arrays = [BlockArray(repeated.shape, 2, head_axis=1, num_heads=2 * copies, copies=copies), BlockArray((7,), 4)]
    layout = StoredBlockLayout([arrays])
    assert layout.shared_bytes == (len(shared),)
    np.testing.assert_array_equal(layout.to_shared(0, here), shared)
    np.testing.assert_array_equal(layout.from_shared(0, shared), here)
