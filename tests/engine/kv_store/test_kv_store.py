"""Tiers of blocks: what goes in comes out or is a miss, whatever happens to the disk; none grows past its size."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxis.engine.kv_store import disk_tier
from jaxis.engine.kv_store.disk_tier import OVERHEAD_BYTES, DiskTier
from jaxis.engine.kv_store.host_tier import HostTier
from jaxis.engine.kv_store.store import KVStore
from jaxis.errors import ConfigError
from jaxis.host.threads import Deadline
from tests.support.waiting import wait_until

SIZE = 1000
FILE_SIZE = SIZE + OVERHEAD_BYTES


def key(number: int, group: int = 0) -> tuple[int, bytes]:
    return group, hashlib.sha256(bytes([number])).digest()


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def written(folder: Path, numbers: range, max_bytes: int = 1 << 20, namespace: str = "a") -> DiskTier:
    """A tier to which these blocks were written, one after the other."""
    tier = DiskTier(folder, namespace, max_bytes)
    for number in numbers:
        tier.write(key(number), block(number))
    tier.close()
    return tier


def path_of(folder: Path, number: int, group: int = 0, namespace: str = "a") -> Path:
    """The file of a block, whose name all processes that share the folder agree on."""
    return folder / namespace / f"{group}-{key(number)[1].hex()}.kv"


def write(tier: DiskTier, number: int) -> None:
    """Writes a block that is not there, and waits until it is."""
    num_saved = tier.stats.saved_blocks
    tier.write(key(number), block(number))
    wait_until(lambda: tier.stats.saved_blocks > num_saved)


class TestHostTier:
    def test_holds_no_more_bytes_than_it_may_and_evicts_what_was_used_least_recently(self) -> None:
        tier, order, rng = HostTier(10 * SIZE + 7), [], random.Random(0)
        for _ in range(500):
            number = rng.randrange(30)
            if rng.random() < 0.5:
                tier.put(key(number), block(number))
                order = [*[other for other in order if other != number][-9:], number]
            elif number in order:
                tier.touch([key(number)])
                order = [*[other for other in order if other != number], number]
            assert tier.num_bytes == len(tier) * SIZE <= tier.max_bytes
            assert [number for number in range(30) if key(number) in tier] == sorted(order)

    def test_a_block_larger_than_the_tier_is_dropped(self) -> None:
        tier = HostTier(SIZE - 1)
        tier.put(key(0), block(0))
        assert len(tier) == tier.num_bytes == 0


class TestDiskTier:
    def test_blocks_survive_a_restart_and_only_their_owner_can_read_them(self, tmp_path: Path) -> None:
        written(tmp_path / "blocks", range(5))
        again = DiskTier(tmp_path / "blocks", "a", 1 << 20)
        for number in range(5):
            np.testing.assert_array_equal(again.read(key(number), SIZE), block(number))
        assert again.read(key(5), SIZE) is None
        assert again.stats.loaded_blocks == 5
        assert again.stats.missed_blocks == 1
        assert again.stats.used_bytes == 5 * FILE_SIZE
        assert stat.S_IMODE((tmp_path / "blocks" / "a").stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "blocks" / "a").iterdir()} == {0o600}

    def test_other_namespaces_groups_and_digests_find_nothing(self, tmp_path: Path) -> None:
        tier = written(tmp_path, range(1))
        assert DiskTier(tmp_path, "b", 1 << 20).read(key(0), SIZE) is None
        assert tier.read(key(0, group=1), SIZE) is None
        # A file under another block's name is not that block.
        [file] = (tmp_path / "a").iterdir()
        for number, group in ((1, 0), (0, 1)):
            path_of(tmp_path, number, group).write_bytes(file.read_bytes())
            assert tier.read(key(number, group), SIZE) is None
        assert tier.stats.failed_blocks == 2

    def test_a_changed_cut_or_longer_file_is_a_miss_and_is_removed(self, tmp_path: Path) -> None:
        written(tmp_path, range(1))
        whole = path_of(tmp_path, 0).read_bytes()
        tier = DiskTier(tmp_path, "a", 1 << 20)
        damaged = [whole[:length] for length in (0, 1, 51, 52, FILE_SIZE // 2, FILE_SIZE - 1)] + [whole + b"\0"]
        for position in [*range(52), 500, FILE_SIZE - 33, FILE_SIZE - 1]:
            data = bytearray(whole)
            data[position] ^= 1
            damaged.append(bytes(data))
        for data in damaged:
            path_of(tmp_path, 0).write_bytes(data)
            assert tier.read(key(0), SIZE) is None
            assert not tier.has(key(0))
        assert tier.stats.failed_blocks == len(damaged)

    def test_links_and_pipes_are_misses(self, tmp_path: Path) -> None:
        tier = written(tmp_path / "blocks", range(1))
        path = path_of(tmp_path / "blocks", 0)
        (tmp_path / "elsewhere").write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        assert tier.read(key(0), SIZE) is None
        os.mkfifo(path_of(tmp_path / "blocks", 1))
        assert tier.read(key(1), SIZE) is None

    @pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
    def test_a_disk_that_is_full_or_fails_is_a_counter(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        written(tmp_path, range(1))
        monkeypatch.setattr(os, "replace", fail)
        tier = written(tmp_path, range(1, 3))
        assert tier.stats.failed_blocks == 2
        assert [path.suffix for path in (tmp_path / "a").iterdir()] == [".kv"], "a file aside is left"
        monkeypatch.setattr(disk_tier, "read_block", fail)
        assert tier.read(key(0), SIZE) is None
        assert tier.stats.failed_blocks == 3

    def test_a_folder_that_goes_away_is_a_miss(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path / "blocks", "a", 1 << 20)
        (tmp_path / "blocks" / "a").rmdir()
        tier.write(key(0), block(0))
        tier.close()
        assert tier.stats.failed_blocks == 1
        assert tier.read(key(0), SIZE) is None

    def test_a_folder_that_cannot_be_used_is_one_error_at_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"kv_offloading_dir='.*file' cannot be used"):
            DiskTier(tmp_path / "file", "a", 1 << 20)

    def test_takes_no_more_bytes_than_it_may_with_those_of_other_namespaces(self, tmp_path: Path) -> None:
        old = written(tmp_path, range(100, 106), namespace="old")
        for number in range(100, 106):
            os.utime(path_of(tmp_path, number, namespace="old"), (1, 1))
        tier = DiskTier(tmp_path, "a", 10 * FILE_SIZE)
        most = 0
        for number in range(40):
            write(tier, number)
            most = max(most, sum(path.stat().st_size for path in tmp_path.glob("*/*")))
        assert 8 * FILE_SIZE <= most <= 10 * FILE_SIZE
        assert tier.stats.used_bytes <= most
        assert tier.has(key(39))
        assert not old.has(key(100))

    def test_what_was_used_stays_longest(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path, "a", 8 * FILE_SIZE)
        for number in range(8):
            write(tier, number)
            os.utime(path_of(tmp_path, number), (1000 + number, 1000 + number))
        tier.touch([key(0)])
        write(tier, 8)
        assert tier.has(key(0))
        assert not tier.has(key(1))

    @pytest.mark.parametrize("remove", [lambda tier: tier.remove(map(key, range(3))), DiskTier.clear])
    def test_removed_blocks_are_gone_those_that_wait_or_are_just_written_included(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[DiskTier], None]
    ) -> None:
        tier = DiskTier(tmp_path, "a", 1 << 20)
        write(tier, 0)
        begun, go_on, write_block = threading.Event(), threading.Event(), disk_tier.write_block

        def write_slowly(*given: object) -> None:
            begun.set()
            go_on.wait(60)
            write_block(*given)

        monkeypatch.setattr(disk_tier, "write_block", write_slowly)
        for number in (1, 2):
            tier.write(key(number), block(number))
        assert begun.wait(60)
        remove(tier)
        go_on.set()
        tier.close()
        assert not any(tier.has(key(number)) for number in range(3))

    def test_processes_that_share_a_folder_read_whole_blocks_or_none(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from tests.engine.kv_store.test_kv_store import *\n"
            "tier = DiskTier(Path(sys.argv[1]), 'a', 12 * FILE_SIZE)\n"
            "for _ in range(10):\n"
            "    for number in range(20):\n"
            "        tier.write(key(number), block(number))\n"
            "        found = tier.read(key(number), SIZE)\n"
            "        assert found is None or (found == block(number)).all()\n"
            "tier.close()\n"
            "assert tier.stats.failed_blocks == 0, tier.stats\n"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        processes = [
            subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()[-2000:]


class TestStore:
    def test_what_is_fetched_from_disk_is_found_in_memory(self, tmp_path: Path) -> None:
        store = KVStore(3 * SIZE, [SIZE], written(tmp_path, range(3)))
        store.fetch([key(0)], Deadline(0))
        assert not store.has(*key(0)), "no request wanted it any more"
        store.fetch(map(key, range(5)), Deadline(60))
        for number in range(3):
            np.testing.assert_array_equal(store.find(*key(number)), block(number))
        assert not store.has(*key(3))

    def test_blocks_on_their_way_when_some_are_removed_do_not_arrive(self, tmp_path: Path) -> None:
        store = KVStore(3 * SIZE, [SIZE], DiskTier(tmp_path, "a", 1 << 20))
        for remove in (lambda: store.remove([key(1)[1]]), store.clear):
            epoch = store.epoch
            store.put(key(0), block(0), epoch)
            remove()
            store.put(key(1), block(1), epoch)
            assert not store.has(*key(1))
        assert not store.has(*key(0))
        store.close()
        assert not store.on_disk(key(1))
