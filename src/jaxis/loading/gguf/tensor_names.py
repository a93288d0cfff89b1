"""Names of tensors in GGUF files and in jaxis' models, which have Llama's and, for experts, DeepSeek's names.

The `renames` of the model's class lead from there to the names in Hugging Face checkpoints. `renames.json` has those of
the classes with GGUF files, so that a header is read without JAX; `python -m tools.supported_models` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

OF_EACH_HEAD = ".{head}"
"""Suffix of names in the layer for tensors that the checkpoint has for each head, and the file all in one."""

OF_EACH = "{}"
"""Number in the name of a tensor outside layers, where the file has several tensors in one."""

OF_TABLE = "{layer}"
"""Number in the name of a layer's table, which the file has outside layers."""


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


def each(members: str, stored: str, name: str) -> dict[str, str]:
    """Returns names in the file -> in the layer of several tensors; `{}` stands for the member."""
    return {stored.replace("{}", member): name.replace("{}", member) for member in members.split()}


_BLOCK = {
    **each("q k v", "attn_{}", "self_attn.{}_proj"),
    **each("q k", "attn_{}_norm", "self_attn.{}_norm"),
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **each("gate up down", "ffn_{}", "mlp.{}_proj"),
    **each("gate up down", "ffn_{}_shexp", "mlp.shared_experts.{}_proj"),
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias=",
}
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's, despite its name
    "output": "lm_head",
}
NORM_AFTER_ATTENTION = {"ffn_norm": "", "post_attention_norm": "post_attention_layernorm"}
NORMS_AFTER = NORM_AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}
NORMS_AROUND = NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
PACKED = {"attn_qkv": "self_attn.qkv_proj"}
GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_COEFFICIENTS = (("fn", "fn"), ("base", "base="), ("scale", "scale="))
CONNECTIONS = {f"hc_{block}_{part}": f"{block}_hc.{name}" for block in ("attn", "ffn") for part, name in _COEFFICIENTS}
CONNECTION_OF_OUTPUT = {f"output_hc_{part}": f"model.norm.mixer.{name}" for part, name in _COEFFICIENTS}
W1_W3_W2 = ("w1", "w3", "w2")
"""Projections of Mixtral's experts."""


@dataclass(frozen=True)
class GGUFNames:
    """Names of an architecture's tensors.

    Attributes:
      block: Name in the file, without `blk.N.` and `.weight`, -> name in the layer, where it is not the usual one; ""
        if files do not have the usual one. A value that ends in "=" is the whole name, without `.weight` or `.bias`.
        One that ends in "[0]" is of the tensor's first rows; the rows of "[1]" follow. See also OF_EACH_HEAD. A name in
        the file that ends in a suffix, such as `.scale`, is for tensors with that suffix only.
      top_level: Name in the file, without `.weight` or `.bias`, -> name, of further tensors outside layers. See also
        OF_EACH.
      experts: Name in the layer of the module with the experts.
      projections: Names of an expert's gate, up and down projections.
      stack: Order of the checkpoint's tensors of all experts, which names here are of each; None if it has each.
      permutes_rope: True if rows of queries and keys are stored so that rotated dimensions are neighbours.
      adds_one_to_norms: True if the file's norms include the 1 that the model adds; not the norms of states.
      groups_qkv: True if the checkpoint's projection has queries, key and value of each group of heads together, and
        the file's has all queries, all keys and all values.
      renames: (Name here, name in checkpoints), both within dots, applied one after the other; None: the class's.
    """

    block: Mapping[str, str] = field(default_factory=dict[str, str])
    _: KW_ONLY
    top_level: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stack: GateUpOrder | None = None
    permutes_rope: bool = False
    adds_one_to_norms: bool = False
    groups_qkv: bool = False
    renames: Sequence[tuple[str, str]] | None = None

    @functools.cached_property
    def of_block(self) -> Mapping[str, str]:
        """Name in the file -> name in the layer, all of them."""
        return {stored: name for stored, name in (_BLOCK | dict(self.block)).items() if name}

    @functools.cached_property
    def of_top_level(self) -> Mapping[str, str]:
        return _TOP_LEVEL | dict(self.top_level)

    def of_class(self, model_class: str) -> GGUFNames:
        """Returns these names with the renames of a class."""
        return dataclasses.replace(self, renames=renames_of(model_class))

    def in_checkpoint(self, name: str) -> str:
        """Returns the name in a Hugging Face checkpoint of a tensor here."""
        dotted = f".{name}."
        for here, there in self.renames or ():
            dotted = dotted.replace(here, there)
        return dotted[1:-1]


USUAL_NAMES = GGUFNames()


@functools.cache
def renames_of(model_class: str) -> Sequence[tuple[str, str]]:
    """Returns the renames of a class; see `GGUFNames`."""
    return json.loads(Path(__file__).with_name("renames.json").read_text("utf-8")).get(model_class, ())
