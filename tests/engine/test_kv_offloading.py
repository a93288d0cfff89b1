"""Blocks beyond the device: what is found there gives the tokens, and bits, that computing it anew gives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import SamplingParams
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.engine.client.generation_core import GenerationCore
from jaxis.engine.client.wire import AbortRequest, AddRequest
from jaxis.engine.execution.step_programs import ForwardKey
from jaxis.errors import ConfigError, EngineError
from jaxis.kernels import native
from jaxis.prompts import TokenizedPrompt
from tests.engine.offloaded_conversations import converse
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import variant

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BLOCK_BYTES = 8192
NAN_ID = 17


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def prompt(number, length=60):
    return random.Random(number).choices(range(20, 400), k=length)


# A family, memory for its cache, the cache's type. Bits are promised where all kernels are native, which for Qwen3.5 of
# these sizes they are not.
ROWS = [
    "Llama 3.1|100KiB|float32",
    "Llama 3.1|40KiB|int8",
    "Llama 3.1|50KiB|bfloat16",
    "Gemma 3|200KiB|float32",
    "Gemma 3|80KiB|int8",
    "DeepSeek V3|90KiB|float32",
    "DeepSeek V3.2|120KiB|float32",
    "Nemotron 3|300KiB|float32",
    "Falcon-H1|400KiB|float32",
    "Qwen3.5|260KiB|float32",
]


def check(found, num_turns):
    assert found["turns"] >= num_turns
    assert found["other tokens"] == 0
    assert found["largest difference"] < 1e-4
    assert found["host loaded_blocks"] > num_turns / 4
    assert found["host used_bytes"] <= 0.05 * 2**30
    assert found["host failed_blocks"] == 0


@pytest.mark.production_xla
@pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
@pytest.mark.parametrize("row", ROWS)
def test_200_turns_in_a_few_blocks_have_the_bits_of_an_engine_that_remembers_nothing(row):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.engine.offloaded_conversations", "200", row]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    [found] = json.loads(process.stdout.splitlines()[-1]).values()
    check(found, 200)
    assert found["different"] == 0 or "Qwen3.5" in row


def test_conversations_in_a_few_blocks_of_windows_and_full_context(checkpoint):
    check(converse(str(checkpoint("gpt_oss")), 12, "64KiB", dtype="float32"), 12)


def start(start_llm, **arguments):
    """An engine of twelve blocks, which remembers more on the host."""
    sizes = {"kv_cache_memory": 12 * BLOCK_BYTES, "max_model_len": 128, "kv_offloading_size": 0.01, "max_num_seqs": 2}
    return start_llm(**sizes | arguments)


def churn(llm):
    """Takes every block of the cache for something else."""
    llm.generate([prompt(1000 + i, 100) for i in range(3)], GREEDY)


def test_evicted_blocks_are_found_on_the_host_whose_memory_is_bounded(start_llm, llm):
    expected = tokens(llm.generate([prompt(0)], GREEDY))
    with start(start_llm, kv_offloading_size=30 * BLOCK_BYTES / 2**30) as small:
        for i in range(3):
            churn(small)
            [output] = small.generate([prompt(0)], GREEDY)
            assert tokens([output]) == expected
            assert output.num_cached_tokens == (48 if i else 0)
        stats = small.engine.connector.store.stats["host"]
        assert 20 * BLOCK_BYTES < stats.used_bytes <= 30 * BLOCK_BYTES
        assert stats.used_bytes % BLOCK_BYTES == 0
        assert stats.loaded_bytes == stats.loaded_blocks * BLOCK_BYTES > 0
        small.generate([prompt(i, 100) for i in range(20)], GREEDY)
        assert small.generate([prompt(0)], GREEDY)[0].num_cached_tokens == 0, "it was used least recently"


def test_no_tier_finds_what_another_salt_has_or_what_was_before_a_reset(start_llm, tmp_path):
    with start(start_llm, kv_offloading_dir=tmp_path) as small:
        small.generate([prompt(0)], GREEDY)
        churn(small)
        salted = {"prompt_token_ids": prompt(0), "cache_salt": "a"}
        assert small.generate([salted], GREEDY)[0].num_cached_tokens == 0
        assert small.generate([prompt(0)], GREEDY)[0].num_cached_tokens == 48
        small.engine.reset_prefix_cache()
        assert small.generate([prompt(0)], GREEDY)[0].num_cached_tokens == 0


def test_nan_is_forgotten_by_all_tiers(checkpoint, start_llm, llm, tmp_path):
    folder = variant(tmp_path / "nan", checkpoint(), files={"model.safetensors": None})
    tensors = load_file(checkpoint() / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[NAN_ID, 3] = np.nan
    save_file(tensors | {"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    with start(start_llm, model=folder, kv_offloading_dir=tmp_path / "blocks") as small:
        for i in range(6):
            with pytest.raises(EngineError, match="not finite"):
                small.generate([[i] + [NAN_ID] * 70], GREEDY)
        small.engine.connector.idle()
        assert small.engine.connector.store.stats["host"].used_bytes == 0
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={NAN_ID: -100.0})
        assert tokens(small.generate([prompt(0)], params)) == tokens(llm.generate([prompt(0)], params))
    assert all(b"\xff" * 64 not in file.read_bytes() for file in (tmp_path / "blocks").glob("*/*.kv"))


@pytest.mark.parametrize("when", quick_rows(list(range(4)), [1]))
def test_a_failed_step_loses_what_was_saved_since_the_last_one_that_was_read(start_llm, llm, when):
    expected = tokens(llm.generate([prompt(0), prompt(1)], GREEDY))
    with start(start_llm) as small:
        small.generate([prompt(0), prompt(1)], GREEDY)
        churn(small)
        executor, calls = small.engine.runner.executor, iter(range(1000))
        run, state = executor.run, executor.state

        def failing(key, *arguments):
            if isinstance(key, ForwardKey) and next(calls) == when:
                # What a device that fails leaves behind.
                state.caches = jax.tree.map(lambda array: jnp.full_like(array, np.nan), state.caches)
                raise RuntimeError("the device is gone")
            return run(key, *arguments)

        executor.run = failing
        with pytest.raises(EngineError, match="the device is gone"):
            small.generate([prompt(2, 100), prompt(3, 100), prompt(0), prompt(4, 100)], GREEDY)
        executor.run = run
        outputs = small.generate([prompt(0), prompt(1)], GREEDY)
        assert tokens(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [48, 48]


class TestDisk:
    def run(self, start_llm, folder, length, **arguments):
        """A long prompt on a new engine: the tokens, how many were found, and how many were computed."""
        sizes = {"max_model_len": 4200, "max_num_batched_tokens": 512, "kv_offloading_size": 0.05}
        overrides = {"max_position_embeddings": 8192}
        with start_llm(kv_offloading_dir=folder, hf_overrides=overrides, **sizes | arguments) as llm:
            scheduler, num_computed = llm.engine.scheduler, 0
            schedule = scheduler.schedule

            def counting(*drafts):
                nonlocal num_computed
                output = schedule(*drafts)
                num_computed += 0 if output is None else output.num_tokens
                return output

            scheduler.schedule = counting
            [output] = llm.generate([prompt(0, length)], GREEDY)
            return tokens([output]), output.num_cached_tokens, num_computed

    @pytest.mark.parametrize("length", quick_rows([200, 4096], [200]))
    def test_a_prefix_survives_a_restart_and_damaged_files_are_computed_anew(self, start_llm, tmp_path, length):
        expected, found, computed = self.run(start_llm, tmp_path, length)
        assert found == 0
        assert computed >= length
        known = (length - 1) // 16 * 16
        again, found, computed = self.run(start_llm, tmp_path, length)
        assert (again, found) == (expected, known)
        assert computed <= 16 + 8
        # Another type of the cache is another namespace.
        assert self.run(start_llm, tmp_path, length, kv_cache_dtype="bfloat16")[1] == 0
        assert len(list(tmp_path.iterdir())) == 2
        rng = random.Random(0)
        for namespace in tmp_path.iterdir():
            for file in rng.sample(sorted(namespace.iterdir()), 3):
                data = bytearray(file.read_bytes())
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                file.write_bytes(data)
        again, found, computed = self.run(start_llm, tmp_path, length)
        assert again == expected
        assert found < known
        assert computed <= length - found + 8
        assert self.run(start_llm, tmp_path, length)[:2] == (expected, known), "they were written again"

    def test_a_disk_that_does_not_answer_keeps_no_request_waiting(self, start_llm, llm, tmp_path, monkeypatch):
        expected = tokens(llm.generate([prompt(0)], GREEDY))
        with start(start_llm, kv_offloading_dir=tmp_path) as small:
            small.generate([prompt(0)], GREEDY)
        with start(start_llm, kv_offloading_dir=tmp_path) as small:
            answers = threading.Event()
            monkeypatch.setattr(small.engine.connector.store._disk, "read", lambda *_: answers.wait() and None)
            monkeypatch.setattr(small.engine.connector._fetcher, "_seconds", 0.1)
            monkeypatch.setattr(small.engine.connector._fetcher, "_places", threading.BoundedSemaphore(4))
            try:
                for _ in range(6):  # more than may be read at a time
                    [output] = small.generate([prompt(0)], GREEDY)
                    assert tokens([output]) == expected
            finally:
                answers.set()

    def test_a_request_may_be_aborted_while_its_blocks_are_read(self, start_llm, tmp_path, monkeypatch):
        with start(start_llm, kv_offloading_dir=tmp_path) as small:
            outputs, ended, answers, asked = {}, threading.Semaphore(0), threading.Event(), threading.Event()
            fetch = small.engine.connector.fetch

            def slow_fetch(*arguments):
                asked.set()
                answers.wait()
                fetch(*arguments)

            def deliver(new):
                assert not new.errors
                for output in new.outputs:
                    if output.finished:
                        outputs[output.request_id] = output.outputs[0].finish_reason
                        ended.release()

            monkeypatch.setattr(small.engine.connector, "fetch", slow_fetch)
            thread = EngineThread(GenerationCore(small._generator), deliver, lambda error: pytest.fail(str(error)))
            thread.start()
            for name in "ab":
                thread.take(AddRequest(name, TokenizedPrompt(None, prompt(0)), GREEDY, final_only=True))
            asked.wait()
            thread.take(AbortRequest("a"))
            answers.set()
            assert all(ended.acquire(timeout=60) for _ in range(2))
            assert outputs == {"a": "abort", "b": "length"}
            assert thread.stop(60)
            assert thread.stats.kv_tiers.keys() == {"host", "disk"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size=0 must be a number of GiB"),
        ({"kv_offloading_size": "8GiB"}, "kv_offloading_size='8GiB' must be a number of GiB"),
        ({"kv_offloading_size": 1e-6}, "holds no block of 16 tokens, which takes 8.0 KiB"),
        ({"kv_offloading_size": 1e6}, "of memory that are free"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "the prefix cache finds the blocks"),
        (
            {"kv_offloading_size": 1, "nnodes": 2, "tensor_parallel_size": 2},
            "does not combine with nnodes=2",
        ),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "must be one of native"),
        ({"kv_offloading_dir": "blocks"}, "kv_offloading_dir needs kv_offloading_size"),
        ({"kv_offloading_size": 0.01, "kv_offloading_dir": os.devnull}, "'/dev/null' cannot be used"),
        ({"kv_offloading_size": 1, "kv_offloading_disk_size": "much"}, "kv_offloading_disk_size='much'"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_is_one_clear_line(start_llm, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        start_llm(**arguments)
    assert "\n" not in str(error.value)
