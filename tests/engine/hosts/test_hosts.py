"""One model on several hosts, each a process here: the same answers as on one."""

import json

import numpy as np
import pytest

from jaxis.bringup.verify.compare import relative_error
from tests.engine.expert_parallel import results
from tests.engine.hosts.commands import answers_of, check_answers, follower, leader
from tests.engine.hosts.leader import answers_of_every_kind, short_answers, start
from tests.engine.test_expert_parallel import checkpoint as checkpoint_of_experts
from tests.support import parity
from tests.support.host_processes import free_port, host_processes

# Windows; a latent cache; experts; states beside a cache.
FAMILIES = ["Llama 3.1", "Gemma 3", "DeepSeek V3", "Qwen3 MoE", "GPT-OSS", "Qwen3.5"]


def group(scenario, model, num_hosts, num_devices, port):
    commands = [leader(scenario, model, num_hosts * num_devices, port, num_hosts)]
    commands += [follower(port, rank=rank, num_hosts=num_hosts) for rank in range(1, num_hosts)]
    return host_processes(commands, num_devices=num_devices)


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("scenario", "num_hosts", "num_devices"),
    [
        *[("short", 2, 1), ("all", 2, 1), ("all", 2, 2), ("all", 4, 1)],
    ],
)
def test_several_hosts_answer_as_one_does(checkpoint, scenario, num_hosts, num_devices):
    port = free_port()
    with group(scenario, checkpoint(), num_hosts, num_devices, port) as hosts:
        with start(str(checkpoint()), 1, "1", port) as llm:
            expected = {"short": short_answers, "all": answers_of_every_kind}[scenario](llm)
        check_answers(hosts, expected)


@pytest.mark.multi_device
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_tokens_and_logits_of_transformers_over_two_hosts(name):
    family = next(family for family in parity.FAMILIES if family.name == name)
    with group("family", parity.checkpoint_folder(family), 2, 1, free_port()) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    assert found["tokens"] == parity.reference_greedy_tokens(family, parity.prompt(17))
    expected, _ = parity.reference_run(family, parity.PAGED_LENGTH)
    for path in ("whole", "paged"):
        assert relative_error(np.asarray(found[path]), expected) < 1e-4, path


@pytest.mark.multi_device
@pytest.mark.parametrize(("size", "num_devices"), [("2x1", 1), ("2x2", 2), ("4x1", 2)])
def test_data_ranks_on_two_hosts_answer_as_one_device_does(checkpoint, size, num_devices):
    port = free_port()
    with host_processes([leader("all", checkpoint(), size, port), follower(port)], num_devices=num_devices) as hosts:
        with start(str(checkpoint()), 1, "1", port) as llm:
            expected = answers_of_every_kind(llm)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    for name in ("whole", "paged"):
        np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-4)
    del found["preempted"], expected["preempted"]  # each rank has as many blocks as the one device
    assert found == json.loads(json.dumps(expected))
    assert found["hit"][0]


@pytest.mark.multi_device
def test_experts_on_the_devices_of_two_hosts():
    """Each host converts and keeps its own only."""
    folder, port = str(checkpoint_of_experts("GPT-OSS")), free_port()
    command = ["-m", "tests.engine.hosts.expert_leader", folder, "4", str(port)]
    with host_processes([command, follower(port)], num_devices=2) as hosts:
        logits, tokens, _ = results(folder)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.output for host in hosts)
        found = answers_of(hosts[0])
    assert found["tokens"] == tokens
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    assert found["shares"] == [1 / 4]
    assert found["experts"] == [0, 1, 2, 3]
