"""Adapters over families against PEFT's unmerged models in float32: by request, and merged while loading.

`pytest -s tests/lora/test_families.py` prints a row of a table for each family.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file

from jaxis import LLM, SamplingParams
from jaxis.bringup.verify.compare import relative_error
from jaxis.errors import ConfigError
from jaxis.lora import LoRARequest
from jaxis.outputs import CompletionOutput
from tests.support.adapters import randomize
from tests.support.parity import FAMILIES, Family, checkpoint_folder, prompt, reference_model
from tests.support.quick_rows import quick_rows

QUICK = ("Qwen3", "Gemma 3")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
# All but one whose config.json has a key that nothing reads, which an engine refuses.
ROWS = {family.name: family for family in FAMILIES if family.name != "EXAONE 4, no windows"}
_CONVERT = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
# What PEFT refuses to change; what transformers multiplies by without asking it; and routers that give several results.
_WITHOUT = {
    **{kind: ["out_proj"] for kind in ("FalconH1Config", "Mamba2Config", "NemotronHConfig")},
    **{"FalconMambaConfig": ["out_proj", "dt_proj"], "JambaConfig": ["dt_proj"]},
    **{"Llama4TextConfig": ["router"], "Step3p7Config": ["gate"], "LongcatFlashConfig": ["classifier"]},
}
SIZES = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 64, "show_progress": False}
TOKENS = prompt(17)


class Trial:
    """PEFT's adapters of a family, of all linear layers but those that were refused.

    Attributes:
      refused: The ends of their names, and those of layers that PEFT cannot change.
    """

    def __init__(self, family: Family, folder: Path, **config: Any) -> None:
        self.family, self.folder, self._config = family, folder, config
        self.refused = list(_WITHOUT.get(family.config_class, ()))
        self.model: Any = None

    def save(self) -> Path:
        """Saves the next adapter."""
        config = peft.LoraConfig(
            target_modules="all-linear", exclude_modules=list(self.refused), r=4, lora_alpha=8, **self._config
        )
        # Of experts, PEFT would make parameters that it changes as well.
        with mock.patch(_CONVERT):
            self.model = peft.get_peft_model(copy.deepcopy(reference_model(self.family)), config).eval()
        randomize(self.model)
        folder = self.folder / str(len(self.refused))
        self.model.save_pretrained(folder)
        return folder

    def refuse(self, error: ConfigError) -> None:
        """Leaves out what the error names, which must be one of the layers; the rest of a line says why."""
        message = str(error)
        assert "\n" not in message
        found = re.search(r" changes '([^']+)'", message)
        assert found, message
        name = found[1]
        self.model.get_submodule(f"base_model.model.{name}.base_layer")
        end = ".".join(re.sub(r"^.*\.\d+\.", "", name).split("."))
        assert end not in self.refused, message
        self.refused.append(end)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """PEFT's logits [T, V]."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].double().numpy()


def by_request(trial: Trial) -> float:
    """The largest error of a log-probability, next to the largest logit."""
    with LLM(checkpoint_folder(trial.family), enable_lora=True, **SIZES) as llm:
        while True:
            request = LoRARequest("a", 1, trial.save())
            try:
                [output] = llm.generate([{"prompt_token_ids": TOKENS}], GREEDY, lora_request=request, progress=False)
            except ConfigError as error:
                trial.refuse(error)
                continue
            break
    completion = output.outputs[0]
    return logprob_error(completion, trial.logits(TOKENS + completion.token_ids))


def logprob_error(completion: CompletionOutput, logits: np.ndarray) -> float:
    """The largest error of a log-probability, next to the largest of the logits [T, V] of prompt and completion."""
    rows = logits - logits.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return max(
        abs(each.logprob - rows[len(TOKENS) - 1 + i, token]) / np.abs(logits).max()
        for i, step in enumerate(completion.logprobs or [])
        for token, each in step.items()
    )


def merged(trial: Trial) -> float:
    """The relative error of logits."""
    while True:
        adapter = trial.save()
        try:
            with LLM(checkpoint_folder(trial.family), adapter=adapter, merge=True, **SIZES) as llm:
                return relative_error(llm.compute_logits(TOKENS), trial.logits(TOKENS))
        except ConfigError as error:
            trial.refuse(error)


@pytest.mark.sampled
@pytest.mark.parametrize("name", quick_rows(ROWS, QUICK))
def test_adapters_compute_what_pefts_do_or_are_refused_by_name(name, tmp_path):
    trials = [Trial(ROWS[name], tmp_path / kind) for kind in ("request", "merged")]
    errors = by_request(trials[0]), merged(trials[1])
    cells = [f"{error:.1e} | {', '.join(trial.refused)}" for error, trial in zip(errors, trials, strict=True)]
    print(f"\n| {name} | {' | '.join(cells)} |")
    assert max(errors) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_adapters_with_magnitudes_compute_what_pefts_do_or_are_refused_by_name(name, tmp_path):
    trial = Trial(ROWS[name], tmp_path, use_dora=True)
    error = by_request(trial)
    print(f"\n| {name}, DoRA | {error:.1e} | {', '.join(trial.refused)} |")
    assert error < 2e-5


# PEFT cannot change the input of models with n-grams, which is a mean of several embeddings.
MEANS = ("LongCat-Flash-Lite", "LongCat 2.0")


@pytest.mark.parametrize("name", quick_rows([name for name in ROWS if name not in MEANS], ["Gemma 3"]))
def test_adapters_of_embeddings_compute_what_pefts_do(name, tmp_path):
    family = ROWS[name]
    base = copy.deepcopy(reference_model(family))
    table = base.get_input_embeddings()
    [end] = {path.rpartition(".")[2] for path, module in base.named_modules() if module is table}
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=[end], r=4, lora_alpha=8)).eval()
    randomize(adapted)
    adapted.save_pretrained(tmp_path)
    with LLM(checkpoint_folder(family), enable_lora=True, lora_target_modules=[end], **SIZES) as llm:
        [output] = llm.generate([TOKENS], GREEDY, lora_request=LoRARequest("a", 1, tmp_path), progress=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = adapted(torch.tensor([TOKENS + completion.token_ids])).logits[0].double()
        with adapted.disable_adapter():
            assert (
                relative_error(adapted(torch.tensor([TOKENS])).logits[0].numpy(), logits[: len(TOKENS)].numpy()) > 0.1
            )
    error = logprob_error(completion, logits.numpy())
    print(f"\n| {name}, embeddings | {error:.1e} |")
    assert error < 2e-5


# PEFT adds after Dory's scale of logits.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("Dory")])
def test_adapters_of_heads_compute_what_pefts_do(name, tmp_path):
    base = copy.deepcopy(reference_model(ROWS[name]))
    head = base.get_output_embeddings()
    [end] = {path.rpartition(".")[2] for path, module in base.named_modules() if module is head}
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=[end], r=4, lora_alpha=8)).eval()
    randomize(adapted)
    adapted.save_pretrained(tmp_path)
    with LLM(checkpoint_folder(ROWS[name]), enable_lora=True, lora_target_modules=[end], **SIZES) as llm:
        [output] = llm.generate([TOKENS], GREEDY, lora_request=LoRARequest("a", 1, tmp_path), progress=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = adapted(torch.tensor([TOKENS + completion.token_ids])).logits[0].double().numpy()
        with adapted.disable_adapter():
            assert relative_error(adapted(torch.tensor([TOKENS])).logits[0].numpy(), logits[: len(TOKENS)]) > 0.05
    error = logprob_error(completion, logits)
    print(f"\n| {name}, head | {error:.1e} |")
    assert error < 1e-5


LATENT = [
    *("Youtu", "DeepSeek V2 Lite", "DeepSeek V3", "Kimi K2", "DeepSeek V3.2", "GLM-5.2", "GLM-4.7 Flash"),
    *("Kimi Linear", "Ling 3", "A.X K1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_rows(LATENT, ["Youtu"]))
def test_latent_attentions_adapters_compute_what_pefts_do_in_any_batch(name, tmp_path):
    family, references = ROWS[name], []
    requests: list[LoRARequest | None] = [None]
    for i, end in enumerate(("kv_b_proj", "kv_b_proj|o_proj")):
        config = peft.LoraConfig(target_modules=rf".*\.({end})", r=4 + i, lora_alpha=8, use_dora=i > 0)
        adapted = peft.get_peft_model(copy.deepcopy(reference_model(family)), config).eval()
        randomize(adapted, seed=i)
        adapted.save_pretrained(tmp_path / str(i))
        requests.append(LoRARequest(f"{i}", 1, tmp_path / str(i)))
        references.append(adapted)
    with LLM(checkpoint_folder(family), enable_lora=True, max_loras=2, **SIZES) as llm:
        alone = []
        for request in requests:
            llm.engine.reset_prefix_cache()
            alone += llm.generate([TOKENS], GREEDY, lora_request=request, progress=False)
        llm.engine.reset_prefix_cache()
        together = llm.generate([TOKENS] * 3, GREEDY, lora_request=requests, progress=False)
    completions = [output.outputs[0] for output in alone]
    assert [output.outputs[0].logprobs for output in together] == [each.logprobs for each in completions]
    errors = []
    for adapted, completion in zip(references, completions[1:], strict=True):
        with torch.no_grad():
            logits = adapted(torch.tensor([TOKENS + completion.token_ids])).logits[0].double().numpy()
            with adapted.disable_adapter():
                base = adapted(torch.tensor([TOKENS])).logits[0].numpy()
        assert relative_error(base, logits[: len(TOKENS)]) > 0.05
        errors.append(logprob_error(completion, logits))
    print(f"\n| {name}, kv_b_proj | {max(errors):.1e} |")
    assert max(errors) < 1e-5


EXPERTS = [
    *("Qwen3 MoE", "Mixtral", "Qwen3.5 MoE", "GPT-OSS", "Llama 4", "DeepSeek V3", "MiniMax M2"),
    "Gemma 4, experts, values that are keys",
]


# Heads of 24 elements here, not of a multiple of 16 as published: for those there is no native attention, and bits
# depend on the rest of the batch without adapters, too.
NOT_INVARIANT = ("GPT-OSS", "Llama 4")


@pytest.mark.parametrize("name", quick_rows(EXPERTS, ["Qwen3 MoE"]))
def test_adapters_of_experts_compute_what_pefts_do_merged_and_by_request(name, tmp_path):
    family = ROWS[name]
    model = peft.get_peft_model(
        copy.deepcopy(reference_model(family)),
        peft.LoraConfig(
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            rank_pattern={r".*\.gate_up_proj": 4},
            r=2,
            lora_alpha=4,
        ),
    ).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
        with model.disable_adapter():
            assert relative_error(model(torch.tensor([TOKENS])).logits[0].numpy(), expected) > 0.1
    with LLM(checkpoint_folder(family), adapter=tmp_path, merge=True, **SIZES) as llm:
        error = relative_error(llm.compute_logits(TOKENS), expected)
    assert error < 1e-4
    requests = [None, LoRARequest("experts", 1, tmp_path), LoRARequest("plain", 2, tmp_path / "plain")]
    plain = peft.get_peft_model(copy.deepcopy(reference_model(family)), peft.LoraConfig(target_modules=["o_proj"]))
    randomize(plain)
    plain.save_pretrained(tmp_path / "plain")
    targets = ["all-linear", "experts"]
    with LLM(checkpoint_folder(family), enable_lora=True, max_loras=2, lora_target_modules=targets, **SIZES) as llm:
        alone = []
        for request in requests:
            llm.engine.reset_prefix_cache()
            alone += llm.generate([TOKENS], GREEDY, lora_request=request, progress=False)
        llm.engine.reset_prefix_cache()
        together = llm.generate([TOKENS] * 3, GREEDY, lora_request=requests, progress=False)
    completions = [output.outputs[0] for output in alone]
    if name not in NOT_INVARIANT:
        assert [output.outputs[0].logprobs for output in together] == [each.logprobs for each in completions]
    with torch.no_grad():
        logits = [
            each(torch.tensor([TOKENS + completion.token_ids])).logits[0].double().numpy()
            for each, completion in zip((model, plain.eval()), completions[1:], strict=True)
        ]
    errors = [logprob_error(*each) for each in zip(completions[1:], logits, strict=True)]
    print(f"\n| {name}, experts | merged {error:.1e} | by request {errors[0]:.1e} | beside them {errors[1]:.1e} |")
    assert max(errors) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-OSS", "Qwen3.5 MoE", "Qwen3 MoE"])
def test_square_stacks_are_served_where_peft_shows_which_side_is_of_the_inputs(name, tmp_path):
    """As GPT-OSS-20B's, whose experts have as many features inside as outside."""
    sizes = {"moe_intermediate_size": 64} if "moe_intermediate_size" in ROWS[name].config else {"intermediate_size": 64}
    family = dataclasses.replace(ROWS[name], name=f"{name}, square", config={**ROWS[name].config, **sizes})
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"], r=2, lora_alpha=4)
    model = peft.get_peft_model(copy.deepcopy(reference_model(family)), config).eval()
    randomize(model)
    for folder in (new := tmp_path / "new"), (old := tmp_path / "old"):
        model.save_pretrained(folder)
    config = json.loads((old / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    targets = ["all-linear", "experts"]
    with LLM(checkpoint_folder(family), enable_lora=True, lora_target_modules=targets, **SIZES) as llm:
        [output] = llm.generate([TOKENS], GREEDY, lora_request=LoRARequest("new", 1, new), progress=False)
        if name == "GPT-OSS":  # [experts, in, out], of which no version makes A of the outputs
            llm.generate([TOKENS], GREEDY, lora_request=LoRARequest("old", 2, old), progress=False)
        else:
            with pytest.raises(ConfigError, match=r"is square, so that its inputs cannot be told .* unless PEFT 0.19"):
                llm.generate([TOKENS], GREEDY, lora_request=LoRARequest("old", 2, old), progress=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS + completion.token_ids])).logits[0].double().numpy()
    if name == "GPT-OSS":  # whose checkpoint has stacks, not each expert's matrices
        with pytest.raises(ConfigError, match="change it by request"):
            LLM(checkpoint_folder(family), adapter=new, merge=True, **SIZES)
    else:
        with LLM(checkpoint_folder(family), adapter=new, merge=True, **SIZES) as llm:
            assert relative_error(llm.compute_logits(TOKENS), logits[: len(TOKENS)]) < 1e-5
        with pytest.raises(ConfigError, match=r"unless PEFT 0\.19"):
            LLM(checkpoint_folder(family), adapter=old, merge=True, **SIZES)
    with torch.no_grad(), model.disable_adapter():
        assert relative_error(model(torch.tensor([TOKENS])).logits[0].numpy(), logits[: len(TOKENS)]) > 0.05
    assert logprob_error(completion, logits) < 1e-5


@pytest.mark.slow
def test_adapters_of_each_experts_matrices_are_merged_and_served_by_request(tmp_path):
    """As PEFT has saved them with transformers 4, where each expert has linear layers."""
    family, rank, scale = ROWS["Qwen3 MoE"], 2, 2.0
    model = copy.deepcopy(reference_model(family))
    rng, tensors = torch.Generator().manual_seed(0), {}
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            experts = layer.mlp.experts
            gates, ups = experts.gate_up_proj.data.chunk(2, dim=1)
            for name, stack in (("gate_proj", gates), ("up_proj", ups), ("down_proj", experts.down_proj.data)):
                for expert, weight in enumerate(stack):
                    a = 0.3 * torch.randn((rank, weight.shape[1]), generator=rng)
                    b = 0.3 * torch.randn((weight.shape[0], rank), generator=rng)
                    weight += scale * b @ a
                    prefix = f"base_model.model.model.layers.{i}.mlp.experts.{expert}.{name}"
                    tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale}
    config["target_modules"] = ["gate_proj", "up_proj", "down_proj"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with LLM(checkpoint_folder(family), adapter=tmp_path, merge=True, **SIZES) as llm:
        assert relative_error(llm.compute_logits(TOKENS), expected) < 1e-5
    request, message = LoRARequest("a", 1, tmp_path), r"changes '.*experts.0.*_proj', for which requests have no room"
    with LLM(checkpoint_folder(family), enable_lora=True, **SIZES) as llm, pytest.raises(ConfigError, match=message):
        llm.generate([TOKENS], GREEDY, lora_request=request, progress=False)
    with LLM(checkpoint_folder(family), enable_lora=True, lora_target_modules=["experts"], **SIZES) as llm:
        [output] = llm.generate([TOKENS], GREEDY, lora_request=request, progress=False)
    completion = output.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS + completion.token_ids])).logits[0].double().numpy()
    assert logprob_error(completion, logits) < 1e-5
