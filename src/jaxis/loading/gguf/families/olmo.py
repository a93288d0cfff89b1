"""OLMo 1 to 3, and OLMoE."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, BASE, DENSE, experts, usual, windows
from jaxis.loading.gguf.config_reader import SLIDING, ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, key, only
from jaxis.loading.gguf.tensor_names import NORMS_AFTER, GGUFNames

_OLMO2 = (usual(500_000.0), ATTENTION_BIAS)
_OLMO2_NAMES = GGUFNames(NORMS_AFTER)


def _read_local_base(reader: ConfigReader) -> Values:
    theta = reader.keys.get("rope.freq_base_swa")
    return {} if theta is None else {"rope_local_base_freq": theta}


def _write_windows(config: HFConfig) -> FileKeys:
    return {
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config["layer_types"]],
        "rope.freq_base_swa": rope_config(config, SLIDING).theta,
    }


GGUFS = (
    # The norms have neither weights nor another epsilon.
    GGUF(
        ("olmo", "olmo", "OlmoForCausalLM"),
        (
            [BASE, DENSE, rope(), ATTENTION_BIAS, key("clip_qkv", "attention.clamp_kqv", None, float)],
            only("attention.layer_norm_epsilon", 1e-5),
        ),
        GGUFNames(permutes_rope=True),
    ),
    GGUF(
        ("olmo2", "olmo3", "Olmo3ForCausalLM"),
        (_OLMO2, windows(4), Fact(_read_local_base, _write_windows)),
        _OLMO2_NAMES,
        when="attention.sliding_window",
        written=Written(window=True),
    ),
    GGUF(("olmo2", "olmo2", "Olmo2ForCausalLM"), _OLMO2, _OLMO2_NAMES, written=Written(window=True)),
    # By llama.cpp, the weights of experts are not normalised.
    GGUF(
        ("olmoe", "olmoe", "OlmoeForCausalLM"),
        (usual(), experts("num_experts"), constant("norm_topk_prob", False, is_assumed=True)),
    ),
)
