"""Contents of a device's memory and the cost of steps, against numbers computed by hand from published sizes."""

import pytest

from jaxis.compilation.targets import parse_target
from jaxis.errors import ConfigError
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.roofline import bound
from tests.support.plan_sources import published

# Qwen3-8B: E=4096, F=12288, H=32, K=8, D=128, V=151936, 36 layers.
EMBEDDING = 151936 * 4096
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
NORMS = 36 * (2 * 4096 + 2 * 128) + 4096
PARAMETERS = 8_190_735_360  # as its model card counts them


@pytest.fixture(scope="module")
def qwen():
    return Planner(published("qwen3-8b"), Wanted(quantization="none"))


@pytest.fixture(scope="module")
def deepseek():
    return Planner(published("deepseek-v3"), Wanted())


def test_a_dense_model_on_one_device(qwen):
    target = parse_target("h100x1")
    part = qwen.device_model(target)
    assert 36 * LAYER + NORMS + 2 * EMBEDDING == PARAMETERS
    assert part.held_bytes == 2 * PARAMETERS
    decode = part.decode(4, 1000)
    assert decode.weight_bytes == 2 * (PARAMETERS - EMBEDDING), "of the embedding, a step reads rows"
    assert decode.context_bytes == 4 * 1000 * 36 * 2 * 8 * 128 * 2
    attention = 36 * 4 * 1000 * 2 * 32 * (128 + 128)
    assert decode.flops == pytest.approx(4 * 2 * (36 * LAYER + EMBEDDING) + attention)
    assert decode.sent_bytes == 0
    least = bound(decode, target, part.layout)
    assert least.binds == "memory"
    assert least.seconds == pytest.approx((decode.weight_bytes + decode.context_bytes) / 3352e9)


def test_a_prefill_reads_its_prompt_once_and_samples_once(qwen):
    target = parse_target("h100x1")
    part = qwen.device_model(target)
    prefill = part.prefill(2048)
    assert prefill.context_bytes == 2048 * 36 * 2 * 8 * 128 * 2
    attention = 36 * (2048 * 2049 // 2) * 2 * 32 * (128 + 128)
    assert prefill.flops == pytest.approx(2 * (2048 * 36 * LAYER + EMBEDDING) + attention)
    assert bound(prefill, target, part.layout).binds == "compute"


def test_eight_devices_share_matrices_and_heads_and_sum_hidden_states(qwen):
    one, eight = (qwen.device_model(parse_target(name)) for name in ("h100x1", "h100x8"))
    assert eight.held_bytes == 2 * ((PARAMETERS - NORMS) // 8 + NORMS)
    apart, together = eight.decode(8, 512), one.decode(8, 512)
    assert apart.context_bytes == together.context_bytes / 8
    assert apart.flops == pytest.approx(together.flops / 8)
    # Two sums a layer and the embedding's of [8, 4096] bfloat16, and the logits' gather of [8, V] float32.
    sums = 73 * 2 * (8 * 4096 * 2) * 7 / 8
    assert apart.sent_bytes == pytest.approx(sums + 8 * 151936 * 4 * 7 / 8)


def test_more_devices_than_key_value_heads_hold_copies_of_them(qwen):
    sixteen = qwen.device_model(parse_target("h100x16"))
    assert sum(sixteen.bytes_per_block.values()) == 36 * 16 * 2 * 128 * 2, "one head each, though 8 are 16 halves"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "number"), [("nemotron-h-56b", 54), ("falcon-h1-0.5b", 36), ("mamba-2.8b", 0), ("gpt-oss-20b", 24)]
)
def test_feed_forward_blocks_are_those_of_the_constructed_layers(name, number):
    """Nemotron-H has 54 among its 118 layers; Falcon-H1's 36 have it beside two caches; Mamba's have none."""
    assert Planner(published(name), Wanted()).device_model(parse_target("h100x1")).num_feed_forwards == number


def test_devices_share_recurrent_states_and_a_step_reads_and_writes_them():
    # Qwen3.5-9B: 24 layers with 32 heads' float32 states of [128, 128], and 3 inputs of a convolution in bfloat16 over
    # 16 heads of queries, 16 of keys and 32 of values, 128 each.
    planner = Planner(published("qwen3.5-9b"), Wanted())
    expected = 24 * (32 * 128 * 128 * 4 + 3 * (16 + 16 + 32) * 128 * 2)
    one, four = (planner.device_model(parse_target(name)) for name in ("h100x1", "h100x4"))
    assert (one.state_bytes, four.state_bytes) == (expected, expected // 4)
    cache = 8 * 2 * 4 * 256 * 2
    assert one.decode(3, 1000).context_bytes == 3 * (2 * expected + 1000 * cache)


def test_heads_that_the_devices_do_not_divide_are_an_error(qwen):
    with pytest.raises(
        ConfigError, match=r"=64 does not divide the model's 32 attention heads: give 1, 2, 4, 8, 16 or 32$"
    ):
        qwen.device_model(parse_target("v5e-64"))


def test_experts_are_read_as_far_as_tokens_hit_them(deepseek):
    part = deepseek.device_model(parse_target("h200x8"))
    # 58 layers of 256 experts of three [2048, 7168] matrices in fp8, with a float32 scale for each 128 x 128 block.
    expert = 3 * (2048 * 7168 + 16 * 56 * 4)
    assert part.reads.expert_bytes == 58 * 256 * expert // 8
    one, many = part.decode(1, 16).weight_bytes, part.decode(64, 16).weight_bytes
    assert one == pytest.approx(part.reads.weight_bytes + part.reads.expert_bytes * 8 / 256)
    hit = 1 - (1 - 8 / 256) ** 64
    assert many == pytest.approx(part.reads.weight_bytes + part.reads.expert_bytes * hit)


def test_windows_bound_the_context_that_is_read():
    part = Planner(published("gemma-2-9b"), Wanted(quantization="none", dtype="bfloat16")).device_model(
        parse_target("h100x1")
    )
    # 21 layers see 4,096 tokens, 21 all; K=8, D=256.
    token = 2 * 8 * 256 * 2
    assert part.decode(1, 8000).context_bytes == token * 21 * (8000 + 4096)
    assert part.decode(1, 100).context_bytes == token * 42 * 100
    assert part.held_bytes == 2 * 9_241_705_984


def test_int8_weights_are_counted_with_their_scales():
    target = parse_target("h100x1")
    wide, low_precision = (
        Planner(published("qwen3-8b"), Wanted(quantization=name)).device_model(target) for name in ("none", "int8")
    )
    assert low_precision.decode(3, 100).flops == wide.decode(3, 100).flops, "they are dequantized on the chip"
    # A bfloat16 scale for each 32 elements.
    assert low_precision.held_bytes == (36 * LAYER + 2 * EMBEDDING) * 34 // 32 + 2 * NORMS


def test_layers_that_share_a_cache_read_it_and_keep_none():
    part = Planner(published("gemma-4-e2b"), Wanted(quantization="none", dtype="bfloat16")).device_model(
        parse_target("h100x1")
    )
    # 28 layers of windows of 512 tokens, K=1, D=256, and 7 of full context, D=512: of them 16 and 4 share.
    window, full = 2 * 256 * 2, 2 * 512 * 2
    assert part.decode(1, 8000).context_bytes == 28 * window * 512 + 7 * full * 8000
    assert sum(part.bytes_per_block.values()) == part.block_size * (12 * window + 3 * full)
