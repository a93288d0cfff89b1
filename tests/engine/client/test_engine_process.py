"""The engine in a process of its own gives what the same engine gives here; its end fails every waiting request."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.engine.client import engine_process, wire, worker_main, worker_start
from jaxis.engine.client.async_engine import EngineClient
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.client.engine_client import TokenDelta
from jaxis.engine.client.engine_process import EngineProcess
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.engine.grammar.recipe import GrammarRecipe
from jaxis.engine.grammar.thinking_budget import ThinkingBudget
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.errors import CheckpointError, ConfigError, OverloadedError, RequestError, UnavailableError
from jaxis.host.channel import MessageReader, to_frame
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput, merge_outputs
from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.prompts import TokenizedPrompt
from jaxis.server.weights.served_weights import ServedWeights
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import eventually, wait_until

ARGUMENTS = {"kv_cache_memory": "8MiB", "max_num_seqs": 8, "dtype": "float32"}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=8),
    SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[0-9]{3}-[a-z]{4}")),
]


@pytest.fixture(scope="module", autouse=True)
def model(one_layer):
    ARGUMENTS["model"] = str(one_layer)
    return one_layer


@contextlib.asynccontextmanager
async def running(**settings):
    """(AsyncLLMEngine, EngineProcess)"""
    process = EngineProcess(ARGUMENTS, stall_seconds=settings.get("stall_seconds", 60.0))
    engine = AsyncLLMEngine(process, **({"max_queued": 512, "stall_seconds": 120.0} | settings))
    engine.start()
    try:
        async with asyncio.timeout(180):
            yield engine, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        await engine.shutdown()
        assert not psutil.pid_exists(process.pid)


async def next_reports(process, number=2):
    """Waits for reports of the engine's process on itself; the second was begun after this was called."""
    for _ in range(number):
        before = process.stats
        await eventually(lambda: process.stats is not before)  # noqa: B023


async def collect(engine, prompt, params, request_id, **more):
    grammar = None
    if params.structured_outputs is not None:
        grammar = engine.grammar_compiler.compile(params.structured_outputs)
    return merge_outputs([o async for o in engine.generate(prompt, params, request_id, grammar=grammar, **more)])


def test_outputs_are_those_of_the_engine_in_this_process():
    prompts = [f"The capital of {country} is" for country in ("France", "Japan", "Italy")]
    with LLM(show_progress=False, **ARGUMENTS) as llm:
        expected = llm.generate(prompts, PARAMS)
        defaults = llm.get_default_sampling_params()

    async def scenario():
        async with running() as (engine, process):
            client: EngineClient = process
            assert client.info.default_sampling_params == defaults
            tokens = [TokenizedPrompt(text, engine.tokenizer.encode(text)) for text in prompts]
            asks = [collect(engine, t, p, f"r{i}") for i, (t, p) in enumerate(zip(tokens, PARAMS, strict=True))]
            whole = [
                collect(engine, t, p, f"w{i}", final_only=True)
                for i, (t, p) in enumerate(zip(tokens, PARAMS, strict=True))
            ]
            results = await asyncio.gather(*asks, *whole)
            with pytest.raises(RequestError, match="max_model_len"):
                await collect(engine, TokenizedPrompt(None, [5] * 300_000), PARAMS[1], "long")
            with pytest.raises(RequestError, match="token 999999"):
                await collect(engine, TokenizedPrompt(None, [999_999]), PARAMS[1], "odd")
            assert engine.is_making_progress
            repeated = TokenizedPrompt(None, [5] * 40)
            assert [(await collect(engine, repeated, PARAMS[1], i)).num_cached_tokens for i in "ab"] == [0, 32]
            engine.reset_prefix_cache()
            assert [(await collect(engine, repeated, PARAMS[1], i)).num_cached_tokens for i in "cd"] == [0, 32]
            await next_reports(process)
            assert engine.stats().kv_cache_usage == 0
        return results

    results = asyncio.run(scenario())
    for number, result in enumerate(results):
        want = expected[number % len(PARAMS)]
        # How many drafts there were depends on measured times.
        outputs = [dataclasses.replace(each, num_drafts=0, num_accepted_drafts=0) for each in result.outputs]
        assert outputs == [dataclasses.replace(each, num_drafts=0, num_accepted_drafts=0) for each in want.outputs]
        assert (result.outputs[0].cumulative_logprob is not None) == (number % len(PARAMS) == 0)
        assert result.prompt == want.prompt
        assert result.prompt_token_ids == want.prompt_token_ids
        assert result.prompt_logprobs == want.prompt_logprobs


def test_a_request_that_is_left_is_aborted_there():
    async def scenario():
        async with running() as (engine, process):
            endless = SamplingParams(max_tokens=1500, ignore_eos=True)
            grammar = SamplingParams(max_tokens=1500, structured_outputs=StructuredOutputs(regex="[a-z]*"))
            for number, params in enumerate([endless, grammar, grammar]):
                prompt = TokenizedPrompt(None, engine.tokenizer.encode("Once"))
                task = asyncio.create_task(collect(engine, prompt, params, f"r{number}"))
                if number == 2:
                    await asyncio.sleep(0)  # before the grammar is compiled
                else:
                    await eventually(lambda: engine.stats().num_requests_running)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                # The id is free again, and the old request's last output reaches no request.
                again = await collect(engine, prompt, SamplingParams(temperature=0, max_tokens=5), f"r{number}")
                assert (again.request_id, again.outputs[0].finish_reason) == (f"r{number}", "length")
            await next_reports(process)
            await eventually(lambda: engine.stats().num_requests_running == engine.stats().kv_cache_usage == 0)

    asyncio.run(scenario())


def test_a_dead_process_fails_waiting_requests_and_is_restarted(monkeypatch, caplog):
    monkeypatch.setattr(engine_process, "MAX_RESTARTS", 1)

    async def lose(engine, process, prompt):
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        waiting = [asyncio.create_task(collect(engine, prompt, params, f"r{i}")) for i in range(2)]
        await eventually(lambda: engine.stats().num_requests_running == 2)
        os.kill(process.pid, signal.SIGKILL)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, UnavailableError)
            assert "signal 9" in str(error)
        assert not engine.is_making_progress
        assert not engine.is_accepting
        with pytest.raises(UnavailableError), engine.reserve():
            pass

    async def scenario():
        async with running() as (engine, process):
            first = process.pid
            prompt = TokenizedPrompt(None, engine.tokenizer.encode("Once"))
            greedy = SamplingParams(temperature=0, max_tokens=5)
            expected = await collect(engine, prompt, greedy, "r")
            await lose(engine, process, prompt)
            assert engine.failure is None
            await eventually(lambda: engine.is_accepting)
            assert engine.is_making_progress
            assert process.pid != first
            assert (await collect(engine, prompt, greedy, "r")).outputs == expected.outputs
            await lose(engine, process, prompt)
            assert "after 1 restarts" in str(engine.failure)
            assert not engine.is_accepting

    asyncio.run(scenario())
    logged = [(record.levelname, record.getMessage()) for record in caplog.records if "lost" in record.getMessage()]
    assert [level for level, _ in logged if level != "INFO"] == ["ERROR", "CRITICAL"]
    assert "signal 9" in logged[0][1]
    assert "starting it again (1 of 1)" in logged[0][1]


def test_an_engine_that_is_started_again_has_the_weights_it_was_given(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    for path in other.glob("*.safetensors"):
        save_file({name: x * x.dtype.type(0.75) for name, x in load_file(path).items()}, path, {"format": "pt"})

    async def scenario():
        async with running() as (engine, process):
            prompt = TokenizedPrompt(None, engine.tokenizer.encode("Once"))
            params = SamplingParams(temperature=0, max_tokens=5, logprobs=0)
            before, first = await collect(engine, prompt, params, "r"), engine.info.fingerprint
            weights = ServedWeights(engine)
            with pytest.raises(CheckpointError, match="is not a folder"):
                await weights.update(str(tmp_path / "none"), None)
            await weights.update(str(other), None)
            assert (engine.info.fingerprint != first, weights.version) == (True, 1)
            expected = await collect(engine, prompt, params, "r")
            assert expected.outputs[0].logprobs != before.outputs[0].logprobs
            assert expected.outputs[0].weight_versions == [1] * 5
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: not engine.is_accepting)
            await eventually(lambda: engine.is_accepting)
            assert (await collect(engine, prompt, params, "r")).outputs == expected.outputs

    asyncio.run(scenario())


def test_a_restart_that_fails_is_tried_again_and_then_given_up(monkeypatch, caplog):
    monkeypatch.setattr(engine_process, "MAX_RESTARTS", 2)
    monkeypatch.setattr(engine_process, "RESTART_DELAY_SECONDS", 0.01)

    async def scenario():
        async with running() as (engine, process):
            process._settings = process._settings.replace(b'"8MiB"', b'"1"')  # too little memory
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: engine.failure)
            assert "cannot be started again" in str(engine.failure)

    asyncio.run(scenario())
    assert sum("starting it again" in record.getMessage() for record in caplog.records) == 2


def test_it_can_be_stopped_while_it_is_started_again():
    async def scenario():
        async with running() as (engine, process):
            os.kill(process.pid, signal.SIGKILL)
            await eventually(lambda: not engine.is_accepting)

    asyncio.run(scenario())


def test_silence_is_no_progress():
    async def scenario():
        async with running(stall_seconds=1.0) as (engine, process):
            await next_reports(process, 4)  # for longer than `stall_seconds`
            assert engine.is_making_progress
            os.kill(process.pid, signal.SIGSTOP)
            await eventually(lambda: not engine.is_making_progress)
            os.kill(process.pid, signal.SIGCONT)
            await eventually(lambda: engine.is_making_progress)

    asyncio.run(scenario())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [({"model": "/no/such/folder"}, CheckpointError), ({"dtype": "int3"}, ConfigError)],
)
def test_what_building_raises_is_raised_here(arguments, kind):
    with pytest.raises(kind):
        EngineProcess(arguments, stall_seconds=60.0)


def test_it_ends_with_the_process_that_started_it():
    code = (
        "from jaxis.engine.client.engine_process import EngineProcess\n"
        "import time\n"
        "process = EngineProcess({'kv_cache_memory': '8MiB'}, stall_seconds=60.0)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert psutil.pid_exists(worker)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


def test_it_ends_with_the_process_that_started_it_while_it_loads():
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "jaxis.engine.client.worker_main", str(theirs.fileno())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as worker:  # waits for settings
        theirs.close()
        ours.close()
        assert worker.wait(60) == 1


def test_the_process_that_was_started_ahead_is_taken_once_and_only_while_it_runs():
    workers = []
    try:
        for _ in range(2):
            worker_start.start_ahead()
        [lost, ahead] = [worker.process for worker in worker_start._ahead]
        lost.kill()
        lost.wait()
        workers = [worker_start.take_worker(), worker_start.take_worker()]
        assert workers[0].process is ahead
        assert workers[1].process not in (ahead, lost)
        assert [worker.process.poll() for worker in workers] == [None, None]
    finally:
        for worker in workers:
            worker.connection.close()  # which ends it: it has read no settings
    assert [worker.process.wait(60) for worker in workers] == [1, 1]


def test_a_process_that_was_started_ahead_in_vain_ends_in_silence():
    worker_start.start_ahead()
    [dropped] = [worker.process for worker in worker_start._ahead]
    worker_start.drop_ahead()
    assert (dropped.poll(), worker_start._ahead) == (-signal.SIGKILL, [])
    code = "from jaxis.engine.client import worker_start as w; w.start_ahead(); print(w._ahead[0].process.pid)"
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # to its end
    worker = int(parent.stdout)
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    assert parent.stderr == ""


@pytest.mark.parametrize("is_served", [False, True])
def test_a_closed_connection_ends_it_at_once_only_before_it_is_served(monkeypatch, is_served):
    """While a connection is served, the serving thread ends the process: with several hosts, these end first."""
    codes, served = [], threading.Event()
    monkeypatch.setattr(worker_main.os, "_exit", codes.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if is_served:
            served.set()
        theirs.close()
        worker_main.end_with(ours, served)
    assert codes == ([] if is_served else [1])


def test_an_engine_that_gets_no_memory_ends_before_it_reads_its_weights():
    asked = []

    def refuse(num_bytes):
        asked.append(num_bytes)
        raise UnavailableError("no")

    before = set(psutil.Process().children())
    shared = MemoryBudget(1 << 33, 1 << 32)
    arguments = {**ARGUMENTS, "fit_memory": True}
    with pytest.raises(UnavailableError, match="no"):
        EngineProcess(arguments, stall_seconds=60.0, shared=shared, admit=refuse)
    assert len(asked) == 1
    assert asked[0] > 8 << 20, "the cache and more"
    assert set(psutil.Process().children()) == before


def test_the_server_leaves_the_devices_to_the_engine():
    """A backend that starts here would take an accelerator's memory from it."""
    code = (
        "from jaxis.engine.client.engine_process import EngineProcess\n"
        "from jaxis.engine.client.async_llm_engine import AsyncLLMEngine\n"
        "from jaxis.server.app import create_app\n"
        "from jaxis.server.config import ServerConfig\n"
        "from jaxis import StructuredOutputs\n"
        "import jaxis.server.run\n"
        "from jax._src import xla_bridge\n"
        "process = EngineProcess({'kv_cache_memory': '8MiB'}, stall_seconds=60.0)\n"
        "engine = AsyncLLMEngine(process, max_queued=0, stall_seconds=60.0)\n"
        "create_app(engine, ServerConfig())\n"
        "engine.grammar_compiler.compile(StructuredOutputs(json_object=True)).new_matcher().token_mask()\n"
        "process.stop(10)\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def carried(message, decoder):
    [arrived] = MessageReader(decoder).feed(to_frame(message))
    return arrived


def test_every_parameter_is_carried():
    values = {
        **{"n": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "frequency_penalty": -1.5},
        **{"presence_penalty": 1.25, "repetition_penalty": 1.5, "logit_bias": {3: -100.0, 2**20: 0.5}},
        **{"allowed_token_ids": [1, 2, 3], "bad_words": ["é", "x y"], "seed": 2**64 - 1, "max_tokens": 9},
        **{"min_tokens": 2, "stop": ["a\n", "\u2028"], "stop_token_ids": [4], "ignore_eos": True},
        **{
            "include_stop_str_in_output": True,
            "logprobs_mode": "processed_logits",
            "logprobs": 0,
            "prompt_logprobs": 5,
            "detokenize": True,
        },
        **{"skip_special_tokens": False, "num_speculative_tokens": 2, "prediction": "def f():\n"},
        **{"thinking_token_budget": 30, "thinking_budget_grace_period": 5},
        **{"return_routed_experts": True, "routed_experts_prompt_start": 2},
        **{"extra_args": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1}}},
    }
    grammars = [
        StructuredOutputs(json_schema={"type": "object", "properties": {"a": {"const": None}}}),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="[a-z]+"),
        StructuredOutputs(choice=["yes", "no"]),
        StructuredOutputs(grammar='start: "a"'),
    ]
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*values, "structured_outputs"}
    alone = [{name: value} for name, value in values.items() if name not in ("min_tokens", "detokenize")]
    together = {name: value for name, value in values.items() if name != "ignore_eos"}
    settings = [*alone, together, *({"structured_outputs": grammar} for grammar in grammars), {"detokenize": False}]
    for fields in settings:
        params = SamplingParams(**fields)
        prompt = TokenizedPrompt("text", [1, 2], "salt")
        command = wire.AddRequest("r", prompt, params, -3, "key ada", True)
        assert carried(command, wire.COMMANDS) == command


def test_what_comes_before_a_grammar_is_carried():
    compiler = ScriptedEngine().grammar_compiler
    marks = get_reasoning_parser("kimi_k2").marks("Hi <think>")
    grammar = DelayedGrammar(None, compiler.tokenizer, marks, [9, 8])
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    command = wire.AddRequest("r", TokenizedPrompt(None, [1]), params, grammar=GrammarRecipe.of(params, grammar))
    back = carried(command, wire.COMMANDS).grammar.make(params, compiler)
    assert back.alternatives == {8, 9}
    assert back.marks == marks


def test_a_thinking_budget_is_carried_with_and_without_a_grammar():
    compiler = ScriptedEngine().grammar_compiler
    marks = get_reasoning_parser("qwen3").marks("Hi <think>")
    for more in ({}, {"structured_outputs": StructuredOutputs(regex="ab")}):
        params = SamplingParams(thinking_token_budget=3, **more)
        inner = None
        if more:
            inner = DelayedGrammar(compiler.compile(params.structured_outputs), compiler.tokenizer, marks)
        grammar = ThinkingBudget(marks, 3, compiler.tokenizer, compiler.vocab_size, inner)
        command = wire.AddRequest("r", TokenizedPrompt(None, [1]), params, grammar=GrammarRecipe.of(params, grammar))
        back = carried(command, wire.COMMANDS).grammar.make(params, compiler)
        assert (back.marks, back.num_tokens) == (marks, 3)
        assert (back.grammar is None) == (inner is None)
        first, second = grammar.new_matcher(), back.new_matcher()
        for token_ids in ([], [9], [9, 9], [9, 9, 9]):
            first.follow(token_ids)
            second.follow(token_ids)
            assert np.array_equal(first.token_mask(), second.token_mask())


def test_an_output_is_carried_in_any_pieces():
    logprobs = [{5: Logprob(float("-inf"), 3, "a"), 2**31: Logprob(-0.5, 1)}]
    completion = CompletionOutput(1, "é", [5], -1.5, logprobs, "stop", 7)
    output = RequestOutput(
        "r", None, [], [None, {2: Logprob(-1.0, 1, "b")}], [completion], True, 1, 2.5, 3.5, {"remote_port": 1}
    )
    delta = TokenDelta("s", "ü", [6, 2**31])
    failure = wire.Failure.of(RequestError("no", param="stop"))
    frame = to_frame(wire.EngineOutputs([output], [delta], [("x", failure)]))
    reader = MessageReader(wire.REPORTS)
    reports = [report for byte in 2 * frame for report in reader.feed(bytes([byte]))]
    assert len(reports) == 2
    for new in reports:
        assert (new.outputs, new.deltas) == ([output], [delta])
        [(request_id, failure)] = new.errors
        error = failure.error()
        assert (request_id, type(error), str(error), error.param) == ("x", RequestError, "stop no", "stop")
    assert "ZeroDivisionError: x" in str(wire.EngineFailed.of(ZeroDivisionError("x")).error())


@pytest.mark.parametrize("kind", [CheckpointError, OverloadedError, UnavailableError])
def test_an_error_keeps_its_type(kind):
    assert type(carried(wire.EngineFailed.of(kind("x")), wire.REPORTS).error()) is kind
