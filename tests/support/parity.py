"""Every supported family against transformers: what is compared, and how far apart it is.

`test_parity.py` holds the figures to their limits. To add a family, add a row to tests/data/families.yaml, which says
what the fields mean.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
import yaml
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from jaxis.bringup.verify.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.deepseek_v41_reference import ROPE_SCALING, DeepseekV41Reference
from tests.support.iquest_reference import IQuestLoopReference
from tests.support.kimi_k3_reference import KimiK3Reference
from tests.support.ling25_reference import Ling25Reference
from tests.support.longcat_ngram_reference import Longcat2Reference, LongcatNgramReference
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.places import TESTS
from tests.support.step5_reference import Step5Reference

# Threads cost more than they gain on models this small.
torch.set_num_threads(1)

PROMPT_LENGTHS = (1, 17, 500)
PAGED_LENGTH = 100  # crosses many blocks and stays within every family's `max_position_embeddings`
GREEDY_TOKENS = 24  # past a prompt of 17, that is beyond every window
SINGLE_STEPS = 24  # of one token each, from the first on: two windows, several blocks
NUM_KEPT = 2  # families whose models, programs and figures are kept for the next test; tests go family by family

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One row of tests/data/families.yaml, which describes the fields."""

    name: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    architecture: str | None = None
    other_parts: dict[str, Any] | None = field(default=None, hash=False)
    slow: bool = False
    every_path: bool = False
    gguf: dict[str, Any] = field(default_factory=dict, hash=False)


# References of models that transformers does not have.
RESTATED = {
    "BailingMoeV2_5ForCausalLM": Ling25Reference,
    "IQuestLoopCoderForCausalLM": IQuestLoopReference,
    "KimiK3ForCausalLM": KimiK3Reference,
    "DeepseekV41ForCausalLM": DeepseekV41Reference,
    "LongcatFlashNgramForCausalLM": LongcatNgramReference,
    "LongcatCausalLM": Longcat2Reference,
    "Step5ForCausalLM": Step5Reference,
}
# By name: to import the classes takes seconds, in each worker.
MODEL_TYPES = {config_class: model_type for model_type, config_class in CONFIG_MAPPING_NAMES.items()}


def architecture_of(family: Family) -> str:
    """Name of its model in config.json."""
    model_type = MODEL_TYPES.get(family.config_class, "")
    return family.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")


def rope(rope_type: str = "default", theta: float = 10_000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **settings}}


def longrope(pairs: int, **settings: Any) -> dict[str, Any]:
    """Long frequencies for every prompt but that of one token: a paged engine cannot change sets in mid-sequence."""
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.5 * i for i in range(pairs)],
    }
    return {"original_max_position_embeddings": 16, **rope("longrope", factor=64.0, **factors, **settings)}


def _read(path: Path) -> Iterator[Family]:
    for row in yaml.safe_load(path.read_text())["families"]:
        yield Family(**row)


FAMILIES = tuple(_read(TESTS / "data" / "families.yaml"))
# Rows whose tests are slow ones, and those of which all paths are compared every time.
SLOW_NAMES = {family.name for family in FAMILIES if family.slow}
EVERY_KIND = {family.name for family in FAMILIES if family.every_path}


@lru_cache(NUM_KEPT)
def reference_model(family: Family) -> transformers.PreTrainedModel:
    """A tiny transformers model whose every parameter, norms and biases included, is random."""
    values = {
        key: value
        for key, value in (SIZES | family.config).items()
        # None leaves a size out, which the family calls otherwise; every other key has it as a value.
        if value is not None or key not in SIZES or key.endswith("token_id")
    }
    if family.other_parts is not None:
        values = {"text_config": values, **family.other_parts}
    # Eagerly, the reference adds Falcon's ALiBi twice.
    attention = "sdpa" if values.get("alibi") else "eager"
    config = getattr(transformers, family.config_class)(**values, attn_implementation=attention)
    torch.manual_seed(0)
    auto_class = transformers.AutoModelForCausalLM
    if family.other_parts is not None or family.config_class == "Mistral4Config":  # listed with models that see
        auto_class = transformers.AutoModelForMultimodalLM
    restated = RESTATED.get(family.architecture or "")
    model = (auto_class.from_config(config) if restated is None else restated(config)).float().eval()
    for name, _ in list(model.model.named_children()) if family.other_parts is not None else ():
        # Qwen2-Audio's reference asks its encoder for its type even without sound.
        if name not in ("language_model", "text_model") and family.config_class != "Qwen2AudioConfig":
            delattr(model.model, name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms around 1, so that a missing one shows and activations keep their size. But not what all keys of an
            # indexer have in common: many scores would be 0, and torch.topk takes any of equals.
            center = 1.0 if "norm" in name and not name.endswith("indexer.k_norm.bias") else 0.0
            parameter.copy_(center + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            if name.endswith("tid2eid"):
                experts = torch.rand(len(buffer), family.config["n_routed_experts"]).argsort(dim=1)
                buffer.copy_(experts[:, : buffer.shape[1]])
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn_like(buffer))
    for module in model.modules():
        if hasattr(module, "recurrent_states") or hasattr(module, "conv1d_state"):
            module.register_forward_hook(_detach_states)
    return model


def _detach_states(module: torch.nn.Module, *_: object) -> None:
    """Makes a model copyable that keeps states as attributes of modules (RecurrentGemma)."""
    for name in ("recurrent_states", "conv1d_state"):
        if isinstance(state := getattr(module, name, None), torch.Tensor):
            setattr(module, name, state.detach())


@functools.cache  # small, and asked for by tests of several files
def checkpoint_folder(family: Family) -> str:
    """The model saved as transformers saves it. The folder goes when the process does."""
    folder = tempfile.TemporaryDirectory(prefix="jaxis_parity_")
    _folders.append(folder)
    reference_model(family).save_pretrained(folder.name)
    if (rename := RENAMED.get(family.architecture or family.config_class)) is not None:
        path = Path(folder.name, "model.safetensors")
        save_file(rename(load_file(path)), path, {"format": "pt"})
    if family.architecture is not None:
        path = Path(folder.name, "config.json")
        saved = json.loads(path.read_text())
        values = saved if family.other_parts is None else saved["text_config"]
        published = _PUBLISHED_KEYS.get(family.architecture, {})
        path.write_text(json.dumps(values | {"architectures": [family.architecture], **published}))
    return folder.name


# What transformers saves under other names than those that it was published with, and that it loads as well.
def _published_kimi_linear(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the feed-forward block of dense layers, too, as a mixture's."""
    pattern = re.compile(r"\.block_sparse_moe\.(gate_proj|up_proj|down_proj)\.")
    return {pattern.sub(r".mlp.\1.", name): tensor for name, tensor in tensors.items()}


def _published_bailing_hybrid(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the last projection of layers with a state, too, as that of latent attention."""
    linear = {name.removesuffix("A_log") for name in tensors if name.endswith(".A_log")}
    renamed = {f"{prefix}dense.weight": f"{prefix}o_proj.weight" for prefix in linear}
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _published_olmo_hybrid(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the convolutions in three equal parts, and the norms after attention as those of other layers."""
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        prefix = name.removesuffix("q_conv1d.weight")
        joined = np.concatenate([tensors[f"{prefix}{part}_conv1d.weight"] for part in "qkv"])
        ends = np.cumsum([len(tensors[f"{prefix}{part}_proj.weight"]) for part in "qk"])
        for part, rows in zip("qkv", np.split(joined, ends), strict=True):
            tensors[f"{prefix}{part}_conv1d.weight"] = np.ascontiguousarray(rows)
    for name in [name for name in tensors if name.endswith(".self_attn.q_norm.weight")]:
        prefix = name.removesuffix("self_attn.q_norm.weight")
        norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm
    return tensors


def _published_cohere2_vision(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves the text model's tensors under two prefixes."""
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}


def _published_dory(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Attention and feed-forward block of a layer are two layers."""

    def name_of(name: str) -> str:
        for old, offset, new in (
            *(("self_attn.", 0, "mixer."), ("mlp.", 1, "mixer.")),
            *(("lambda_1", 0, "attn_alpha"), ("lambda_2", 1, "mlp_alpha")),
        ):
            found = re.fullmatch(rf"backbone\.layers\.(\d+)\.{re.escape(old)}(.*)", name)
            if found is not None:
                return f"backbone.layers.{2 * int(found[1]) + offset}.{new}{found[2]}"
        return name

    return {name_of(name): tensor for name, tensor in tensors.items()}


def _published_internlm2(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Llama's tensors as InternLM 2 was published: its names, and a projection of each group of heads after another."""
    names = {
        **{"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo"},
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        **{"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"},
    }
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            q, k, v = (tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv")
            groups = SIZES["num_key_value_heads"]
            rows = [each.reshape(groups, -1, each.shape[1]) for each in (q, k, v)]
            packed = np.concatenate(rows, axis=1).reshape(-1, q.shape[1])
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = packed
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = tensor
    return found


def _published_longcat(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """It saves weights of experts that are the identity, and the reference of n-grams has them as `embed_tokens`."""
    experts = {int(found[1]) for name in tensors if (found := re.search(r"experts\.(\d+)\.down_proj", name))}
    return {
        name.replace("embed_tokens.", "ngram_embeddings.") if "embed_tokens.weight" not in name else name: tensor
        for name, tensor in tensors.items()
        if (found := re.search(r"experts\.(\d+)\.", name)) is None or int(found[1]) in experts
    }


def _published_longcat2(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Numbers of tables are a part of their names."""
    names = {"embed_tokens.word_embeddings": "embed_tokens"}
    names |= {f"embed_tokens.embedders.{i}": f"oe_embed_tokens{i}" for i in range(12)}
    names |= {f"embed_tokens.post_projs.{i}": f"oe_embed_proj{i}" for i in range(12)}
    renamed = {f"model.{old}.weight": f"model.{new}.weight" for old, new in names.items()}
    return _published_longcat({renamed.get(name, name): tensor for name, tensor in tensors.items()})


_PUBLISHED_KEYS = {
    "LongcatCausalLM": {"model_type": "longcat2", "attention_method": "LSA"},
    "DeepseekV41ForCausalLM": {
        **{"model_type": "deepseek_v41_text", "rope_scaling": ROPE_SCALING, "tie_word_embeddings": False},
    },
    "Telechat3ForCausalLM": {
        **{"model_type": "telechat3", "rope_parameters": None, "rope_theta": 1_000_000.0},
        "rope_scaling": {
            **{"rope_type": "telechat3-yarn", "type": "telechat3-yarn", "rope_theta": 1_000_000.0, "factor": 4.0},
            "original_max_position_embeddings": 256,
        },
    },
    "GraniteForCausalLM": {"model_type": "granite", "attention_sinks": True},
    "MiniCPMForCausalLM": {
        **{"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 20},
        **{"embedding_multiplier": None, "residual_multiplier": None, "logits_scaling": None},
        **{"attention_multiplier": None, "mlp_bias": None},
    },
    "BailingMoeV2ForCausalLM": {
        **{"model_type": "bailing_moe", "num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": False},
        **{"n_routed_experts": None, "n_shared_experts": None, "attention_bias": None},
    },
    "BailingMoeV2_5ForCausalLM": {
        # Of lightning attention; the reference would read it for all layers.
        "partial_rotary_factor": 0.5,
        **{"head_dim": 24, "layer_types": None, "mlp_layer_types": None, "linear_head_dim": None},
        **{"linear_num_heads": None, "linear_conv_kernel_dim": None, "short_conv_kernel_size": None},
        **{"kda_safe_gate": None, "kda_lower_bound": None, "num_experts_per_tok": 3, "num_experts_per_token": None},
        **{"n_group": 4, "num_expert_group": None, "norm_topk_prob": True, "moe_renormalize": None},
    },
    "InternLM2ForCausalLM": {"model_type": "internlm2", "bias": False, "attention_bias": None, "mlp_bias": None},
}
RENAMED = {
    "InternLM2ForCausalLM": _published_internlm2,
    "Cohere2VisionConfig": _published_cohere2_vision,
    "BailingHybridConfig": _published_bailing_hybrid,
    "DoryConfig": _published_dory,
    "KimiLinearConfig": _published_kimi_linear,
    "LongcatFlashConfig": _published_longcat,
    "LongcatFlashNgramForCausalLM": _published_longcat,
    "LongcatCausalLM": _published_longcat2,
    "OlmoHybridConfig": _published_olmo_hybrid,
}


_folders: list[tempfile.TemporaryDirectory] = []


@lru_cache(2 * NUM_KEPT)
def loaded_model(family: Family, dtype: Any = jnp.float32) -> nnx.Module:
    """The checkpoint as jaxis loads it."""
    folder = checkpoint_folder(family)
    model_config = ModelConfig(folder, HFConfig.from_folder(folder), dtype=dtype, max_model_len=1024)
    return load_model(VllmConfig(model_config), make_mesh())


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, SIZES["vocab_size"], length).tolist()


@lru_cache(8 * NUM_KEPT)
def reference_run(family: Family, length: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """transformers' logits [T, V] and hidden states (entering each layer, and after the final norm), each [T, E]."""
    model, input_ids = reference_model(family), torch.tensor([prompt(length)])
    with torch.no_grad():
        result = model(input_ids, output_hidden_states=True, use_cache=False)
        hidden_states = result.hidden_states
        if family.config_class in ("FalconMambaConfig", "Mamba2Config"):  # which list what leaves each layer
            hidden_states = (model.get_input_embeddings()(input_ids), *hidden_states[:-2], hidden_states[-1])
        if family.config_class in ("DoryConfig", "HrmTextConfig"):  # which list what leaves each run of a layer
            hidden_states = (*_inputs_of_layers(model, input_ids), hidden_states[-1])
        if family.architecture in (
            "LongcatFlashNgramForCausalLM",
            "LongcatCausalLM",
        ):  # whose first layer adds the n-grams
            hidden_states = (model.model.embed_tokens.word_embeddings(input_ids), *hidden_states[1:])
        if family.name == "OPT 350M":  # which lists what its last projection makes of it
            states: list[torch.Tensor] = []
            hook = model.model.decoder.project_out.register_forward_pre_hook(lambda _, args: states.append(args[0]))
            model(input_ids, use_cache=False)
            hook.remove()
            hidden_states = (*hidden_states[:-1], *states)
        if family.config_class == "Gemma3nTextConfig":  # [A, 1, T, E], and those that leave the last layer
            states = (states.transpose(0, 2).transpose(0, 1) for states in hidden_states[:-1])
            hidden_states = (*states, model.model(input_ids, use_cache=False).last_hidden_state)
    return result.logits[0].numpy(), [states[0].numpy() for states in hidden_states]


def _inputs_of_layers(model: transformers.PreTrainedModel, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """The states that enter each run of a layer, in the order of the runs."""
    states: list[torch.Tensor] = []
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    model(input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return states


def bfloat16_reference_logits(family: Family, length: int) -> np.ndarray:
    """transformers' logits [T, V] with everything in bfloat16."""
    model = copy.deepcopy(reference_model(family)).to(torch.bfloat16)
    with torch.no_grad():
        return model(torch.tensor([prompt(length)]), use_cache=False).logits[0].float().numpy()


@lru_cache(4 * NUM_KEPT)
def whole_run(
    family: Family, lengths: tuple[int, ...] = PROMPT_LENGTHS, dtype: Any = jnp.float32
) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """jaxis's `reference_run`, for prompts of these lengths in one flat batch without a cache."""
    return run_model(loaded_model(family, dtype), lengths)


def run_model(model: nnx.Module, lengths: tuple[int, ...]) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """`whole_run` of a model that has been loaded."""
    num_runs = sum(map(model.decoder.num_runs, range(len(model.decoder.layers))))
    model.decoder.aux_hidden_state_layers = tuple(range(num_runs))
    graph, state = nnx.split(model)
    model.decoder.aux_hidden_state_layers = ()

    @jax.jit
    def forward(state: nnx.State, input_ids: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, list]:
        merged = nnx.merge(graph, state)
        _, hidden, aux = merged(None, input_ids, metadata)
        # Of layers that pass on more, the hidden states come first.
        return merged.compute_logits(hidden), [*(jax.tree.leaves(states)[0] for states in aux), hidden]

    input_ids = jnp.asarray(np.concatenate([prompt(length) for length in lengths]), jnp.int32)
    logits, states = forward(state, input_ids, AttentionMetadata.for_whole_sequences(lengths))
    ends = np.cumsum(lengths)
    return {
        length: (np.asarray(logits)[end - length : end], [np.asarray(s)[end - length : end] for s in states])
        for length, end in zip(lengths, ends, strict=True)
    }


@lru_cache(2 * NUM_KEPT)
def paged_sequences(family: Family, dtype: Any = jnp.float32) -> PagedSequences:
    return PagedSequences(loaded_model(family, dtype), dtype=dtype)


# One size for every step, since compiling costs more than the padding.
PADDING = {"pad_tokens": PAGED_LENGTH + 4, "pad_requests": 4}


def prefill(family: Family, tokens: Sequence[int]) -> np.ndarray:
    """Logits of a whole prompt run in one step, padded."""
    (logits,) = paged_sequences(family).step([(PagedSequence(), tokens)], **PADDING)
    return logits


def chunked(family: Family, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits of a prompt run in chunks, each beside a decode of another sequence."""
    paged, sequence, other = paged_sequences(family), PagedSequence(), PagedSequence()
    parts = [
        paged.step([(sequence, tokens[i : i + chunk]), (other, [5])], **PADDING)[0]
        for i in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def prefix_shared(family: Family, tokens: Sequence[int], shared: int) -> np.ndarray:
    """Logits after a prefix whose blocks another sequence filled, while that one goes on beside it."""
    paged, owner = paged_sequences(family), PagedSequence()
    paged.step([(owner, tokens[:shared])], **PADDING)
    sequence = paged.fork(owner, shared)
    (logits, _) = paged.step([(sequence, tokens[shared:]), (owner, [7])], **PADDING)
    return logits


# (family, tokens) -> the first token whose logits it gives, and its and the following ones'.
PATHS = {
    "prefill": lambda family, tokens: (0, prefill(family, tokens)),
    "chunks of 7": lambda family, tokens: (0, chunked(family, tokens, 7)),
    "token by token": lambda family, tokens: (0, chunked(family, tokens[:SINGLE_STEPS], 1)),
    "shared prefix": lambda family, tokens: (64, prefix_shared(family, tokens, 64)),
}


def path_error(family: Family, path: str) -> float:
    """Relative error of a paged path's logits against transformers'."""
    start, logits = PATHS[path](family, prompt(PAGED_LENGTH))
    return relative_error(logits, reference_run(family, PAGED_LENGTH)[0][start : start + len(logits)])


def greedy_tokens(family: Family, tokens: Sequence[int], num_tokens: int = GREEDY_TOKENS) -> list[int]:
    """The most likely continuation, decoded through the cache."""
    paged, sequence = paged_sequences(family), PagedSequence()
    (logits,) = paged.step([(sequence, tokens)], **PADDING)
    produced = [int(logits[-1].argmax())]
    while len(produced) < num_tokens:
        (logits,) = paged.step([(sequence, produced[-1:])], **PADDING)
        produced.append(int(logits[-1].argmax()))
    return produced


def reference_greedy_tokens(family: Family, tokens: Sequence[int], num_tokens: int = GREEDY_TOKENS) -> list[int]:
    with torch.no_grad():
        output = reference_model(family).generate(
            torch.tensor([tokens]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
    return output[0, len(tokens) :].tolist()


def reference_states(family: Family, steps: Sequence[Sequence[int]]) -> Iterator[list[list[np.ndarray]]]:
    """transformers' cache after each of these steps, of each layer that has a state.

    Yields:
      For each layer the inputs of its convolution [W, C], and the recurrent state [H, ...] where it has one.
    """
    model = reference_model(family)
    name = "cache_params" if family.config_class == "Mamba2Config" else "past_key_values"
    cache, start = None, 0
    for tokens in steps:
        # Which Bamba does not find out itself where the first layer has a state.
        positions = torch.arange(start, start + len(tokens))[None]
        start += len(tokens)
        arguments = {} if name == "cache_params" else {"position_ids": positions}
        with torch.no_grad():
            cache = model(torch.tensor([tokens]), **{name: cache}, **arguments, use_cache=True)[name]
        layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
        yield [
            [layer.conv_states[0][0].T.numpy()]
            + [state[0].numpy() for state in layer.recurrent_states.values() if state is not None]
            for layer in layers
        ]


def layer_error(family: Family, length: int) -> float:
    """Largest relative error of any layer's hidden states."""
    states, expected = whole_run(family)[length][1], reference_run(family, length)[1]
    # The reference may have a token's residual streams in one row.
    # Of stored residuals and the current one, the last, transformers may list the current alone.
    pairs = ((a if a.size == e.size else a[:, -1], e) for a, e in zip(states, expected, strict=True))
    return max(relative_error(a, e.reshape(a.shape)) for a, e in pairs)


def logits_error(family: Family, length: int) -> float:
    return relative_error(whole_run(family)[length][0], reference_run(family, length)[0])
