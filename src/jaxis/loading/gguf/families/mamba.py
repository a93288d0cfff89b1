"""Mamba, Mamba2 and models with such layers: Jamba, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    BASE,
    DENSE,
    MLP_BIAS,
    RMS,
    ROUTED_EXPERTS,
    SIGMOID,
    SIZES,
    usual,
)
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.table import GGUF, Fact, Facts, constant, has, key, only, unused
from jaxis.loading.gguf.tensor_names import GGUFNames, each


def mixer_names(mixer: str, time_steps: str) -> dict[str, str]:
    """Returns the names of a Mamba layer's tensors. The time steps of Mamba2 have a bias only."""
    names = {"in": "in_proj", "conv1d": "conv1d", "dt": time_steps, "a": "A_log=", "d": "D=", "out": "out_proj"}
    return {f"ssm_{name}": f"{mixer}.{target}" for name, target in names.items()} | {"ssm_norm": f"{mixer}.norm"}


def mamba2_heads(reader: ConfigReader) -> tuple[int, int]:
    """Returns the heads of Mamba2, which files call the rank of the time steps, and their size."""
    keys = reader.keys
    inner_size, num_heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if not num_heads or inner_size % num_heads:
        raise ConfigError(f"{keys.source} has {num_heads} Mamba2 heads for {inner_size} features: use another file")
    return num_heads, inner_size // num_heads


def _mamba2(num_heads: str, head_dim: str) -> Fact:
    return Fact(lambda reader: dict(zip((num_heads, head_dim), mamba2_heads(reader), strict=True)))


MAMBA2_OF_HYBRIDS = (
    _mamba2("mamba_n_heads", "mamba_d_head"),
    key("mamba_d_state", "ssm.state_size"),
    key("mamba_n_groups", "ssm.group_count"),
    key("mamba_d_conv", "ssm.conv_kernel"),
    has("mamba_conv_bias", "ssm_conv1d.bias"),
    has("mamba_proj_bias", "ssm_in.bias"),
)
_EPSILON = key("layer_norm_epsilon", "attention.layer_norm_rms_epsilon", kind=float)
_BIASES = (has("use_bias", "ssm_in.bias"), has("use_conv_bias", "ssm_conv1d.bias"))
_ALONE = (
    SIZES,
    unused("feed_forward_length", "context_length"),  # of neither of which there is any
    _EPSILON,
    key("state_size", "ssm.state_size"),
    key("conv_kernel", "ssm.conv_kernel"),
    _BIASES,
)
_MAMBA = (_ALONE, key("intermediate_size", "ssm.inner_size"), key("time_step_rank", "ssm.time_step_rank"))
_NORM = {"attn_norm": "norm"}
_MAMBA_NAMES = GGUFNames(mixer_names("mixer", "dt_proj") | _NORM | {"ssm_x": "mixer.x_proj"})
_JAMBA_NAMES = GGUFNames(
    {
        **mixer_names("mamba", "dt_proj"),
        "ssm_x": "mamba.x_proj",
        **each("dt b c", "ssm_{}_norm", "mamba.{}_layernorm"),
    }
)
_FALCON_H1_NAMES = GGUFNames(
    # In the file without a suffix.
    mixer_names("mamba", "dt_bias=") | {"ffn_norm": "post_attention_layernorm.weight="}
)
_NEMOTRON_NAMES = GGUFNames(
    {
        **mixer_names("mixer", "dt_bias="),
        **each("q k v", "attn_{}", "mixer.{}_proj"),
        **{"attn_output": "mixer.o_proj", **_NORM},
        **each("up down", "ffn_{}", "mixer.{}_proj"),
        **each("up down", "ffn_{}_shexp", "mixer.shared_experts.{}_proj"),
        **{"ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias="},
        **{"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
    },
    experts="mixer.experts",
)


def _expansion(reader: ConfigReader) -> Values:
    num_heads, head_dim = mamba2_heads(reader)
    if (size := num_heads * head_dim) % reader.hidden_size:
        raise ConfigError(f"{reader.keys.source} has {size} features, no multiple of {reader.hidden_size}")
    return {"expand": size // reader.hidden_size}


def _jamba_periods(reader: ConfigReader) -> Values:
    """The layers with attention or experts show the periods of layers."""
    keys = reader.keys
    attends = [heads > 0 for heads in reader.kv_heads_of_layers or [reader.num_kv_heads] * reader.num_layers]
    routes = [f"blk.{i}.ffn_gate_inp.weight" in keys.tensors for i in range(reader.num_layers)]
    values = _period(reader, "attn_layer", attends)
    values["mamba_expand"] = keys.integer("ssm.inner_size") // reader.hidden_size
    return values | (_period(reader, "expert_layer", routes) if any(routes) else {"num_experts": 1})


def _period(reader: ConfigReader, name: str, chosen: list[bool]) -> Values:
    indices = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    first = indices[0] if indices else 0
    period = indices[1] - first if len(indices) > 1 else max(len(chosen), first + 1)
    if not indices or first >= period or indices != list(range(first, len(chosen), period)):
        raise ConfigError(f"{reader.keys.source} has {name} in the layers {indices}, which follow no period")
    return {f"{name}_period": period, f"{name}_offset": first}


def _falcon_h1(reader: ConfigReader) -> Values:
    if "output.weight" not in reader.keys.tensors:
        raise ConfigError(
            f"{reader.keys.source} has no output.weight: what its logits are multiplied by is not in the file. Use the "
            "original checkpoint"
        )
    num_heads, head_dim = mamba2_heads(reader)
    return {"mamba_d_ssm": num_heads * head_dim}


_ONES = ("embedding", "lm_head", "ssm_in", "ssm_out", "attention_in", "attention_out", "key")
_MULTIPLIED_WEIGHTS = (
    [constant(f"{name}_multiplier", 1.0) for name in _ONES],
    constant("ssm_multipliers", [1.0] * 5),
    constant("mlp_multipliers", [1.0, 1.0]),
)


def _nemotron(feed_forward: str) -> Facts:
    """Returns the facts of Nemotron-H. Each layer has one part: the one whose size is not 0."""

    def read(reader: ConfigReader) -> Values:
        keys = reader.keys
        keys.expect("attention.layer_norm_epsilon", reader.values["layer_norm_epsilon"])
        sizes = keys.for_layers("feed_forward_length", reader.num_layers)
        if sizes is None or reader.kv_heads_of_layers is None:
            raise ConfigError(f"{keys.source} does not say which layers have attention: use another file")
        kinds = [
            "*" if heads else feed_forward if size else "M"
            for heads, size in zip(reader.kv_heads_of_layers, sizes, strict=True)
        ]
        return {"hybrid_override_pattern": "".join(kinds), "intermediate_size": max(sizes, default=0)}

    return (
        [BASE, _EPSILON, Fact(read), _mamba2("mamba_num_heads", "mamba_head_dim"), _BIASES],
        only("rope.scaling.finetuned", False),
        unused("rope.dimension_count", "rope.freq_base"),  # there is no rope
        key("ssm_state_size", "ssm.state_size"),
        key("n_groups", "ssm.group_count"),
        key("conv_kernel", "ssm.conv_kernel"),
    )


def _latent_size(reader: ConfigReader) -> Values:
    return {"moe_latent_size": size} if (size := reader.keys.integer("moe_latent_size", 0)) else {}


GGUFS = (
    # The norms without weights have an epsilon of their own, which the file lacks.
    GGUF(
        ("mamba", "falcon_mamba", "FalconMambaForCausalLM"),
        (_MAMBA, constant("mixer_rms_eps", 1e-6, is_assumed=True)),
        _MAMBA_NAMES,
        when="ssm.dt_b_c_rms",
        has_heads=False,
    ),
    GGUF(("mamba", "mamba", "MambaForCausalLM"), _MAMBA, _MAMBA_NAMES, has_heads=False),
    GGUF(
        ("mamba2", "mamba2", "Mamba2ForCausalLM"),
        (_ALONE, _mamba2("num_heads", "head_dim"), key("n_groups", "ssm.group_count"), Fact(_expansion)),
        GGUFNames(mixer_names("mixer", "dt_bias=") | _NORM),
        has_heads=False,
    ),
    GGUF(
        ("jamba", "jamba", "JambaForCausalLM"),
        (
            [BASE, RMS, DENSE],
            key("num_experts", "expert_count", 1),
            key("num_experts_per_tok", "expert_used_count", 1),
            key("mamba_d_state", "ssm.state_size"),
            key("mamba_d_conv", "ssm.conv_kernel"),
            key("mamba_dt_rank", "ssm.time_step_rank"),
            has("mamba_conv_bias", "ssm_conv1d.bias"),
            has("mamba_proj_bias", "ssm_in.bias"),
            Fact(_jamba_periods),
        ),
        _JAMBA_NAMES,
    ),
    GGUF(
        ("falcon-h1", "falcon_h1", "FalconH1ForCausalLM"),
        (
            [usual(1e11), ATTENTION_BIAS, MLP_BIAS, MAMBA2_OF_HYBRIDS, Fact(_falcon_h1)],
            has("projectors_bias", "ssm_out.bias"),
            has("mamba_rms_norm", "ssm_norm.weight"),
            constant("mamba_norm_before_gate", False),
            _MULTIPLIED_WEIGHTS,
        ),
        _FALCON_H1_NAMES,
    ),
    GGUF(("nemotron_h", "nemotron_h", "NemotronHForCausalLM"), (_nemotron("-"), MLP_BIAS), _NEMOTRON_NAMES),
    GGUF(
        ("nemotron_h_moe", "nemotron_h", "NemotronHForCausalLM"),
        (
            [_nemotron("E"), ROUTED_EXPERTS, Fact(_latent_size)],
            only("expert_gating_func", SIGMOID),
            key("n_routed_experts", "expert_count"),
            only("expert_shared_count", 1),
            constant("n_shared_experts", 1),
            key("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ),
        _NEMOTRON_NAMES,
        without=("intermediate_size",),
    ),
)
