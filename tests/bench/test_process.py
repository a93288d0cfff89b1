"""Facts that a process knows about itself."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from jaxis.bench.process_facts import compile_stats, describe_machine
from jaxis.host.cores import usable_cores


def test_the_start_of_a_process_is_when_it_was_started():
    code = "import time; time.sleep(0.3); from jaxis.bench.session import *; print(seconds_since_start())"
    start = time.perf_counter()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    elapsed = time.perf_counter() - start
    assert 0.3 <= float(output) <= elapsed + 0.02


def test_programs_compiled_inside_are_counted_and_others_not():
    def count(function):
        with compile_stats() as stats:
            function()
        return stats

    program = jax.jit(lambda x: x * 3 + 17)
    operand = jnp.ones(5).block_until_ready()
    stats = count(lambda: program(operand))
    assert stats.num_programs == 1
    assert stats.seconds > 0
    assert stats.num_loaded in (0, 1)
    jax.jit(lambda x: x * 5 + 23)(operand)
    assert stats.num_programs == 1
    assert count(lambda: program(operand)).num_programs == 0


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["cores"] == usable_cores()
    assert machine["jax"] == jax.__version__
    assert machine["device"] == jax.local_devices()[0].device_kind
