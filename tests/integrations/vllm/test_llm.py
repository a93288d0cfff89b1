"""vllm.LLM with jaxis inside answers as jaxis.LLM does, bit for bit. Runs where vLLM is installed: `make test-vllm`."""

import itertools
import json
import os
import re

import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import vllm

import jaxis
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.integrations.vllm.model_runner import ModelRunner, StepResult
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.integrations.vllm.vllm_requests import (
    CHOICES,
    REGEX,
    SCHEMA,
    TINY_VOCAB_SIZE,
    Case,
    answer,
    jaxis_answers,
    random_cases,
    vllm_answers,
)
from tests.support.tiny_checkpoints import GPT_OSS_SIZES, LATENT_SIZES, write_checkpoint

ENGINE = {"max_num_seqs": 8, "max_model_len": 256, "dtype": "float32", "seed": 3}
NUM_BLOCKS = 160
ENDS = (3067, 3065)


def make_vllm(model=EMBEDDED_MODEL, **arguments):
    defaults = {
        **{"num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 64, "disable_log_stats": False},
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return vllm.LLM(str(model), **ENGINE | defaults | arguments)


@pytest.fixture(scope="module")
def llm():
    return make_vllm()


@pytest.fixture(scope="module")
def reference():
    return jaxis.LLM(**ENGINE, max_num_batched_tokens=64, kv_cache_memory="64MiB", show_progress=False)


def check(llm, reference, cases):
    for case, ours, theirs in zip(cases, vllm_answers(llm, cases), jaxis_answers(reference, cases), strict=True):
        assert ours == theirs, case


def metric(llm, name):
    return sum(each.value for each in llm.get_metrics() if each.name == name)


def test_requests_with_random_parameters_get_the_same_tokens_and_log_probabilities(llm, reference, monkeypatch):
    steps = StepsInFlight(monkeypatch)
    check(llm, reference, random_cases(200, seed=1))
    assert metric(llm, "vllm:prefix_cache_hits") > 0
    assert len(steps.numbers) > 200
    assert sum(steps.numbers) > 0.9 * len(steps.numbers)


class StepsInFlight:
    """The steps that the runners have dispatched.

    Attributes:
      unread: The results that nobody has waited for.
      numbers: Count of them as each step with tokens was dispatched.
    """

    def __init__(self, monkeypatch):
        self.unread, self.numbers = set(), []
        execute, sample, get_output = ModelRunner.execute, ModelRunner.sample, StepResult.get_output

        def recorded_execute(runner, scheduler_output):
            result = execute(runner, scheduler_output)
            if result is None:
                self.numbers.append(len(self.unread))
            return result

        def recorded_sample(runner, grammar_output):
            result = sample(runner, grammar_output)
            self.unread.add(result)
            return result

        def recorded_get_output(result):
            self.unread.discard(result)
            return get_output(result)

        monkeypatch.setattr(ModelRunner, "execute", recorded_execute)
        monkeypatch.setattr(ModelRunner, "sample", recorded_sample)
        monkeypatch.setattr(StepResult, "get_output", recorded_get_output)


def test_without_steps_in_advance_they_do_too(reference, monkeypatch):
    llm = make_vllm(async_scheduling=False)
    steps = StepsInFlight(monkeypatch)
    check(llm, reference, random_cases(30, seed=7))
    assert set(steps.numbers) == {0}


def test_long_prompts_in_chunks_do_too(reference):
    check(make_vllm(max_num_batched_tokens=16), reference, random_cases(40, seed=2, longest=150))


def set_contract(llm, contract):
    """Chooses in which of two ways vLLM's scheduler says that a preempted request goes on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.use_v2_model_runner is False  # without Triton
    scheduler.use_v2_model_runner = contract == "V2"


def long_cases():
    return [
        Case(
            [7 * i + k for k in range(30)],
            temperature=1.0,
            seed=i,
            max_tokens=90,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
            presence_penalty=0.5 * (i % 2),
        )
        for i in range(8)
    ]


@pytest.mark.parametrize("contract", ["V1", "V2"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_requests_do_too(reference, contract, async_scheduling):
    llm = make_vllm(num_gpu_blocks_override=20, async_scheduling=async_scheduling)
    set_contract(llm, contract)
    check(llm, reference, long_cases())
    assert metric(llm, "vllm:num_preemptions") > 0


@pytest.mark.parametrize("contract", ["V1", "V2"])
def test_requests_that_lose_their_blocks_while_a_token_is_in_flight_do_too(reference, contract):
    """The scheduler drops that token, and has it sampled again."""
    llm, cases = make_vllm(), long_cases()
    set_contract(llm, contract)
    core = llm.llm_engine.engine_core.engine_core
    for index, case in enumerate(cases):
        llm.llm_engine.add_request(str(index), case.vllm_prompt, case.vllm_params)
    outputs, in_flight = {}, 0
    for step in itertools.count():
        if step in (3, 20, 21, 50):  # in chunks of prompts, and in decodes
            in_flight += sum(each.num_output_placeholders for each in core.scheduler.running)
            assert llm.reset_prefix_cache(reset_running_requests=True)
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        if not llm.llm_engine.has_unfinished_requests():
            break
    assert in_flight >= 16
    assert metric(llm, "vllm:num_preemptions") >= 16
    wanted = jaxis_answers(reference, cases)
    for index, case in enumerate(cases):
        assert answer(outputs[str(index)]) == wanted[index], case


def test_requests_that_go_on_after_a_pause_do_too(llm, reference, monkeypatch):
    """A pause waits for the step in flight, and with clear_cache takes the blocks of all requests."""
    cases, steps = long_cases(), StepsInFlight(monkeypatch)
    core = llm.llm_engine.engine_core.engine_core
    for index, case in enumerate(cases):
        llm.llm_engine.add_request(str(index), case.vllm_prompt, case.vllm_params)
    outputs = {}
    for step in itertools.count():
        if step in (3, 20, 21, 50):
            assert steps.unread
            core.pause_scheduler("keep", clear_cache=step > 20)
            assert not steps.unread
            core.resume_scheduler()
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        if not llm.llm_engine.has_unfinished_requests():
            break
    wanted = jaxis_answers(reference, cases)
    for index, case in enumerate(cases):
        assert answer(outputs[str(index)]) == wanted[index], case


def test_requests_beside_aborted_ones_do_too(llm, reference):
    cases = random_cases(40, seed=8)
    kept = {}
    for index, case in enumerate(cases):
        llm.llm_engine.add_request(str(index), case.vllm_prompt, case.vllm_params)
    for step in itertools.count():
        if step % 3 == 0:
            llm.llm_engine.abort_request([str(step), str(step + 1)])
        kept |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        if not llm.llm_engine.has_unfinished_requests():
            break
    kept = {int(index): output for index, output in kept.items() if output.outputs[0].finish_reason != "abort"}
    assert 10 < len(kept) < len(cases)
    wanted = jaxis_answers(reference, [cases[index] for index in kept])
    for (index, output), theirs in zip(kept.items(), wanted, strict=True):
        assert answer(output) == theirs, cases[index]


def test_without_a_prefix_cache_they_do_too(reference):
    llm = make_vllm(enable_prefix_caching=False)
    check(llm, reference, random_cases(20, seed=4))
    assert metric(llm, "vllm:prefix_cache_hits") == 0


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_grammars_of_requests_side_by_side_stay_apart(backend):
    llm = make_vllm(structured_outputs_config={"backend": backend, "disable_any_whitespace": True})
    kinds = [{"regex": REGEX}, {"choice": CHOICES}, {"json": SCHEMA}]
    params = [
        vllm.SamplingParams(
            max_tokens=60,
            seed=i,
            presence_penalty=i % 2,
            logprobs=3,
            structured_outputs=vllm.sampling_params.StructuredOutputsParams(**kinds[i % 3]),
        )
        for i in range(15)
    ]
    outputs = llm.generate([Case([40 + i]).vllm_prompt for i in range(15)], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch(REGEX, text) for text in texts[::3])
    assert all(text in CHOICES for text in texts[1::3])
    assert all(json.loads(text)["a"] in range(100) for text in texts[2::3])


@pytest.mark.parametrize(("family", "sizes"), [("gpt_oss", GPT_OSS_SIZES), ("deepseek_v3", LATENT_SIZES)])
def test_windows_and_latents_do_too(tmp_path, family, sizes):
    """All layers have vLLM's one block table, also those that see a window alone."""
    folder = write_checkpoint(tmp_path / family, family, **sizes)
    reference = jaxis.LLM(folder, **ENGINE, max_num_batched_tokens=64, kv_cache_memory="16MiB", show_progress=False)
    cases = random_cases(24, seed=5, vocab_size=TINY_VOCAB_SIZE)
    check(make_vllm(folder, structured_outputs_config={"backend": "xgrammar"}), reference, cases)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_checkpoint_does_too(tmp_path, bits):
    quantize_checkpoint(EMBEDDED_MODEL, tmp_path / "model", parse_quantization(f"int{bits}"))
    reference = jaxis.LLM(
        tmp_path / "model", **ENGINE, max_num_batched_tokens=64, kv_cache_memory="16MiB", show_progress=False
    )
    check(make_vllm(tmp_path / "model"), reference, random_cases(12, seed=6))


def test_a_request_that_nothing_can_be_sampled_for_ends_alone(llm):
    [token_id] = llm.get_tokenizer().encode("x", add_special_tokens=False)
    other = Case([5, 6, 7], temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, logprobs=1)
    hopeless = Case([8, 9], allowed_token_ids=[token_id], bad_words=["x"], max_tokens=8, logprobs=1)
    [alone] = vllm_answers(llm, [other])
    beside, ended = vllm_answers(llm, [other, hopeless])
    assert beside == alone
    assert (ended[0], ended[1]) == ([min(ENDS)], "stop")


def test_seeds_are_drawn_where_requests_bring_none(reference):
    case = Case([5, 6, 7], temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = vllm_answers(make_vllm(), [case, case])
    assert first != second
    assert vllm_answers(make_vllm(), [case, case]) == [first, second]
