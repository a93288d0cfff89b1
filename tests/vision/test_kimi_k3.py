"""Images of Kimi K3: transparency, and settings that are refused."""

import io
import json

import numpy as np
import pytest

from jaxis.errors import ConfigError
from jaxis.tokenizer import Tokenizer
from jaxis.vision.decode import decode_image, open_image
from jaxis.vision.processors import read_processor
from tests.support.kimi_k3_vision import SETTINGS, upright_pixels
from tests.support.vision_checkpoints import random_image, write_tokenizer

TOKENS = ("<|kimi_image_placeholder|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")


def processor_of(folder, **changed):
    write_tokenizer(folder, ("<s>", "</s>", "[INST]", "[/INST]", *TOKENS), TOKENS[0])
    settings = {
        "auto_map": {"AutoProcessor": "kimi_k3_processor.KimiK3Processor"},
        "media_proc_cfg": SETTINGS | changed,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_processor(folder, Tokenizer.from_path(folder))


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L"])
def test_what_is_transparent_becomes_a_chessboard_after_resizing(tmp_path, mode, as_file):
    ours = processor_of(tmp_path)
    for i, size in enumerate([(90, 41), (33, 17), (8, 8), (3, 40)]):
        image = random_image(*size, seed=i, mode=mode)
        if "A" in mode:
            image.putalpha(random_image(*size, seed=10 + i, mode="L"))
        source, file = image, io.BytesIO()
        if as_file:
            image.save(file, "PNG")
            source = file.getvalue()
        opened = open_image(source, "the image")
        [part] = ours.parts(decode_image(opened, "the image", keeps_alpha=ours.keeps_alpha))
        np.testing.assert_array_equal(part.views[0], upright_pixels(image), err_msg=str(size))
        text = f"<|media_begin|>image {size[0]}x{size[1]}<|media_content|>"
        text += "<|media_pad|>" * (part.views[0].shape[0] * part.views[0].shape[1] // 64) + "<|media_end|>"
        assert part.token_ids == Tokenizer.from_path(tmp_path).encode(text)
        assert {part.token_ids[row] for row in part.rows} == {Tokenizer.from_path(tmp_path).token_to_id(TOKENS[3])}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"transparent_bg_config": None}, "None"),
        ({"transparent_bg_config": {"pattern": "white"}}, "'white'"),
        ({"transparent_bg_fill_stage": "before_resize"}, "'before_resize'"),
        ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
    ],
)
def test_other_settings_are_refused(tmp_path, changed, words):
    with pytest.raises(ConfigError, match=words) as error:
        processor_of(tmp_path, **changed)
    assert "\n" not in str(error.value)
