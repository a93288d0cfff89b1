"""Threads that compute, on machines that are files."""

import os
import subprocess
import sys

import pytest

from jaxis.host.cores import VARIABLE, count_cores, limit_threads, usable_cores

CPUS = "sys/devices/system/cpu"


@pytest.fixture
def machine(tmp_path):
    """Writes files of a machine, by path; returns its root."""

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return tmp_path

    return write


def siblings(pairs):
    return {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": pair for pair, cpus in pairs.items() for cpu in cpus}


def test_processors_of_which_nothing_is_known_are_cores(tmp_path):
    assert count_cores({0, 1, 5}, tmp_path) == 3


def test_two_processors_of_a_core_are_one(machine):
    root = machine(siblings({"0,4": (0, 4), "1,5": (1, 5), "2,6": (2, 6), "3,7": (3, 7)}))
    assert count_cores(set(range(8)), root) == 4
    assert count_cores({0, 1, 4}, root) == 2
    assert count_cores({4, 5}, root) == 2
    assert count_cores({3, 7}, root) == 1


def test_efficiency_cores_count_only_where_there_is_nothing_else(machine):
    # Two performance cores of two threads each, four efficiency cores.
    files = siblings({"0-1": (0, 1), "2-3": (2, 3)}) | siblings({str(cpu): (cpu,) for cpu in range(4, 8)})
    root = machine(files | {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"})
    assert count_cores(set(range(8)), root) == 2
    assert count_cores({3, 4, 5}, root) == 1
    assert count_cores({4, 5, 6}, root) == 3


def test_small_cores_of_arm_do_not_count(machine):
    capacities = [230, 230, 230, 230, 871, 871, 1024]
    root = machine({f"{CPUS}/cpu{cpu}/cpu_capacity": capacity for cpu, capacity in enumerate(capacities)})
    assert count_cores(set(range(7)), root) == 3
    assert count_cores({0, 1}, root) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),  # as in a container, whose own group is the root
        ({"sys/fs/cgroup/cpu.max": "149000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "40000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),
        # The least of the groups around it, of version 2 and of version 1.
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/2\n0::/",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        # A path outside of the container, which sees its own group as the root.
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/1",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
            },
            5,
        ),
    ],
)
def test_the_quota_of_a_container_bounds_threads(machine, files, expected):
    assert count_cores(set(range(8)), machine(files)) == expected


def test_xla_starts_as_many_threads_as_are_counted():
    script = """
import os
from jaxis.host import cores
cores.count_cores = lambda allowed: 3
cores._allowed = lambda: {0, 1, 2, 3}
cores.limit_threads()
import jax
jax.local_devices()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(cores.usable_cores(), sum("XLAEigen" in name for name in names))
"""
    if not os.path.exists("/proc/self/task"):
        pytest.skip("threads have no names")
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["3", "3"]


def test_a_number_that_was_given_is_kept(monkeypatch):
    monkeypatch.setenv(VARIABLE, "5")
    limit_threads()
    assert os.environ[VARIABLE] == "5"
    assert usable_cores() == 5
    monkeypatch.setenv(VARIABLE, "0")
    assert usable_cores() > 0
