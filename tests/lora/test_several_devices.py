"""Adapters of a model that several devices share: what one device answers, or a refusal that names the layer."""

from __future__ import annotations

import json

import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from jaxis.lora import LoRARequest
from tests.support.adapters import save_adapter
from tests.support.parity import FAMILIES, checkpoint_folder, prompt
from tests.support.simulated_devices import run_on_devices

ROWS = {family.name: family for family in FAMILIES}
# Linear layers apart; packed; with experts and recurrent layers; latent attention.
NAMES = ("Qwen3", "Phi-4", "Qwen3 MoE", "Qwen3.5", "Gemma 3", "Youtu")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


def answers(base, folders, num_devices, *targets, **arguments):
    """Of each adapter and of the base, in one batch: tokens and log-probabilities, or the error."""
    sizes = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 64, "show_progress": False}
    sizes |= {"lora_target_modules": ["all-linear", *targets], **arguments}
    with LLM(base, tensor_parallel_size=num_devices, enable_lora=True, max_loras=5, **sizes) as llm:
        adapters, refused = [None], {}
        for i, folder in enumerate(folders):
            adapter = LoRARequest(f"{i}", 1, folder)
            try:
                llm.generate([prompt(3)], PARAMS, lora_request=adapter)
                adapters.append(adapter)
            except ConfigError as error:
                refused[i] = str(error)
        outputs = llm.generate([prompt(17)] * len(adapters), PARAMS, lora_request=adapters)
    return refused, [
        [token, sorted((other, each.logprob) for other, each in logprobs.items())]
        for output in outputs
        for token, logprobs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_one_device(name, num_devices, tmp_path):
    base = checkpoint_folder(ROWS[name])
    is_packed, is_latent = name == "Phi-4", name == "Youtu"
    attention = ["qkv_proj", "o_proj"] if is_packed else ["q_proj", "k_proj", "v_proj", "o_proj"]
    if is_latent:
        attention = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    kinds = [
        attention,
        ["o_proj"],
        attention[:1] if not is_packed else ["down_proj"],
        ["embed_tokens", "o_proj"],
        ["lm_head"],
    ]
    folders = [
        str(save_adapter(base, tmp_path / f"{i}", seed=i, target_modules=kind, use_dora=kind == ["o_proj"]))
        for i, kind in enumerate(kinds)
    ]
    targets = ["embed_tokens", "lm_head"]
    refused, found = answers_on_devices(base, folders, num_devices, targets)
    has_other_rows = is_packed or (num_devices > 2 and not is_latent)  # with two key-value heads
    assert list(refused) == (["0"] if has_other_rows else [])
    assert all("several devices have the outputs" in message for message in refused.values())
    kept = [each for i, each in enumerate(folders) if str(i) not in refused]
    check_alike(found, answers(base, kept, 1, *targets))


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.parametrize("arguments", [{}, {"enable_expert_parallel": True}], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("name", ["Qwen3 MoE", "GPT-OSS"])
def test_changed_experts_answer_as_on_one_device(name, arguments, tmp_path):
    base = checkpoint_folder(ROWS[name])
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    folders = [
        str(save_adapter(base, tmp_path / f"{i}", seed=i, target_modules=["o_proj"], target_parameters=parameters))
        for i, parameters in enumerate((stacks, stacks[1:], None))
    ]
    refused, found = answers_on_devices(base, folders, 2, ["experts"], **arguments)
    assert not refused
    check_alike(found, answers(base, folders, 1, "experts"))


def answers_on_devices(base, folders, num_devices, targets, **arguments):
    """`answers` of a process with so many devices."""
    given = json.dumps([base, folders, num_devices, *targets])
    script = (
        "import json, sys; from tests.lora.test_several_devices import answers\n"
        f"print(json.dumps(answers(*json.loads(sys.argv[1]), **{arguments!r})))"
    )
    return json.loads(run_on_devices("-c", script, given, num_devices=num_devices).splitlines()[-1])


def check_alike(found, expected):
    """Answers are those of one device, all of whose adapters are taken."""
    refused, expected = expected
    assert not refused
    for (token, logprobs), (expected_token, expected_logprobs) in zip(found, expected, strict=True):
        assert token == expected_token
        assert [token for token, _ in logprobs] == [token for token, _ in expected_logprobs]
        assert [value for _, value in logprobs] == pytest.approx([value for _, value in expected_logprobs], abs=1e-4)
