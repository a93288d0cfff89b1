from __future__ import annotations

from dataclasses import dataclass

from jaxis.quantization_rules import CALIBRATION_METHODS

BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}
"""Bits of an element, by type of quantized weights."""
NOT_FINITE = "has values that are not finite"


@dataclass(frozen=True)
class WeightScheme:
    """Quantization of a weight and of the input of its products.

    Attributes:
      weight_qtype: Key of BITS.
      group_size: Input features that share a scale; None means all of them.
      weight_calibration_method: Choice of scales: "absmax", "minmax", "mse" or "affine", as `quantize` describes.
      act_qtype: "int8" quantizes the input of the weight's products dynamically; None does not.
    """

    weight_qtype: str
    group_size: int | None = None
    weight_calibration_method: str = "absmax"
    act_qtype: str | None = None


def check_quantizable(in_size: int, scheme: WeightScheme) -> None:
    """Raises ValueError if the scheme does not fit a weight of `in_size` columns.

    The message continues a sentence that begins with the weight's name.
    """
    qtype, calibration_method = scheme.weight_qtype, scheme.weight_calibration_method
    if qtype not in BITS:
        raise ValueError(f"cannot be quantized to {qtype!r}; known: {', '.join(BITS)}")
    if calibration_method not in (known := CALIBRATION_METHODS[qtype]):
        raise ValueError(f"cannot be quantized to {qtype} by {calibration_method!r}; known: {', '.join(known)}")
    if scheme.group_size is not None and in_size % scheme.group_size:
        raise ValueError(f"has {in_size} input features, which tile_size={scheme.group_size} does not divide")
    if qtype == "int4" and in_size % 2:
        raise ValueError(f"has {in_size} input features; int4 needs an even number")
    if qtype in ("int5", "int6") and in_size % 8:
        raise ValueError(f"has {in_size} input features; {qtype} needs a multiple of 8")
