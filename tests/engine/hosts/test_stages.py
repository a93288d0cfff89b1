"""Pipeline stages on several hosts, each a process here: the answers of one process."""

import pytest

from tests.engine.hosts.commands import check_answers, follower, leader
from tests.engine.hosts.leader import answers_of_every_kind, short_answers, start
from tests.support.host_processes import free_port, host_processes
from tests.support.tiny_checkpoints import write_checkpoint


def check_stages(model, scenario, num_hosts, num_devices, size, **arguments):
    """Hosts with so many devices, and stages x data ranks x devices, give what one process gives."""
    port = free_port()
    commands = [leader(scenario, model, size, port, num_hosts, **arguments)]
    commands += [follower(port, rank=rank, num_hosts=num_hosts) for rank in range(1, num_hosts)]
    with host_processes(commands, num_devices=num_devices) as hosts:
        with start(str(model), 1, "1", port, **arguments) as llm:
            expected = {"short": short_answers, "all": answers_of_every_kind}[scenario](llm)
        check_answers(hosts, expected)


@pytest.mark.multi_device
def test_two_hosts_with_a_stage_each_answer_as_one_does(checkpoint):
    check_stages(checkpoint(), "short", 2, 1, "2x1x1")


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "size"),
    [
        (2, 1, "2x1x1"),
        (4, 1, "4x1x1"),
        (2, 2, "2x1x2"),
        (2, 2, "4x1x1"),  # two stages a host
        (4, 1, "2x1x2"),  # two hosts a stage
    ],
)
def test_stages_on_hosts_answer_as_one_process_does(tmp_path, num_hosts, num_devices, size):
    model = write_checkpoint(tmp_path / "model", num_hidden_layers=5)
    check_stages(model, "all", num_hosts, num_devices, size, kv_cache_memory=14 * 5 * 4096)
