from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ORIGINAL = "use the original checkpoint, or a GGUF, AWQ, GPTQ or fp8 one of the same model"
_ORIGINAL_8_BITS = "use the original checkpoint with quantization='int8' (--quantization), or a GGUF, AWQ or GPTQ one"
_PLAIN_EXPORT = "use one saved in the format 'gptq', or a GGUF or AWQ one of the same model"


@dataclass(frozen=True)
class UnsupportedKind:
    """A kind of quantized checkpoint that is not loaded.

    Attributes:
      methods: Its names as `quant_method` in config.json.
      what: Description for the error, after "the checkpoint is".
      instead: Advice for the user.
      tensors: Suffixes of tensors that only this kind has, for files without a description.
    """

    methods: tuple[str, ...]
    what: str
    instead: str = _ORIGINAL
    tensors: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return f"the checkpoint is {self.what}, which is not supported: {self.instead}"


UNSUPPORTED_KINDS = (
    UnsupportedKind(("exl2",), "quantized by ExLlamaV2 (EXL2)", tensors=(".q_invperm",)),
    UnsupportedKind(("exl3",), "quantized by ExLlamaV3 (EXL3)", tensors=(".trellis", ".svh")),
    UnsupportedKind(("quip", "quip-sharp", "quip_sharp"), "quantized by QuIP#", tensors=(".Qidxs", ".codebook_id")),
    UnsupportedKind(("aqlm",), "quantized by AQLM", tensors=(".codebooks",)),
    UnsupportedKind(("vptq",), "quantized by VPTQ", tensors=(".centroids.weight", ".centroids")),
    UnsupportedKind(("spqr",), "quantized by SpQR", tensors=(".dense_weights",)),
    UnsupportedKind(("higgs",), "quantized by HIGGS", tensors=(".tables2",)),
    UnsupportedKind(("quanto",), "quantized by Quanto", _ORIGINAL_8_BITS, (".weight._data",)),
    UnsupportedKind(("eetq",), "quantized by EETQ", _ORIGINAL_8_BITS, (".weight_scales",)),
    UnsupportedKind(("fp_quant",), "quantized by FP-Quant", tensors=(".forward_hadamard_matrix",)),
    UnsupportedKind(("sinq",), "quantized by SINQ"),
    UnsupportedKind(("bitblas",), "packed for BitBLAS, a library for GPUs", _PLAIN_EXPORT),
    UnsupportedKind(("marlin", "gptq_marlin", "gptq_marlin_24"), "packed for Marlin, a kernel for GPUs", _PLAIN_EXPORT),
    UnsupportedKind(("sparseml", "sparse", "sparsegpt"), "stored sparsely"),
    UnsupportedKind(("metal",), "packed for Metal, of Apple's GPUs", "use the original checkpoint, or an MLX one"),
    UnsupportedKind(("fouroversix",), "quantized by Four Over Six"),
    UnsupportedKind(
        (),
        "packed by GPTQ or AWQ, but without the description of how",
        "download its quantize_config.json or quant_config.json too, or add a quantization_config to config.json",
        (".qweight",),
    ),
    UnsupportedKind(
        (),
        "packed by compressed-tensors, but without the description of how",
        "download its config.json again, which must have a quantization_config",
        (".weight_packed",),
    ),
    UnsupportedKind(
        (),
        "one of MLX's with absorbed projections of latent attention",
        "use the original checkpoint, or a GGUF one of the same model",
        (".embed_q.weight", ".unembed_out.weight"),
    ),
)

_BY_METHOD = {method: kind for kind in UNSUPPORTED_KINDS for method in kind.methods}
_BY_TENSOR = {tensor: kind for kind in UNSUPPORTED_KINDS for tensor in kind.tensors}


def unsupported_method(method: object) -> UnsupportedKind | None:
    """Returns the kind with this `quant_method`; None if no kind has it."""
    return _BY_METHOD.get(method) if isinstance(method, str) else None


def unsupported_tensors(names: Iterable[str]) -> UnsupportedKind | None:
    """Returns the kind of these tensors; None if no kind has them."""
    ends = tuple(_BY_TENSOR)
    for name in names:
        if name.endswith(ends):
            return next(kind for end, kind in _BY_TENSOR.items() if name.endswith(end))
    return None
