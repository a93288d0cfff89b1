"""Adapters of an engine in a process of its own: loaded over the wire, and again after a crash."""

import asyncio
import os
import signal

import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.client.engine_process import EngineProcess
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import CheckpointError, RequestError
from jaxis.lora import LoRARequest
from jaxis.outputs import merge_outputs
from jaxis.prompts import TokenizedPrompt
from jaxis.server.lora.served_adapters import load_adapter, unload_adapter
from tests.support.adapters import save_adapter
from tests.support.waiting import eventually

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 100, 7, 8, 9, 400, 11, 12]


@pytest.mark.slow
def test_adapters_are_loaded_over_the_wire_and_again_after_a_crash(tmp_path):
    folders = [save_adapter(EMBEDDED_MODEL, tmp_path / f"a{i}", seed=i, scale=0.5) for i in range(2)]
    arguments = {"kv_cache_memory": "8MiB", "enable_lora": True, "max_loras": 2, "dtype": "float32"}
    with LLM(show_progress=False, **arguments) as llm:
        adapters = [None, *(LoRARequest("a", 1, folder) for folder in folders)]
        expected = [each.outputs[0].token_ids for each in llm.generate([PROMPT] * 3, GREEDY, lora_request=adapters)]
    assert len(set(map(tuple, expected))) == 3

    async def scenario():
        process = EngineProcess(arguments | {"lora_modules": {"first": str(folders[0])}}, stall_seconds=60.0)
        engine = AsyncLLMEngine(process, max_queued=8, stall_seconds=60.0)
        engine.start()

        async def answers():
            found = []
            for adapter in adapters:
                prompt = TokenizedPrompt(None, PROMPT, adapter=adapter)
                outputs = [output async for output in engine.generate(prompt, GREEDY, f"{len(found)}")]
                found.append(merge_outputs(outputs).outputs[0].token_ids)
            return found

        try:
            async with asyncio.timeout(240):
                [[name, source, first, _]] = process.info.features["adapter"]
                assert (name, source) == ("first", str(folders[0]))
                adapters = [b"", first, (await load_adapter(engine, str(folders[1])))[0]]
                assert await answers() == expected
                with pytest.raises(CheckpointError, match="is not a folder"):
                    await load_adapter(engine, str(tmp_path / "nobody"))
                os.kill(process.pid, signal.SIGKILL)
                await eventually(lambda: not engine.is_accepting)
                await eventually(lambda: engine.is_accepting)
                assert await answers() == expected
                unload_adapter(engine, adapters[2])
                with pytest.raises(RequestError, match="not loaded any more"):
                    await answers()
        finally:
            await engine.shutdown()

    asyncio.run(scenario())
