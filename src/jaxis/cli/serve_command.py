"""The parser of `jaxis serve`: it names replacements for options of vLLM that spread a model in other ways."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

from jaxis.cli.kv_disk import with_size
from jaxis.cli.lora_options import spread_modules

_ALL_RANKS = "one server has all data ranks: give --data-parallel-size, and --nnodes for several hosts"
_HOSTS = "hosts find each other by --nnodes, --node-rank and --master-addr"
_EXPERTS = "--enable-expert-parallel is all there is to give"
NOT_TAKEN = {
    "--data-parallel-rank": _ALL_RANKS,
    "--data-parallel-start-rank": _ALL_RANKS,
    "--data-parallel-size-local": _ALL_RANKS,
    "--data-parallel-backend": _ALL_RANKS,
    "--data-parallel-hybrid-lb": _ALL_RANKS,
    "--data-parallel-external-lb": _ALL_RANKS,
    "--data-parallel-address": _HOSTS,
    "--data-parallel-rpc-port": _HOSTS,
    "--distributed-executor-backend": _HOSTS,
    "--all2all-backend": _EXPERTS,
    "--enable-eplb": _EXPERTS,
}


class ServeCommand(TyperCommand):
    """A command that names replacements for vLLM's options in `NOT_TAKEN`, and whose `--kv-disk` needs no size."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        for name in (arg.partition("=")[0] for arg in args):
            if name in NOT_TAKEN:
                raise typer.BadParameter(f"{name} is not supported: {NOT_TAKEN[name]}")
        return super().parse_args(ctx, spread_modules(with_size(args)))
