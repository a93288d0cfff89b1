from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError


@dataclass(frozen=True)
class BlockType:
    """Storage of elements in GGUF tensors: plain floats, or blocks of neighbouring elements of a row.

    Attributes:
      name: ggml's name.
      elements: Elements of a block, which are neighbours in a row.
      nbytes: Bytes of a block.
      dtype: Type of plain elements; None for blocks of more than one element.
      trailer: Bytes after all blocks of a tensor, which begin with its scale, a float32.
    """

    name: str
    elements: int
    nbytes: int
    dtype: np.dtype | None = None
    trailer: int = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array of such elements, or of the bytes of their blocks.

        Raises ValueError if blocks do not divide its columns.
        """
        if shape[-1:] and shape[-1] % self.elements:
            raise ValueError(f"has {shape[-1]} features, which blocks of {self.elements} ({self.name}) do not divide")
        return shape if self.dtype is not None else (*shape[:-1], shape[-1] // self.elements * self.nbytes)


FLOAT32 = BlockType("F32", 1, 4, np.dtype("<f4"))

# Id in the file -> type.
BLOCK_TYPES = {
    0: FLOAT32,
    1: BlockType("F16", 1, 2, np.dtype("<f2")),
    30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    26: BlockType("I32", 1, 4, np.dtype("<i4")),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    36: BlockType("I2_S", 128, 32, trailer=32),  # of bitnet.cpp; IQ4_NL_4_4 in files of an old llama.cpp
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}

TYPE_OF_NAME = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}

# Types that are not read, whose names help: with codebooks, for intermediate results, and most plain integers.
_UNSUPPORTED = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{41: "Q1_0", 42: "Q2_0", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 27: "I64", 28: "F64"},
}
_REMOVED = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
# Types that only ik_llama.cpp has, a fork; all from 97 on are its own.
_OF_IK_LLAMA = {
    **{
        133: "Q6_0",
        134: "IQ1_BN",
        135: "IQ2_BN",
        137: "IQ2_K",
        138: "IQ3_K",
        139: "IQ4_K",
        140: "IQ5_K",
        141: "IQ6_K",
        144: "IQ4_KS",
        145: "IQ2_KS",
    },
    **{
        146: "IQ4_KSS",
        152: "IQ5_KS",
        153: "IQ2_KT",
        154: "IQ3_KT",
        155: "IQ4_KT",
        156: "IQ3_KS",
        157: "IQ2_KL",
        158: "IQ1_KT",
    },
}
_FIRST_OF_IK_LLAMA, _LAST_OF_IK_LLAMA = 97, 400


def find_block_type(type_id: int, what: str) -> BlockType:
    """Returns the type of this id in a file. Raises CheckpointError, which names `what`, if it is not supported."""
    if type_id in BLOCK_TYPES:
        return BLOCK_TYPES[type_id]
    if type_id in _REMOVED:
        raise CheckpointError(
            f"{what} is of the type {_REMOVED[type_id]}, made for an old llama.cpp: use a newer file of the model"
        )
    if type_id in _UNSUPPORTED:
        raise CheckpointError(
            f"{what} is of the type {_UNSUPPORTED[type_id]}, which is not supported: use a file in another "
            "quantization, such as Q4_K_M"
        )
    if _FIRST_OF_IK_LLAMA <= type_id <= _LAST_OF_IK_LLAMA:
        name = f"the type {_OF_IK_LLAMA[type_id]} of" if type_id in _OF_IK_LLAMA else "a type of"
        number = "" if type_id in _OF_IK_LLAMA else f" ({type_id})"
        raise CheckpointError(
            f"{what} is of {name} ik_llama.cpp{number}: use a file made with llama.cpp, such as Q4_K_M"
        )
    raise CheckpointError(
        f"{what} is of the unknown type {type_id}: use a file in another quantization, such as Q4_K_M"
    )
