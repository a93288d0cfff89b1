"""Options of the commands that run on several hosts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from jaxis.errors import ConfigError
from jaxis.rooms import check_options

if TYPE_CHECKING:
    from jaxis.engine.hosts.meeting import HostPlace

# Not a range of the option, which would take the width of its line in the help.
_MAX_PORT = 65535


def host_option(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel="Several hosts", **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """A group of hosts, and this host's place in it."""

    nnodes: Annotated[int, host_option("Hosts that run the model together.", min=1, metavar="N")] = 1
    node_rank: Annotated[
        int, host_option("Which of them this is; 0 serves, and the others do what it says.", min=0, metavar="N")
    ] = 0
    master_addr: Annotated[
        str, host_option("Address of host 0, by which the others reach it; on a private network.", metavar="ADDRESS")
    ] = "127.0.0.1"
    master_port: Annotated[int, host_option("Port there.", min=1, metavar="N")] = 29501
    distributed_timeout_seconds: Annotated[
        int, host_option("Seconds that hosts wait for each other at the start.", min=1, metavar="S")
    ] = 300

    def check(self) -> None:
        """Raises ConfigError if they contradict each other, or hosts cannot run one model in this installation."""
        check_options("engine.hosts", {"--nnodes": self.nnodes > 1})
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} is not one of 0 to {self.nnodes - 1}: --nnodes is {self.nnodes}"
            )
        if self.master_port > _MAX_PORT:
            raise ConfigError(f"--master-port {self.master_port} is no port: give one of at most {_MAX_PORT}")

    def place(self) -> HostPlace:
        """Returns this host's place."""
        from jaxis.engine.hosts.meeting import HostPlace

        return HostPlace(
            self.nnodes, self.node_rank, self.master_addr, self.master_port, self.distributed_timeout_seconds
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainHostOptions(GroupOptions):
    """Hosts that share a training."""

    cluster: Annotated[
        bool, host_option("Share the training with the processes that Slurm, Open MPI or a TPU pod has started.")
    ] = False

    @property
    def are_several(self) -> bool:
        return self.nnodes > 1 or self.cluster

    def check(self) -> None:
        super().check()
        check_options("training.hosts", {"--cluster": self.cluster, "--nnodes": self.nnodes > 1})
        if self.cluster and self.nnodes > 1:
            raise ConfigError("--cluster finds the hosts by itself: leave out --nnodes")
