"""`vllm serve` with jaxis inside, as clients see it: streams, tools, grammars, errors, and many clients at once."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("peft")

import openai

import jaxis
from jaxis.engine.opened_model import EMBEDDED_MODEL
from tests.integrations.vllm.vllm_server import vllm_server
from tests.support.adapters import save_adapter
from tests.support.host_processes import HostProcess

ENGINE = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 512}
REGEX = "[a-c]{2,5}(-[0-9]{1,3}){1,2}"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Folders of adapters of its model, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(EMBEDDED_MODEL, root / name, seed=seed) for seed, name in enumerate(("poet", "clerk"))}


@pytest.fixture(scope="module")
def server(adapters):
    """Its address."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    options += ["--served-model-name=tiny", "--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    options += ['--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}']
    options += ["--generation-config=vllm", "--enable-lora", f"--lora-modules=poet={adapters['poet']}"]
    with vllm_server(EMBEDDED_MODEL, *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (address, process):
        assert "jaxis has the model on cpu" in process.output
        yield address


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference():
    return jaxis.LLM(**ENGINE, dtype="float32", kv_cache_memory="64MiB", show_progress=False)


def test_the_front_end_has_no_jax():
    """It forks the engine's process, in which a fork of JAX's threads would wait forever."""
    script = """
import sys
from vllm.engine.arg_utils import EngineArgs

config = EngineArgs(sys.argv[1], dtype="float32").create_engine_config()
print(config.parallel_config.worker_cls, [name for name in ("jax", "jaxlib") if name in sys.modules])
"""
    process = HostProcess(["-c", script, str(EMBEDDED_MODEL)], VLLM_PLUGINS="jaxis")
    assert process.wait() == 0, process.output
    assert "jaxis.integrations.vllm.worker.JaxisWorker []" in process.output


def test_thirty_two_clients_at_once_get_jaxis_answers(client, reference):
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(32)]
    params = [{"temperature": 1.0, "seed": i, "max_tokens": 12 + i % 5} for i in range(32)]

    def ask(index):
        choice = client.completions.create(model="tiny", prompt=prompts[index], logprobs=2, **params[index]).choices[0]
        return choice.text, choice.logprobs.token_logprobs

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    wanted = reference.generate(prompts, [jaxis.SamplingParams(**each, logprobs=2) for each in params])
    for (text, logprobs), output in zip(answers, wanted, strict=True):
        [completion] = output.outputs
        assert text == completion.text
        chosen = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert logprobs == pytest.approx(chosen, abs=0)


def test_adapters_answer_by_their_names_and_are_loaded_and_unloaded(client, server, adapters):
    def ask(name):
        return client.completions.create(model=name, prompt=[11, 12, 13], max_tokens=12, temperature=0).choices[0].text

    def change(what, **values):
        return httpx.post(f"{server}/v1/{what}_lora_adapter", json=values, timeout=60)

    llm = jaxis.LLM(**ENGINE, dtype="float32", enable_lora=True, kv_cache_memory="64MiB", show_progress=False)
    params = jaxis.SamplingParams(temperature=0, max_tokens=12)
    requests = [None, *(jaxis.LoRARequest(name, 1, folder) for name, folder in adapters.items())]
    outputs = llm.generate([[11, 12, 13]] * 3, params, lora_request=requests)
    wanted = dict(zip(("tiny", *adapters), (output.outputs[0].text for output in outputs), strict=True))
    assert len(set(wanted.values())) == 3
    missing = change("load", lora_name="gone", lora_path="/nowhere")
    assert missing.status_code == 500
    assert "/nowhere" in missing.text
    assert change("load", lora_name="clerk", lora_path=str(adapters["clerk"])).status_code == 200
    names = [*wanted] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(ask, names)) == [wanted[name] for name in names]
    assert change("unload", lora_name="clerk").status_code == 200
    with pytest.raises(openai.NotFoundError):
        ask("clerk")


def test_grammars_of_clients_at_once_stay_apart(client):
    def ask(index):
        grammar = {"regex": REGEX} if index % 2 else {"choice": ["yes", "no"]}
        return (
            client.completions.create(
                model="tiny", prompt="x", seed=index, max_tokens=60, extra_body={"structured_outputs": grammar}
            )
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, range(32)))
    for index, text in enumerate(texts):
        assert re.fullmatch(REGEX, text) if index % 2 else text in ("yes", "no")


def test_a_stream_is_the_answer(client):
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    whole = client.chat.completions.create(**arguments, max_tokens=20).choices[0].message.content
    chunks = client.chat.completions.create(**arguments, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert whole


def test_a_required_tool_is_called(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "add"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=100,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in range(10)


def test_what_is_not_applied_is_an_error_of_its_request_alone(client):
    with pytest.raises(openai.BadRequestError, match="extra_args is not supported"):
        client.completions.create(model="tiny", prompt="x", extra_body={"vllm_xargs": {"a": 1}})
    with pytest.raises(openai.BadRequestError, match="repetition_penalty=1000"):
        client.completions.create(model="tiny", prompt="x", extra_body={"repetition_penalty": 1000.0})
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].text is not None


def test_an_abort_leaves_nothing_running(client, server):
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for _ in range(100):
        metrics = httpx.get(f"{server}/metrics").text
        if re.search(r"^vllm:num_requests_running{.*} 0\.0$", metrics, re.MULTILINE):
            return
        time.sleep(0.1)
    raise AssertionError("the request still runs")
