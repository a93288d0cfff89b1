"""Families that run layers several times: what parity with transformers does not show, and IQuest-Coder Loop, which
transformers lacks, against its equations in PyTorch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from jaxis import LLM, SamplingParams
from jaxis.bench.cost import prefill_cost
from jaxis.bringup.analyze.source import ModelSource
from jaxis.bringup.verify.compare import relative_error
from jaxis.calibration.calibrate import calibrate
from jaxis.compilation.targets import parse_target
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.parallel.stages import Stage
from jaxis.planning.plan import Planner, Wanted
from jaxis.quantization.arguments import parse_quantization
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.parity import FAMILIES, PADDING, prompt
from tests.support.tiny_checkpoints import write_tokenizer

CONFIG = {
    **{key: value for key, value in parity.SIZES.items() if value is not None},
    **{"architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder", "rms_norm_eps": 1e-5},
    **{"head_dim": 24, "rope_theta": 500_000.0, "loop_num": 2, "loop_window_size": 11, "hidden_act": "silu"},
    **{"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
}
HEADS, KV_HEADS, D, E = 4, 2, 24, 64


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (131, E), "lm_head.weight": (131, E), "model.norm.weight": (E,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        found |= {
            f"{layer}.self_attn.q_proj.weight": (HEADS * D, E),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * D, E),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * D, E),
            f"{layer}.self_attn.o_proj.weight": (E, HEADS * D),
            f"{layer}.mlp.gate_proj.weight": (96, E),
            f"{layer}.mlp.up_proj.weight": (96, E),
            f"{layer}.mlp.down_proj.weight": (E, 96),
            f"{layer}.input_layernorm.weight": (E,),
            f"{layer}.post_attention_layernorm.weight": (E,),
            f"model.gate_projections.{i}.weight": (HEADS, D),
            f"model.gate_projections.{i}.bias": (HEADS,),
        }
    return found


def expected_logits(
    tensors: Mapping[str, np.ndarray], ids: list[int], *, num_loops: int = 2, window: int = 11, dtype=torch.float32
) -> np.ndarray:
    """The equations of IQuest-Coder Loop: later passes mix two contexts by a gate, the product of query and weight."""
    weights = {name: torch.tensor(tensor).to(dtype) for name, tensor in tensors.items()}
    num_tokens = len(ids)
    frequencies = 500_000.0 ** -(torch.arange(0, D, 2, dtype=torch.float32).to(dtype) / D)
    angles = torch.outer(torch.arange(num_tokens).to(dtype), frequencies)
    cos, sin = (torch.cat([each(angles)] * 2, -1) for each in (torch.cos, torch.sin))
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ weights[name].T).reshape(num_tokens, -1, D).transpose(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: float) -> torch.Tensor:
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill((distance < 0) | (distance >= reach), -math.inf)
        return scores.softmax(-1) @ v

    x, first = weights["model.embed_tokens.weight"][torch.tensor(ids)], {}
    for number in range(num_loops):
        for i in range(2):
            layer, gate = f"model.layers.{i}", f"model.gate_projections.{i}"
            y = norm(x, f"{layer}.input_layernorm.weight")
            q, k = (rotated(heads(y, f"{layer}.self_attn.{name}_proj.weight")) for name in "qk")
            v = heads(y, f"{layer}.self_attn.v_proj.weight")
            if number == 0:
                first[i] = k, v
                out = attend(q, k, v, math.inf)
            else:
                logits = torch.einsum("htd,hd->ht", q, weights[f"{gate}.weight"]) + weights[f"{gate}.bias"][:, None]
                share = logits.sigmoid()[..., None]
                out = share * attend(q, *first[i], math.inf) + (1 - share) * attend(q, k, v, window)
            x = x + out.transpose(0, 1).reshape(num_tokens, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
            y = norm(x, f"{layer}.post_attention_layernorm.weight")
            gated, up = (y @ weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gated) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return (norm(x, "model.norm.weight") @ weights["lm_head.weight"].T).numpy()


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (("norm" in name) + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes().items()
    }


def write_checkpoint(folder: Path, tensors: Mapping[str, np.ndarray], **values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def coder(tensors, tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("coder"), tensors)


def load(folder: Path):
    config = ModelConfig(str(folder), HFConfig.from_folder(folder), dtype=jnp.float32, max_model_len=1024)
    return load_model(VllmConfig(config), make_mesh())


def test_iquest_coder_loop_computes_its_equations_in_every_path(tensors, coder):
    model = load(coder)
    whole = parity.run_model(model, (1, 17, 100))
    paged = PagedSequences(model)
    for length in (1, 17, 100):
        expected = expected_logits(tensors, prompt(length))
        assert relative_error(whole[length][0], expected) < 1e-5
        for chunk in (7, length):
            sequence, tokens = PagedSequence(), prompt(length)
            parts = [paged.step([(sequence, tokens[i : i + chunk])], **PADDING)[0] for i in range(0, length, chunk)]
            assert relative_error(np.concatenate(parts), expected) < 1e-5


def test_a_third_pass_has_a_window_of_its_own(tensors, tmp_path):
    folder = write_checkpoint(tmp_path, tensors, loop_num=3, loop_window_size=5)
    paged, sequence, tokens = PagedSequences(load(folder)), PagedSequence(), prompt(40)
    parts = [paged.step([(sequence, tokens[i : i + 9])], **PADDING)[0] for i in range(0, 40, 9)]
    expected = expected_logits(tensors, tokens, num_loops=3, window=5)
    assert relative_error(np.concatenate(parts), expected) < 1e-5


def test_greedy_tokens_of_the_engine_are_those_of_the_equations_with_prefixes_and_preemption(tensors, coder):
    prompts = [prompt(30, seed) for seed in range(3)]
    with LLM(
        str(coder),
        **{"dtype": "float32", "kv_cache_memory": "200KiB", "max_model_len": 64, "max_num_batched_tokens": 16},
        show_progress=False,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in [*prompts, prompts[0]]], greedy(12))
    for tokens, output in zip([*prompts, prompts[0]], outputs, strict=True):
        found = output.outputs[0].token_ids
        logits = expected_logits(tensors, [*tokens, *found[:-1]])
        assert list(found) == logits[len(tokens) - 1 :].argmax(-1).tolist()


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def hrm() -> str:
    return parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "HRM-Text"))


def test_a_step_reads_weights_and_caches_of_layers_as_often_as_they_run(hrm):
    """Reads of HRM-Text, of whose two layers one runs 6 times and the other twice."""
    path = Path(hrm, "config.json")
    source = ModelSource("hrm", str(path), json.loads(path.read_text()), None, "config.json alone")
    part = Planner(source, Wanted(quantization="none")).device_model(parse_target("h100x1"))
    layers = {"lower": 6, "upper": 2}
    weights, start, head = 5 * 32 * 2 * 24 + 3 * 32 * 96, 32, 131 * 32
    assert part.held_bytes == 4 * (len(layers) * weights + start + 2 * head)
    assert part.decode(1, 1).weight_bytes == 4 * (sum(layers.values()) * weights + start + head)
    assert part.decode(1, 10).context_bytes == 4 * 10 * sum(layers.values()) * 2 * 2 * 24
    config = ModelConfig(hrm, HFConfig.from_folder(hrm), dtype=jnp.float32, max_model_len=64)
    assert prefill_cost(VllmConfig(config)).layer_params == sum(layers.values()) * weights


def test_layers_that_run_again_are_in_one_pipeline_stage(hrm):
    config = ModelConfig(hrm, HFConfig.from_folder(hrm), dtype=jnp.float32, max_model_len=64)
    with pytest.raises(ConfigError, match="be divided into stages, since its layers run several times in a step"):
        construct_abstractly(VllmConfig(config), stage=Stage(0, 2))


def test_layers_that_run_again_are_not_calibrated(hrm, tmp_path):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(hrm, folder)
    write_tokenizer(folder)
    text.write_text("some text " * 1000)
    with pytest.raises(ConfigError, match="no DecoderModel whose layers calibration could run once, one by one"):
        calibrate(folder, text, parse_quantization("int8"), num_tokens=2048)


def test_dory_keeps_keys_and_values_of_each_loop_whatever_its_config_says():
    """With those of the last loop alone, logits of a prompt would depend on its chunks."""
    folder = parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "Dory"))
    with pytest.raises(ConfigError, match="recurrent_kv_cache_mode='last_loop'"):
        LLM(folder, hf_overrides={"recurrent_kv_cache_mode": "last_loop"})


def test_adapters_of_dory_s_head_are_refused():
    """PEFT adds after the scale of the logits."""
    folder = parity.checkpoint_folder(next(f for f in FAMILIES if f.name == "Dory"))
    with pytest.raises(ConfigError, match="no layer that requests can change has a name that ends in 'lm_head'"):
        LLM(folder, enable_lora=True, lora_target_modules=["lm_head"], kv_cache_memory="1MiB", max_model_len=64)


@pytest.mark.parametrize("size", [1, 7])
def test_the_gate_s_logits_do_not_depend_on_the_number_of_tokens(tensors, coder, size):
    gate = load(coder).decoder.layers[0].self_attn.loop_gate
    q = np.random.default_rng(1).standard_normal((1001, HEADS, D)).astype(np.float32)
    together = np.asarray(jax.jit(gate)(q))
    weight, bias = (tensors[f"model.gate_projections.0.{name}"].astype(np.float64) for name in ("weight", "bias"))
    expected = np.einsum("thd,hd->th", q.astype(np.float64), weight) + bias
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-6)
    for i in range(0, 70, size):
        np.testing.assert_array_equal(jax.jit(gate)(q[i : i + size]), together[i : i + size])
