"""Random bytes that are valid blocks of GGUF's types."""

import numpy as np

from jaxis.loading.gguf_block_types import TYPE_OF_NAME

QUANTIZED = [name for name, each in TYPE_OF_NAME.items() if each.dtype is None and not each.trailer]

# Where a block of each type has its float16 scales and minima, so that random bytes can be made finite.
_FLOAT16_AT = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "NVFP4": ()},
    **{"TQ1_0": (52,), "TQ2_0": (64,)},
}


def random_rows(name: str, rows: int, columns: int, *, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Blocks with random codes, and random float16 scales of about `scale`: [rows, bytes]."""
    block_type, random = TYPE_OF_NAME[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // block_type.elements, block_type.nbytes), np.uint8)
    for first in _FLOAT16_AT[name]:
        floats = (scale * random.normal(size=blocks.shape[:2])).astype(np.float16)
        blocks[..., first : first + 2] = floats[..., None].view(np.uint8)
    if name == "MXFP4":
        # 255 is NaN, and 0 and 1 make numbers that are too small for a normal float32.
        blocks[..., 0] = random.integers(2, 255, blocks.shape[:2])
    if name == "NVFP4":
        # Scales have no sign. Up to 1, times the codes' 6.
        blocks[..., :4] = random.integers(0, 0x38 if scale < 1 else 0x80, (*blocks.shape[:2], 4))
    return blocks.reshape(rows, -1)
