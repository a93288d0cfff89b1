"""Blocks go from one engine's store to another's, or do not: nothing else arrives, and no request waits for long."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.engine.kv_connector import TierStats
from jaxis.engine.kv_store import peer_client, peers, promises
from jaxis.engine.kv_store.block_layout import BlockArray, StoredBlockLayout
from jaxis.engine.kv_store.peer_client import PeerClient
from jaxis.engine.kv_store.peer_protocol import (
    MAX_ASK_BYTES,
    MESSAGES,
    Ask,
    PeerChannel,
    PeerError,
    Ready,
    pack_known,
    pack_places,
    unpack_known,
    unpack_places,
)
from jaxis.engine.kv_store.peers import PeerServer
from jaxis.engine.kv_store.store import KVStore
from jaxis.errors import ConfigError
from jaxis.host.channel import to_frame
from jaxis.host.threads import Deadline
from tests.engine.tcp_between import between
from tests.support.certificates import make_certificates, tls_files
from tests.support.waiting import wait_until

SIZES = (1000, 300)
LAYOUT = StoredBlockLayout([[BlockArray((size,), 1)] for size in SIZES])
DIGESTS = [bytes([i]) * 32 for i in range(8)]
KEYS = [(group, digest) for digest in DIGESTS for group in range(2)]


def block(key):
    group, digest = key
    return np.random.default_rng([group, digest[0]]).integers(0, 256, SIZES[group], np.uint8)


def full_store(num_digests=8, **settings):
    store = KVStore(1 << 20, SIZES, **settings)
    for key in KEYS[: 2 * num_digests]:
        store.put(key, block(key), store.epoch)
    return store


@contextlib.contextmanager
def handing_out(store, namespace="a", tls=None, stats=None):
    server = PeerServer(store, namespace, LAYOUT, "127.0.0.1", 0, tls, stats or TierStats())
    try:
        yield server
    finally:
        server.close()


def fetch(port, namespace="a", tls=None, choose=None, seconds=5.0, client=None):
    """Blocks that arrive of all of them, and the counters of a client of its own."""
    arrived, stats = {}, TierStats()
    client = client or PeerClient(namespace, LAYOUT, tls, stats)

    def put(key, data):
        arrived[key] = data
        return True

    def everything(known):
        return [(group, index) for index in range(len(DIGESTS)) for group in range(2) if known[group, index]]

    client.fetch(("127.0.0.1", port), DIGESTS, choose or everything, put, Deadline(seconds))
    for key, data in arrived.items():
        np.testing.assert_array_equal(data, block(key))
    return list(arrived), stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("pem"))


def context(files, *, is_server):
    config = KVTransferConfig.of({"kv_role": "kv_both", "kv_connector_extra_config": files})
    return config.ssl_context(is_server=is_server)


@pytest.fixture(scope="module")
def tls(folder):
    """The contexts of a producer and a consumer."""
    return context(tls_files(folder, "one"), is_server=True), context(tls_files(folder, "two"), is_server=False)


class TestTransfer:
    @pytest.mark.parametrize("has_tls", [False, True])
    def test_all_blocks_arrive_as_they_are(self, has_tls, request):
        there, here = request.getfixturevalue("tls") if has_tls else (None, None)
        sent = TierStats()
        with handing_out(full_store(), tls=there, stats=sent) as server:
            arrived, stats = fetch(server.port, tls=here)
        assert arrived == KEYS
        assert (stats.loaded_blocks, stats.loaded_bytes, stats.failed_blocks) == (16, 8 * sum(SIZES), 0)
        assert (sent.saved_blocks, sent.failed_blocks) == (16, 0)

    def test_only_what_is_there_and_wanted_is_sent(self):
        with handing_out(full_store(5)) as server:
            arrived, stats = fetch(server.port, choose=lambda known: [(1, int(known[1].sum()) - 1), (0, 2)])
            assert arrived == [(1, DIGESTS[4]), (0, DIGESTS[2])]
            assert fetch(server.port, choose=lambda known: [])[0] == []
        assert stats.failed_blocks == 0

    def test_another_model_gets_nothing(self, caplog):
        with handing_out(full_store()) as server:
            arrived, stats = fetch(server.port, "b")
        assert (arrived, stats.failed_blocks) == ([], 1)
        assert "did not arrive, and are computed: 127.0.0.1:" in caplog.text

    def test_only_certificates_of_the_ca_get_blocks_or_may_hand_out_any(self, folder, tls, caplog):
        there, here = tls
        strange, sent = context(tls_files(folder, "other"), is_server=False), TierStats()
        with handing_out(full_store(), tls=there, stats=sent) as server:
            for consumer in (strange, None):
                arrived, stats = fetch(server.port, tls=consumer)
                assert (arrived, stats.failed_blocks) == ([], 1)
            assert sent.saved_blocks == 0
            assert fetch(server.port, tls=here)[0] == KEYS
        for producer in (context(tls_files(folder, "other"), is_server=True), None):
            with handing_out(full_store(), tls=producer) as server:
                arrived, stats = fetch(server.port, tls=here)
                assert (arrived, stats.failed_blocks) == ([], 1)
        assert "certificate verify failed" in caplog.text

    def test_without_certificates_no_other_machine_is_asked(self):
        stats = TierStats()
        client = PeerClient("a", LAYOUT, None, stats)
        client.fetch(("192.0.2.1", 80), DIGESTS, lambda known: [], lambda key, data: True, Deadline(5))
        assert stats.failed_blocks == 1
        assert not client._avoided, "it was tried"

    def test_who_ends_or_never_answers_is_left_alone_for_a_while(self, monkeypatch):
        monkeypatch.setattr(peer_client, "CONNECT_SECONDS", 0.1)
        stats = TierStats()
        client = PeerClient("a", LAYOUT, None, stats)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            for _ in range(10):
                started = time.monotonic()
                assert fetch(silent.getsockname()[1], client=client)[0] == []
            assert time.monotonic() - started < 0.05
        assert stats.failed_blocks == 10


class TestPromises:
    def test_promised_blocks_stay_while_others_make_room(self):
        store = KVStore(4 * SIZES[0], SIZES, lease_seconds=60)
        for key in [(0, digest) for digest in DIGESTS[:2]]:
            store.put(key, block(key), 0)
        assert store.promise([(0, DIGESTS[0])])
        for digest in DIGESTS[1:]:
            store.put((0, digest), block((0, digest)), 0)
        assert store.has(0, DIGESTS[0])
        assert not store.has(0, DIGESTS[1])
        assert store.stats["host"].used_bytes <= 4 * SIZES[0]

    def test_memory_is_bounded_whatever_is_promised(self):
        store = KVStore(4 * SIZES[0], SIZES, lease_seconds=60)
        keys = [(0, digest) for digest in DIGESTS]
        assert store.promise(keys)
        for key in keys:
            store.put(key, block(key), 0)
        assert [store.has(*key) for key in keys] == [True] * 4 + [False] * 4
        assert store.stats["host"].failed_blocks == 4
        assert not store.promise([(1, bytes([i]) * 32) for i in range(100)]), "more leases than blocks"

    def test_a_lease_ends_unless_it_is_read_from(self, monkeypatch):
        now = 0.0
        monkeypatch.setattr(promises, "time", types.SimpleNamespace(monotonic=lambda: now))
        store = KVStore(2 * SIZES[0], SIZES, lease_seconds=20)
        keys = [(0, digest) for digest in DIGESTS]
        store.promise(keys[:2])
        for key in keys[:2]:
            store.put(key, block(key), 0)
        for _ in range(3):
            now += 10
            assert store.read_promised(keys[0]) is not None
            store.put(keys[2], block(keys[2]), 0)
        assert store.has(*keys[0])
        assert not store.has(*keys[1])
        now += 30
        for key in keys[3:5]:
            store.put(key, block(key), 0)
        assert not store.has(*keys[0])

    def test_promised_blocks_on_their_way_are_waited_for_and_lost_ones_are_not(self, monkeypatch):
        store = full_store(7)
        assert store.promise(KEYS)
        assert store.is_awaited
        wait_for = store.wait_for

        def wait_and_put(key, seconds):
            if key == KEYS[14]:  # while another engine waits for it
                for late in KEYS[14:]:
                    store.put(late, block(late), store.epoch)
            return wait_for(key, seconds)

        with handing_out(store) as server:
            with monkeypatch.context() as patched:
                patched.setattr(store, "wait_for", wait_and_put)
                assert fetch(server.port)[0] == KEYS
            assert not store.is_awaited
            store.remove([DIGESTS[7]])
            store.promise(KEYS)
            store.forget_promises()
            started = time.monotonic()
            assert fetch(server.port)[0] == KEYS[:14]
            assert time.monotonic() - started < peers.TRANSFER_SECONDS / 2

    def test_admission_ends_the_lease_of_a_fetched_block(self):
        store = KVStore(SIZES[0], SIZES)
        assert store.put_fetched((0, DIGESTS[0]), block((0, DIGESTS[0])), store.epoch)
        assert not store.put_fetched((0, DIGESTS[1]), block((0, DIGESTS[1])), store.epoch), "no room"
        store.note_admitted([(0, DIGESTS[0])], 0)
        assert store.put_fetched((0, DIGESTS[1]), block((0, DIGESTS[1])), store.epoch)
        store.clear()
        assert not store.put_fetched((0, DIGESTS[0]), block((0, DIGESTS[0])), store.epoch - 1), "of before the reset"

    def test_a_reset_ends_leases(self):
        store = KVStore(4 * SIZES[0], SIZES)
        old, new = ([(0, bytes([i + start]) * 32) for i in range(4 * SIZES[0] // SIZES[1])] for start in (0, 100))
        assert store.promise(old)
        assert not store.promise(new), "there is no room beside the first"
        store.clear()
        assert store.promise(new)


class TestDamage:
    def test_every_flipped_bit_and_every_cut_is_noticed(self, tls):
        there, here = tls
        total = 8 * sum(SIZES) + 1000  # and the handshake
        rng = random.Random(0)
        # The handshake, and the rest here and there.
        flips = [*range(0, 600, 40), *(rng.randrange(total) for _ in range(20))]
        stats = TierStats()
        client = PeerClient("a", LAYOUT, here, stats)
        spoiled = 0
        with handing_out(full_store(), tls=there) as server:
            for place in flips:
                bit = 1 << rng.randrange(8)

                def flip(data, position, place=place, bit=bit):
                    if position <= place < position + len(data):
                        data = bytearray(data)
                        data[place - position] ^= bit
                    return bytes(data)

                def cut(data, position, place=place):
                    return data[: max(0, place - position)] or None

                for change in (flip, cut):
                    client._avoided.clear()
                    with between(server.port, change) as port:
                        arrived, _ = fetch(port, client=client, seconds=0.2)  # checks what arrives
                        spoiled += len(arrived) < len(KEYS)
        assert spoiled > len(flips)
        assert stats.failed_blocks >= spoiled


def talk(port, data):
    """What a server says to some bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                said += more
        return said


def framed(data):
    return len(data).to_bytes(8, "little") + data


@pytest.fixture(scope="module")
def server():
    with handing_out(full_store()) as server:
        yield server


@pytest.fixture(scope="module")
def tls_server(tls):
    with handing_out(full_store(), tls=tls[0]) as server:
        yield server


class TestStrangers:
    @settings(max_examples=60, deadline=None)
    @given(data=st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(framed)))
    def test_garbage_closes_the_connection_and_gets_nothing(self, server, data):
        assert talk(server.port, data) in (b"", to_frame(Ready("a")))

    @settings(max_examples=20, deadline=None)
    @given(data=st.one_of(st.binary(max_size=300), st.builds(to_frame, st.builds(Ask, st.binary(), st.just("")))))
    def test_without_tls_nothing_is_said_where_there_should_be(self, tls_server, data):
        assert b"ready" not in talk(tls_server.port, data)

    def test_so_does_a_message_that_claims_to_be_large(self, server):
        assert len(talk(server.port, (MAX_ASK_BYTES + 1).to_bytes(8, "little") + bytes(1000))) < 100
        assert fetch(server.port)[0] == KEYS, "others are served"

    @pytest.mark.parametrize("has_tls", [False, True])
    def test_those_that_say_nothing_do_not_keep_others_out_for_long(self, monkeypatch, has_tls, request):
        monkeypatch.setattr(peers, "ASK_SECONDS", 0.2)
        there, here = request.getfixturevalue("tls") if has_tls else (None, None)
        stats = TierStats()
        with handing_out(full_store(), tls=there, stats=stats) as server, contextlib.ExitStack() as silent:
            for _ in range(peers.MAX_CONVERSATIONS + 4):
                silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            # Nobody gets a place before some of them have lost theirs.
            wait_until(lambda: stats.failed_blocks >= 4, seconds=20)
            assert fetch(server.port, tls=here)[0] == KEYS

    def test_a_port_that_is_taken_is_one_clear_line(self, server):
        message = f"kv_ip='127.0.0.1' with kv_port={server.port} cannot be listened on"
        with pytest.raises(ConfigError, match=message) as error:
            PeerServer(full_store(), "a", LAYOUT, "127.0.0.1", server.port, None, TierStats())
        assert "\n" not in str(error.value)


class TestMessages:
    @given(st.integers(1, 3), st.integers(0, 70), st.integers())
    def test_what_is_known_and_wanted_round_trips(self, num_groups, num_digests, seed):
        known = np.random.default_rng(abs(seed)).random((num_groups, num_digests)) < 0.5
        np.testing.assert_array_equal(unpack_known(pack_known(known), num_groups, num_digests), known)
        places = [(int(group), int(index)) for group, index in np.argwhere(known)]
        assert unpack_places(pack_places(places), num_groups, num_digests) == places

    @given(st.binary(max_size=100))
    def test_bytes_that_are_none_of_these_are_a_value_error(self, data):
        for read in (
            MESSAGES.decode,
            lambda data: unpack_known(data, 2, 500),
            lambda data: unpack_places(data + b"\xff", 2, 8),
            lambda data: unpack_places(np.array([[2, 0]], "<i4").tobytes(), 2, 8),
            lambda data: unpack_places(pack_places([(0, 1), (0, 1)]), 2, 8),
        ):
            with pytest.raises(ValueError):  # noqa: PT011 (msgspec's own)
                read(data)

    def test_a_sender_that_trickles_does_not_outlast_the_deadline(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        started, ended = time.monotonic(), threading.Event()

        def trickle():
            while not ended.wait(0.01):
                far.sendall(b"\x01")

        sender = threading.Thread(target=trickle)
        with near, far:
            sender.start()
            with pytest.raises(PeerError):
                PeerChannel(near, 1 << 62, Deadline(0.3)).receive(Ready)
            ended.set()
            sender.join()
        assert time.monotonic() - started < 2
