"""Data ranks, experts on devices and several hosts: which ways there are, what devices hold, and what they exchange."""

import pytest

from jaxis.compilation.targets import parse_target
from jaxis.config.expert_counts import num_experts
from jaxis.errors import ConfigError
from jaxis.planning.exchanges import exchange_seconds, links, sent_bytes
from jaxis.planning.layout import Layout, WantedLayout, layouts
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.plan_summary import PlanReport, command, remarks
from tests.support.plan_sources import published

# DeepSeek V3: an expert's three [2048, 7168] matrices in fp8, with a float32 scale for each 128 x 128 block.
EXPERT = 3 * (2048 * 7168 + 16 * 56 * 4)


@pytest.fixture(scope="module")
def deepseek():
    return Planner(published("deepseek-v3"), Wanted())


def part_on(planner, target, layout):
    wanted = WantedLayout(layout.tensor_parallel_size, layout.data_parallel_size, layout.enable_expert_parallel)
    assert layout in layouts(target, wanted, num_experts(planner.widths[0].vllm_config.model_config.hf_config))
    return planner.device_model(target, layout)


@pytest.mark.parametrize(
    ("target", "wanted", "num_experts", "message"),
    [
        (
            "v6e-8",
            WantedLayout(1, 2),
            0,
            "--data-parallel-size 2: the model has no experts to share between data ranks",
        ),
        ("v6e-8", WantedLayout(enable_expert_parallel=True), 0, "--enable-expert-parallel: the model has no experts"),
        ("v6e-8", WantedLayout(16), 8, "--tensor-parallel-size 16: v6e:2x4 has 8 devices"),
        ("v6e-8", WantedLayout(2, 8), 8, "--tensor-parallel-size 2 --data-parallel-size 8: v6e:2x4 with its 8 devices"),
        ("v6e-8", WantedLayout(8, None, True), 60, "--enable-expert-parallel: .* or not by 60 experts"),
        ("v5e-64", WantedLayout(8, 1), 256, "a server takes devices of one host, or those of all hosts"),
        ("h200x16", WantedLayout(3, 4), 48, "v?h200x16 with its 16 devices, 8 on each host, cannot be shared so"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(target, wanted, num_experts, message):
    with pytest.raises(ConfigError, match=message) as error:
        layouts(parse_target(target), wanted, num_experts)
    assert "\n" not in str(error.value)


def test_experts_lie_on_all_devices_and_the_rest_on_each_rank(deepseek):
    """Counted by hand from config.json, for 8 ranks of 8 devices."""
    part = part_on(deepseek, parse_target("v5e-64"), Layout(8, 8, True))
    assert part.reads.expert_bytes == 58 * 256 * EXPERT // 64

    def blocks(rows, columns):
        """A matrix in fp8 with its scales."""
        return rows * columns + -(-rows // 128) * -(-columns // 128) * 4

    # Projections to the latents are whole on every device, those to and from heads are shared by 8, and those from the
    # latent of keys and values are in bfloat16.
    layer = blocks(1536, 7168) + blocks(576, 7168)
    layer += (blocks(128 * 192, 1536) + blocks(7168, 128 * 128)) // 8 + 128 * 256 * 512 * 2 // 8
    norms = (2 * 7168 + 1536 + 512) * 2
    dense, shared = 3 * blocks(18432, 7168) // 8, 3 * blocks(2048, 7168) // 8
    routers = 256 * 7168 * 2 + 256 * 4
    vocabulary = 2 * 129280 * 7168 * 2 // 8
    expected = 61 * (layer + norms) + 3 * dense + 58 * (shared + routers) + vocabulary + 7168 * 2
    assert part.held_bytes - part.reads.expert_bytes == pytest.approx(expected, rel=1e-3)
    alone = part_on(deepseek, parse_target("h200x8"), Layout(8))
    assert part.held_bytes - part.reads.expert_bytes == pytest.approx(
        alone.held_bytes - alone.reads.expert_bytes, rel=1e-6
    ), "a rank holds of all but experts what a server without ranks holds"


def test_a_rank_reads_its_own_requests_and_all_ranks_experts(deepseek):
    target = parse_target("v5e-64")
    ranks, one = part_on(deepseek, target, Layout(8, 8, True)), part_on(deepseek, target, Layout(64))
    together, apart = ranks.decode(240, 1024), one.decode(240, 1024)
    assert together.context_bytes == apart.context_bytes / 8, "latents are whole on each device of a rank"
    hit = 1 - (1 - 8 / 256) ** 240
    assert together.weight_bytes == pytest.approx(ranks.reads.weight_bytes + hit * ranks.reads.expert_bytes)
    assert ranks.decode(241, 1024).context_bytes == pytest.approx(31 / 30 * together.context_bytes), (
        "of the rank with most"
    )
    # Of a rank's 30 tokens: every sum; of all 240: what goes to the experts, and from them.
    hidden = 7168 * 2
    sums, gathers = 30 * hidden * 2 * 7 / 8, 240 * hidden * 7 / 8
    logits = 30 * 129280 * 4 * 7 / 8
    assert together.sent_bytes == pytest.approx((1 + 61 + 3 + 58) * sums + 58 * 2 * gathers + logits)


def test_experts_that_are_not_spread_serve_their_own_rank(deepseek):
    part = part_on(deepseek, parse_target("h200x8"), Layout(8, 1, True))
    plain = part_on(deepseek, parse_target("h200x8"), Layout(8))
    assert part.held_bytes == plain.held_bytes
    assert part.decode(8, 100).sent_bytes == plain.decode(8, 100).sent_bytes


@pytest.mark.parametrize(
    ("layout", "axes", "found", "seconds"),
    [
        # 16 ranks, 8 on each host: each GPU sends the other host an eighth of its host's half.
        (Layout(1, 16, True), ("data",), "network", max(7 / 8 / 450e9, 1 / 2 / 8 / 50e9)),
        # 2 ranks, one on each host: each GPU sends its half.
        (Layout(8, 2, True), ("data",), "network", 1 / 2 / 50e9),
        (Layout(8, 2, True), ("model",), "NVLink", 7 / 8 / 450e9),
        (Layout(4, 4, True), ("data",), "network", max(1 / 2 / 450e9, 1 / 2 / 2 / 50e9)),
        (Layout(16), ("model",), "network", max(7 / 8 / 450e9, 1 / 2 / 8 / 50e9)),
    ],
)
def test_gpus_of_two_hosts_exchange_over_the_network(deepseek, layout, axes, found, seconds):
    target = parse_target("h200x16")
    step = part_on(deepseek, target, layout).decode(64, 1024)
    exchange = next(each for each in step.exchanges if each.axes == axes)
    twice = 2 if exchange.opcode == "all-reduce" else 1
    assert links(exchange, target, layout) == found
    assert exchange_seconds(exchange, target, layout) == pytest.approx(
        exchange.count * twice * seconds * exchange.nbytes
    )


def test_axes_along_whole_dimensions_of_a_slice_have_half_its_links(deepseek):
    for name, layout, share in (
        ("v5e-64", Layout(8, 8, True), 1 / 2),
        ("v5p-128", Layout(16, 4, True), 2 / 3),
        ("v5e-64", Layout(64), 1),
        ("v5e-64", Layout(16, 4, True), 1),  # no dimension has 4 or 16 chips
    ):
        target = parse_target(name)
        step = part_on(deepseek, target, layout).decode(64, 1024)
        exchange = next(each for each in step.exchanges if each.axes == ("model",))
        rate = target.accelerator.interconnect_bandwidth * share
        assert exchange_seconds(exchange, target, layout) == pytest.approx(exchange.sent_bytes / rate)
        assert links(exchange, target, layout) == ("ICI" if share == 1 else f"{share:.0%} of ICI")


def test_what_a_ring_sends():
    assert sent_bytes("all-reduce", 800, 4) == 2 * 800 * 3 / 4
    assert sent_bytes("all-gather", 800, 4) == sent_bytes("reduce-scatter", 800, 4) == 800 * 3 / 4
    assert sent_bytes("all-gather", 800, 1) == 0


def test_deepseek_on_a_slice_of_16_hosts_takes_data_ranks(deepseek):
    plan = deepseek.plan(parse_target("v5e-64"))
    chosen = plan.chosen
    assert chosen.layout == Layout(8, 8, True)
    assert (chosen.hosts_of_server, chosen.num_servers) == (16, 1)
    assert chosen.max_requests % 8 == 0
    line = command(PlanReport("m", (), (plan,)), plan)
    assert "--tensor-parallel-size 8 --data-parallel-size 8 --enable-expert-parallel --nnodes 16 --node-rank 0" in line
    assert line.endswith(f"--max-num-seqs {chosen.max_requests // 8}"), "of one rank"
    [whole] = [o for o in plan.options if o.layout == Layout(64) and o.kv_cache_dtype == "auto"]
    assert whole.fits
    assert chosen.max_requests > 3 * whole.max_requests


def test_two_hosts_of_gpus_are_named_beside_two_servers(deepseek):
    plan = deepseek.plan(parse_target("h200x16"))
    assert (plan.chosen.hosts_of_server, plan.chosen.num_servers) == (1, 2)
    assert any(line.startswith("fp8 weights over 16 devices (TP 1, DP 16, EP) of 2 hosts: ") for line in remarks(plan))
