"""A group of a compressed-tensors `quantization_config`: its modules, and their format.

Each format takes some settings of weights and activations; others are errors that name them. Activations in few bits or
with fixed scales are permitted by a file, not required: with int8 weights and activations they are quantized
dynamically, otherwise not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.weight_format import PLAIN, WeightFormat
from jaxis.quantization.formats.fp8_blocks import Fp8BlocksFormat
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.integers import Integers, IntQuantizedFormat, PackQuantizedFormat
from jaxis.quantization.formats.microscaling import GROUP_SIZE as MX_GROUP_SIZE
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.nvfp4 import GROUP_SIZE as NVFP4_GROUP_SIZE
from jaxis.quantization.formats.nvfp4 import NVFP4_PACKED
from jaxis.quantization.module_patterns import ModuleList, check_keys, names_of

# The columns of a group are not neighbours: the file has `weight_g_idx`.
_ACTORDERS_OF_GROUPS = ("group", "dynamic", True)
# Key -> its values, or None for any.
_GROUP_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("targets", "weights", "input_activations", "format")),
    "output_activations": (None,),
}
_ARGUMENTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
    **dict.fromkeys(("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")),
}
_ACTIVATION_KEYS = _ARGUMENTS | {
    "type": ("int", "float"),
    "strategy": ("token", "tensor", "group", "tensor_group", "attn_head"),
    "dynamic": (True, False, "local"),
    "actorder": (None, False),
}
_WEIGHT_KEYS = _ARGUMENTS | {
    "dynamic": (False,),
    # "weight" and "static" reorder only while quantizing; the file does not depend on it.
    "actorder": (None, False, "weight", "static", *_ACTORDERS_OF_GROUPS),
}
_SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")


@dataclass(frozen=True)
class Group:
    targets: ModuleList
    format: WeightFormat


def read_group(group: Any, default_format: Any, where: str) -> Group:
    """Reads one of `config_groups`; a group that names no format has the default. Errors call it `where`.

    Raises ConfigError if the group asks for something that is not implemented.
    """
    check_keys(group, _GROUP_KEYS, where)
    targets, file_format = group.get("targets"), group.get("format") or default_format
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{where}: targets={targets!r} must be a list of names")
    modules = ModuleList(names_of(targets, "targets"), f"{where.rpartition(' ')[2]}: targets")
    if file_format in _SPARSE_FORMATS:
        raise ConfigError(
            f"{where}: format={file_format!r} is not supported: use a checkpoint of the same model that is not sparse, "
            "such as one in pack-quantized or float-quantized"
        )
    if file_format not in _READERS:
        raise ConfigError(f"{where}: format={file_format!r} is not supported; known: {', '.join(_READERS)}")
    weights, activations = group.get("weights"), group.get("input_activations")
    if activations is not None:
        check_keys(activations, _ACTIVATION_KEYS, f"{where}: input_activations")
    if file_format == "dense" or weights is None:  # a group may be for activations only
        return Group(modules, PLAIN)
    where = f"{where}: weights"
    check_keys(weights, _WEIGHT_KEYS, where)
    return Group(modules, _READERS[file_format](weights, activations, where))


def integer_format(scheme: WeightScheme) -> WeightFormat:
    integers = Integers.of(scheme)
    return PackQuantizedFormat(integers) if integers.bits == 4 else IntQuantizedFormat(integers)


def scheme_of(weight_format: WeightFormat) -> WeightScheme | None:
    """Returns the scheme by which jaxis quantizes weights to this format; None if there is none."""
    if isinstance(weight_format, PackQuantizedFormat) and weight_format.has_order:
        return None
    if isinstance(weight_format, IntQuantizedFormat | PackQuantizedFormat):
        return weight_format.integers.scheme
    return None


def _integers(weights: Mapping[str, Any], activations: Mapping[str, Any] | None, where: str) -> Integers:
    _expect(weights, where, type=("int",))
    bits, symmetric = weights.get("num_bits", 8), weights.get("symmetric", True)
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ConfigError(f"{where}: num_bits={bits!r} is not supported; supported: 1 to 8")
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:  # older versions: -1 for one group a row
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    is_grouped = strategy == "group"
    has_size = type(group_size) is int and group_size > 0
    if strategy not in ("tensor", "channel", "group") or is_grouped != has_size:
        raise ConfigError(f"{where}: strategy={strategy!r} with group_size={group_size!r} is not supported")
    has_int8_input = activations is not None and (activations.get("type", "int"), activations.get("num_bits", 8)) == (
        "int",
        8,
    )
    return Integers(
        bits,
        group_size if is_grouped else None,
        has_one_scale=strategy == "tensor",
        has_zero_points=not symmetric,
        act_qtype="int8" if has_int8_input else None,
    )


def _pack_quantized(weights: Mapping[str, Any], activations: Any, where: str) -> WeightFormat:
    integers = _integers(weights, activations, where)
    has_order = integers.group_size is not None and weights.get("actorder") in _ACTORDERS_OF_GROUPS
    return PackQuantizedFormat(integers, has_order)


def _int_quantized(weights: Mapping[str, Any], activations: Any, where: str) -> WeightFormat:
    _expect(weights, where, actorder=(None, False, "weight", "static"))
    integers = _integers(weights, activations, where)
    # In bytes, however many bits of them are used.
    return IntQuantizedFormat(Integers(8, *_without_bits(integers)))


def _without_bits(integers: Integers) -> tuple[Any, ...]:
    return integers.group_size, integers.has_one_scale, integers.has_zero_points, integers.act_qtype


def _float_quantized(weights: Mapping[str, Any], _: Any, where: str) -> WeightFormat:
    _expect(weights, where, type=("float",), num_bits=(8,), symmetric=(True,))
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        _expect(weights, where, group_size=(None, -1))
        return Fp8TensorFormat(has_row_scales=strategy == "channel")
    if strategy != "block":
        raise ConfigError(f"{where}: strategy={strategy!r} is not supported; supported: tensor, channel, block")
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"{where}: block_structure={block!r} must be [rows, columns]")
    return Fp8BlocksFormat((block[0], block[1]), "weight_scale")


def _naive_quantized(weights: Mapping[str, Any], activations: Any, where: str) -> WeightFormat:
    if weights.get("type") == "float":
        return _float_quantized(weights, activations, where)
    return _int_quantized(weights, activations, where)


def _nvfp4(weights: Mapping[str, Any], _: Any, where: str) -> WeightFormat:
    _expect(weights, where, type=("float",), num_bits=(4,), symmetric=(True,), group_size=(NVFP4_GROUP_SIZE,))
    return NVFP4_PACKED


def _microscaling(bits: int) -> Callable[[Mapping[str, Any], Any, str], WeightFormat]:
    def read(weights: Mapping[str, Any], _: Any, where: str) -> WeightFormat:
        _expect(weights, where, type=("float",), num_bits=(bits,), symmetric=(True,), group_size=(MX_GROUP_SIZE,))
        return MicroscalingFormat(bits, "weight" if bits == 8 else "weight_packed")

    return read


def _expect(weights: Mapping[str, Any], where: str, **settings: tuple[Any, ...]) -> None:
    """Raises ConfigError for a setting that is not among those of the format; absent is compressed-tensors' default."""
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None}
    check_keys({key: weights.get(key, defaults[key]) for key in settings}, settings, where)


_READERS: dict[str, Callable[[Mapping[str, Any], Any, str], WeightFormat]] = {
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _naive_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _microscaling(4),
    "mxfp6-pack-quantized": _microscaling(6),
    "mxfp8-quantized": _microscaling(8),
    "dense": lambda *_: PLAIN,
}
