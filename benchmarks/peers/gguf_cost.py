"""What a decode step of llama.cpp and its relatives reads of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxis.bench.cost import DecodeCost

_KV_FIELDS = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "block_count")
_KV_ITEMSIZE = 2  # their cache is float16 unless told otherwise


def gguf_decode_cost(file: Path) -> DecodeCost:
    """The decode cost with weights as the file has them and a float16 cache."""
    import gguf

    from jaxis.bench.cost import DecodeCost, bytes_read

    names = {"token_embd.weight": "embed_tokens", "output.weight": "lm_head"}
    reader = gguf.GGUFReader(file)
    weights = {names.get(tensor.name, tensor.name): int(tensor.n_bytes) for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture").contents()
    fields = {name: reader.get_field(f"{architecture}.{name}").contents() for name in _KV_FIELDS}
    kv_numbers = fields["attention.key_length"] + fields["attention.value_length"]
    kv_numbers *= fields["block_count"] * fields["attention.head_count_kv"]
    return DecodeCost(bytes_read(weights), kv_numbers * _KV_ITEMSIZE)
