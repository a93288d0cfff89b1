"""The experts that a request returns are those that the model's routers choose over the whole sequence."""

import functools

import numpy as np
import pytest
import torch

from jaxis import LLM, SamplingParams
from jaxis.bringup.verify.probe import record
from jaxis.errors import ConfigError, RequestError
from jaxis.layers.routing import JaxRouter
from tests.support import parity
from tests.support.drafters import drafters, drafting

FAMILY = next(family for family in parity.FAMILIES if family.name == "Qwen3 MoE, dense layers between, biases")
PROMPTS = [parity.prompt(length, seed=length) for length in (13, 14, 40, 41)]
MIXED = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, return_routed_experts=True)


@functools.cache
def model(name):
    return parity.loaded_model(next(family for family in parity.FAMILIES if family.name == name))


def recorded(name, token_ids):
    """What `jaxis verify` records of the model's routers: [T, layers with experts, k]."""
    chosen = {name: call.outputs.routing for name, call in record(model(name), token_ids).items()}
    chosen = {name: routing.expert_ids for name, routing in chosen.items() if routing is not None}
    # Of a router in a router, once.
    return np.stack([ids for name, ids in chosen.items() if f"{name}.proj" not in chosen], axis=1)


def chosen_by_reference(token_ids):
    """What transformers' routers choose, sorted: its kernels may add in another order where two weights are close."""
    with torch.no_grad():
        output = parity.reference_model(FAMILY)(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
    of_layers = [logits.topk(FAMILY.config["num_experts_per_tok"], dim=-1).indices for logits in output.router_logits]
    return np.sort(torch.stack(of_layers, dim=1).numpy(), axis=-1)


def check(output, completion, name=FAMILY.name):
    token_ids = output.prompt_token_ids + completion.token_ids
    assert completion.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(completion.routed_experts, recorded(name, token_ids)[:-1])


@pytest.fixture(scope="module")
def outputs():
    """With chunks of prompts, preemption and drafts, most of them wrong; and the engine."""
    options = {"max_num_batched_tokens": 16, "kv_cache_memory": "96KiB", "block_size": 16, "max_model_len": 64}
    with LLM(parity.checkpoint_folder(FAMILY), dtype="float32", show_progress=False, max_num_seqs=4, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        plain = llm.generate(prompts, MIXED)
        preempted = llm.engine.num_preemptions
        answers = {tuple(output.prompt_token_ids): [output.outputs[0].token_ids] for output in plain}
        with drafting(llm.engine, drafters(answers, 64)["changing"], 4):
            drafted = llm.generate(prompts, MIXED)
        yield plain, drafted, preempted, llm


def test_they_are_those_that_verify_records_of_routers(outputs):
    plain, _, preempted, _ = outputs
    assert preempted
    check(plain[-1], plain[-1].outputs[0])


def check_by_reference(output, completion):
    token_ids = output.prompt_token_ids + completion.token_ids
    chosen = np.sort(completion.routed_experts, axis=-1)
    np.testing.assert_array_equal(chosen, chosen_by_reference(token_ids)[:-1])


def test_they_are_those_of_transformers(outputs):
    for output in outputs[0]:
        check_by_reference(output, output.outputs[0])


def test_drafts_leave_no_rows(outputs):
    plain, drafted, _, _ = outputs
    assert sum(output.outputs[0].num_accepted_drafts for output in drafted) > 0
    assert any(output.outputs[0].num_accepted_drafts < output.outputs[0].num_drafts for output in drafted)
    for before, after in zip(plain, drafted, strict=True):
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        np.testing.assert_array_equal(before.outputs[0].routed_experts, after.outputs[0].routed_experts)


def test_beside_requests_without_them_and_of_cached_prompts(outputs):
    *_, llm = outputs
    prompts = [{"prompt_token_ids": PROMPTS[2]}] * 3
    without = SamplingParams(temperature=0.0, max_tokens=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, return_routed_experts=True)
    part = SamplingParams(temperature=0.0, max_tokens=4, return_routed_experts=True, routed_experts_prompt_start=39)
    plain, whole, rest = llm.generate(prompts, [without, greedy, part])
    assert plain.outputs[0].routed_experts is None
    check_by_reference(whole, whole.outputs[0])
    np.testing.assert_array_equal(rest.outputs[0].routed_experts, whole.outputs[0].routed_experts[39:])
    [pair] = llm.generate(prompts[:1], SamplingParams(n=2, seed=1, max_tokens=4, return_routed_experts=True))
    for completion in pair.outputs:
        check_by_reference(pair, completion)
    with pytest.raises(RequestError, match="routed_experts_prompt_start=41 must not exceed the prompt's 40 tokens"):
        llm.generate(prompts[0], SamplingParams(return_routed_experts=True, routed_experts_prompt_start=41))


def test_a_model_without_experts_says_so():
    expected = r"return_routed_experts cannot be given.*the model has no experts"
    with LLM(show_progress=False, kv_cache_memory="16MiB") as llm, pytest.raises(RequestError, match=expected):
        llm.generate("x", SamplingParams(return_routed_experts=True))
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts has no use.*no experts"):
        LLM(show_progress=False, kv_cache_memory="16MiB", enable_return_routed_experts=True)


def _experts_per_token(family):
    """Returns the number of experts that each router chooses for a token."""
    modules = [module for _, module in model(family.name).named_modules()]
    return [module.routing.num_experts_per_token for module in modules if isinstance(module, JaxRouter)]


@pytest.mark.parametrize("family", parity.FAMILIES, ids=lambda family: family.name)
def test_of_each_family(family):
    """The engine's own default, in place of a request's field."""
    if not (numbers := _experts_per_token(family)):
        pytest.skip("no experts")
    options = {"max_num_batched_tokens": 16, "kv_cache_memory": "8MiB", "enable_return_routed_experts": True}
    options |= {"dtype": "float32", "show_progress": False, "max_num_seqs": 2}
    if len(set(numbers)) > 1:
        with pytest.raises(ConfigError, match="different numbers of experts a token"):
            LLM(parity.checkpoint_folder(family), **options)
        return
    with LLM(parity.checkpoint_folder(family), **options) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": PROMPTS[3]}, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        )
    check(output, output.outputs[0], family.name)
