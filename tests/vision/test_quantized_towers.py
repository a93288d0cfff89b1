"""Vision towers with weights of 8 bits: close to those without, smaller, and as independent of company."""

import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import ConfigError
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES

ENGINE = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512, "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
NAMES = [
    pytest.param("Mistral 3"),
    *(pytest.param(each.name, marks=pytest.mark.slow) for each in FAMILIES if each.name != "Mistral 3"),
]


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    return next(each for each in FAMILIES if each.name == request.param)


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    family.write(folder)
    return folder


def opened(folder, **arguments):
    return LLM(str(folder), kv_cache_memory="4MiB", show_progress=False, **ENGINE, **arguments)


def prompt_of(family, seed):
    images = [random_image(30, 40, seed=seed + i) for i in range(family.num_images)]
    return {"prompt": "Look: " + family.placeholder * len(images), "multi_modal_data": {"image": images}}


def embeddings(llm, prompt):
    item, encoder = llm._tokenize(prompt, "the prompt").inputs[0], llm.engine.runner.feature("inputs").encoder
    encoder.hold([item])
    rows = np.array(encoder.rows(item, llm.engine.runner.programs))
    encoder.let_go([item])
    return rows, encoder.num_bytes


def test_embeddings_are_close_and_the_tower_is_smaller(family, folder):
    prompt = prompt_of(family, 0)
    with opened(folder) as llm:
        exact, exact_bytes = embeddings(llm, prompt)
    with opened(folder, vision_quantization="int8") as llm:
        ours, num_bytes = embeddings(llm, prompt)
    error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < 0.05, error
    assert num_bytes < exact_bytes


def test_an_answer_is_the_same_alone_and_among_others(family, folder):
    """Bit for bit."""
    prompts = [prompt_of(family, 10 * i) for i in range(4)]
    with opened(folder, vision_quantization="int8", enable_prefix_caching=False) as llm:
        together = [bits(output) for output in llm.generate(prompts, PARAMS)]
        llm.engine.runner.feature("inputs").encoder._unused.clear()
        assert [bits(llm.generate([prompt], PARAMS)[0]) for prompt in prompts] == together


def bits(output):
    [completion] = output.outputs
    return completion.token_ids, [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs]


def test_another_type_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="vision_quantization='int3' must be \"int8\" or None"):
        LLM(str(tmp_path), vision_quantization="int3")
