"""Images of Inkling 2: transparency."""

import json

import numpy as np
from PIL import Image

from jaxis.tokenizer import Tokenizer
from jaxis.vision.decode import decode_image, open_image
from jaxis.vision.processors import read_processor
from tests.support.vision_checkpoints import write_tokenizer


def test_what_is_transparent_becomes_a_chessboard(tmp_path):
    """Each value with each alpha, as `Inkling2ImageProcessor.convert_to_rgb` computes it in whole numbers."""
    write_tokenizer(tmp_path, ("<s>", "</s>", "[INST]", "[/INST]", "<|unused_200054|>"), "<|unused_200054|>")
    settings = {"image_processor_type": "Inkling2ImageProcessor", "size": {"height": 40, "width": 40}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    ours = read_processor(tmp_path, Tokenizer.from_path(tmp_path))
    rows, columns = np.indices((256, 256))
    image = Image.fromarray(np.stack([rows, 255 - rows, rows // 2, columns], axis=-1).astype(np.uint8), "RGBA")
    opened = open_image(image, "the image")
    [part] = ours.parts(decode_image(opened, "the image", keeps_alpha=ours.keeps_alpha))
    board = np.where((rows // 8 + columns // 8) % 2, 153, 204)
    for channel, values in enumerate((rows, 255 - rows, rows // 2)):
        expected = (values * columns + board * (255 - columns) + 127) // 255
        np.testing.assert_array_equal(part.views[0][:256, :256, channel], expected)
    assert part.views[0].shape == (280, 280, 4)
    assert part.views[0][..., 3].sum() == 255 * 256**2
