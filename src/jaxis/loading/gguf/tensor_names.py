"""Names of a family's tensors in GGUF files and in Hugging Face checkpoints, and the names that families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

OF_EACH_HEAD = ".{head}"
"""Suffix of names in the layer for tensors that the checkpoint has for each head, and the file all in one."""

OF_EACH = "{}"
"""Number in the name of a tensor outside layers, where the file has several tensors in one."""


@dataclass(frozen=True)
class GateUpOrder:
    """The order in which a checkpoint's tensor of all experts joins the outputs of gate and up.

    Attributes:
      interleaved: True if they alternate, instead of all of gate's coming first.
      outputs_first: True if the tensors of all experts are [X, out, in], instead of [X, in, out].
      gate_up, down: Names of the tensors beside the experts' own.
    """

    interleaved: bool = False
    outputs_first: bool = False
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"


@dataclass(frozen=True)
class GGUFNames:
    """Names of an architecture's tensors in Hugging Face checkpoints.

    Attributes:
      block: Name in the file, without `blk.N.` and `.weight`, -> name in the layer. A value that ends in "=" is the
        whole name, without `.weight` or `.bias`. One that ends in "[0]" is of the tensor's first rows; the rows of
        "[1]" follow. See also OF_EACH_HEAD. A name in the file that ends in a suffix, such as `.scale`, is for tensors
        with that suffix only.
      experts: Name in the layer of the module with the experts.
      projections: Names of an expert's gate, up and down projections.
      stack: Order of the checkpoint's tensors of all experts, which `block` names as if each had its own; None if each
        has.
      permutes_rope: True if rows of queries and keys are stored so that rotated dimensions are neighbours.
      adds_one_to_norms: True if the file's norms include the 1 that the model adds; not the norms of states.
      groups_qkv: True if the checkpoint's projection has queries, key and value of each group of heads together, and
        the file's has all queries, all keys and all values.
      norm: Name of the norm after the last layer.
      layers: Name of the list of layers.
      top_level: Name in the file, without `.weight` or `.bias`, -> name, of tensors outside layers; the same for all
        decoders. See also OF_EACH.
    """

    block: Mapping[str, str]
    _: KW_ONLY
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stack: GateUpOrder | None = None
    permutes_rope: bool = False
    adds_one_to_norms: bool = False
    groups_qkv: bool = False
    norm: str = "model.norm"
    layers: str = "model.layers"
    top_level: Mapping[str, str] = field(default_factory=dict[str, str])


def each(members: str, stored: str, name: str) -> dict[str, str]:
    """Returns names in the file -> in the layer of several tensors; `{}` stands for the member."""
    return {stored.replace("{}", member): name.replace("{}", member) for member in members.split()}


ATTENTION = {
    **each("q k v", "attn_{}", "self_attn.{}_proj"),
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
HEAD_NORMS = each("q k", "attn_{}_norm", "self_attn.{}_norm")
MLP = each("gate up down", "ffn_{}", "mlp.{}_proj")
FEED_FORWARD = each("gate up down", "ffn_{}", "feed_forward.{}_proj")
LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LLAMA = ATTENTION | LLAMA_NORMS | MLP
ROUTER = {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias="}
SHARED_EXPERTS = each("gate up down", "ffn_{}_shexp", "mlp.shared_experts.{}_proj")
SHARED_EXPERT = each("gate up down", "ffn_{}_shexp", "mlp.shared_expert.{}_proj") | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
W1_W3_W2 = ("w1", "w3", "w2")
"""Projections of Mixtral's experts."""


def packed(attention: str, output: str, up: str, down: str) -> dict[str, str]:
    """Returns the names of a layer with one projection of queries, keys and values, and a block without a gate."""
    return {"attn_qkv": attention, "attn_output": output, "ffn_up": up, "ffn_down": down}
