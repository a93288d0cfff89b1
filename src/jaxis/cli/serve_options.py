"""Options of `jaxis serve`, as dataclasses that become one command line option per field."""

from __future__ import annotations

import dataclasses
import os
import re
import ssl
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from jaxis.cli.host_options import GroupOptions, host_option
from jaxis.cli.kv_disk import with_size
from jaxis.cli.lora_options import spread_modules
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes
from jaxis.host.tls import load_certificate
from jaxis.rooms import check_room
from jaxis.server.clients import KEY_VARIABLE
from jaxis.server.config import BODY_BYTES, ServerConfig

_EFFORT = re.compile(r"([A-Za-z_-]{1,64})=([0-9]{1,9})")


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
"""vLLM's options of `serve` for another way to spread a model -> the options to give instead."""


class ServeCommand(TyperCommand):
    """A command that names replacements for vLLM's options in `NOT_TAKEN`, and whose `--kv-disk` needs no size."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        for name in (arg.partition("=")[0] for arg in args):
            if name in NOT_TAKEN:
                raise typer.BadParameter(f"{name} is not supported: {NOT_TAKEN[name]}")
        return super().parse_args(ctx, spread_modules(with_size(args)))


SERVER_PANEL = "Server"
LIMITS_PANEL = "Limits"
IMAGES_PANEL = "Images"
MODELS_PANEL = "Several models"
_DEFAULTS = ServerConfig()


def _server(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=SERVER_PANEL, **settings)


def _limit(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=LIMITS_PANEL, **settings)


def _image(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=IMAGES_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address of the server, its allowed clients, and settings; those named as in `ServerConfig` are passed on."""

    host: Annotated[str, _server("Address to listen on; 0.0.0.0 is all of this machine's.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _server("Port to listen on; 0 takes a free one.", min=0, max=65535, metavar="PORT")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        _server("Name for clients; can be given several times (default: MODEL).", metavar="NAME"),
    ] = None
    model_alias: Annotated[
        list[str] | None,
        _server(
            "Pattern of more names that are taken for the model, such as 'gpt-*', or '*' for any; can be given several "
            "times.",
            metavar="PATTERN",
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        _server("Format of the model's tool calls; auto looks into its chat template, none leaves them in the text."),
    ] = _DEFAULTS.tool_call_parser
    reasoning_parser: Annotated[str, _server("Format of the model's reasoning; auto and none as above.")] = (
        _DEFAULTS.reasoning_parser
    )
    tool_strictness: Annotated[
        Literal["request", "always"],
        _server(
            "Which functions' calls must fit their schemas where the model decides to call: those that a request "
            "calls strict, or all.",
            metavar="request|always",
        ),
    ] = _DEFAULTS.tool_strictness
    weights_root: Annotated[
        Path | None,
        _server("Folder below which admin keys may name other weights for the model.", metavar="DIR"),
    ] = None
    reasoning_budget: Annotated[
        int | None,
        _server(
            "Most tokens that any answer may think: then its thinking is ended. Requests can ask for less.",
            min=0,
            metavar="TOKENS",
        ),
    ] = None
    reasoning_effort: Annotated[
        str | None,
        _server(
            "Tokens that a model may think at each effort, such as low=512,high=8192, where its chat template reads "
            "none; none is 0.",
            metavar="EFFORT=TOKENS,...",
        ),
    ] = None
    restore_thinking: Annotated[
        bool,
        _server("Put the thinking of the server's own answers back where clients leave it out."),
    ] = _DEFAULTS.restore_thinking
    api_key: Annotated[
        list[str] | None,
        _server(
            f"Key that requests must bring; can be given several times, or in {KEY_VARIABLE}.",
            metavar="KEY",
            show_default=False,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, _server("File of keys with names and limits; jaxis new-key makes them.", metavar="FILE")
    ] = None
    request_log: Annotated[Path | None, _server("File that gets a line of JSON for every request.", metavar="FILE")] = (
        None
    )
    request_log_level: Annotated[
        Literal["ids-and-usage", "full"],
        _server("Which key asked for how much, or also what was asked and answered.", metavar="ids-and-usage|full"),
    ] = _DEFAULTS.request_log_level
    allowed_hosts: Annotated[
        list[str] | None,
        _server(
            "Name by which a server on the loopback address may be called, besides localhost; for a proxy on this "
            "machine. Can be given several times.",
            metavar="NAME",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _server("Origin whose scripts may call (CORS); can be given several times.", metavar="ORIGIN"),
    ] = None
    allowed_local_media_path: Annotated[
        Path | None,
        _image(
            "Folder below which requests may name images as file:// URLs; by default they name no files.",
            metavar="DIR",
            exists=True,
            file_okay=False,
        ),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        _image(
            "Host from which images are fetched that requests name as https:// URLs; by default nothing is fetched. "
            "Can be given several times.",
            metavar="HOST",
        ),
    ] = None
    strict_fields: Annotated[bool, _server("Refuse unknown fields of requests, in place of ignoring them.")] = (
        _DEFAULTS.strict_fields
    )
    webui: Annotated[bool, _server("Serve the chat page at /.")] = _DEFAULTS.webui
    ollama_api: Annotated[bool, _server("Serve Ollama's API under /api.")] = _DEFAULTS.ollama_api
    tokenizer_info: Annotated[
        bool, _server("Tell the tokenizer's settings and the chat template at /tokenizer_info.")
    ] = _DEFAULTS.tokenizer_info
    metrics_prefix: Annotated[
        str, _server("What the names of metrics begin with; vllm suits its dashboards and gateways.", metavar="WORD")
    ] = _DEFAULTS.metrics_prefix
    ssl_certfile: Annotated[Path | None, _server("TLS certificate, PEM.", metavar="FILE")] = None
    ssl_keyfile: Annotated[Path | None, _server("Its key, PEM.", metavar="FILE")] = None
    log_format: Annotated[Literal["text", "json"], _server("How to write the log.")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None, _server("OpenTelemetry collector for traces, such as http://localhost:4318.", metavar="URL")
    ] = None

    def api_keys(self) -> tuple[str, ...]:
        """Returns the keys that are given as options. Raises ConfigError if one is empty."""
        from_environment = os.environ.get(KEY_VARIABLE)
        given = self.api_key or ([] if from_environment is None else [from_environment])
        if not all(key.strip() for key in given):
            raise ConfigError(f"--api-key (or {KEY_VARIABLE}) is empty: give a key, or leave it out")
        return tuple(given)

    def effort_budgets(self) -> dict[str, int]:
        """Returns the tokens of each reasoning effort; empty if the option is not given.

        Raises:
          ConfigError: The option is not a list of efforts with a number of tokens each.
        """
        if self.reasoning_effort is None:
            return {}
        budgets = {"none": 0}
        for each in self.reasoning_effort.split(","):
            match = _EFFORT.fullmatch(each.strip())
            if match is None:
                raise ConfigError(
                    f"--reasoning-effort has {each!r}: write efforts such as low=512,medium=2048,high=8192"
                )
            budgets[match[1]] = int(match[2])
        return budgets

    def check(self) -> None:
        """Raises ConfigError for what cannot be honoured: before models are loaded, not after it."""
        if self.weights_root is not None:
            check_room("server.weights", "--weights-root")
        self.check_files()
        self.check_tls()
        self.check_metrics()
        self.check_tracing()

    def tls_files(self) -> tuple[str | None, str | None]:
        return self.ssl_certfile and os.fspath(self.ssl_certfile), self.ssl_keyfile and os.fspath(self.ssl_keyfile)

    def check_files(self) -> None:
        """Raises ConfigError if the file of API keys cannot be read, or the request log cannot be written."""
        from jaxis.server.http.api_keys import read_api_keys
        from jaxis.server.http.request_records import RequestLogFile

        if self.api_key_file is not None:
            read_api_keys(self.api_key_file)
        if self.request_log is not None:
            RequestLogFile(self.request_log).close()

    def check_tracing(self) -> None:
        """Raises ConfigError if traces cannot be sent: OpenTelemetry is missing, or the address is invalid."""
        if self.otlp_traces_endpoint is not None:
            from jaxis.server.observability.tracing import check_endpoint

            check_endpoint(self.otlp_traces_endpoint)

    def check_metrics(self) -> None:
        """Raises ConfigError if the metrics' prefix cannot be the beginning of their names."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix {self.metrics_prefix!r} cannot begin a metric's name: give letters, digits and _, "
                "with no digit at the start"
            )

    def check_tls(self) -> None:
        """Raises ConfigError if the TLS options are incomplete, or their files cannot be used."""
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs both --ssl-certfile and --ssl-keyfile")
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, self.ssl_certfile, self.ssl_keyfile, ("--ssl-certfile", "--ssl-keyfile"))


def _models(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=MODELS_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralModelsOptions:
    """Options for several models at one address; see docs/serving.md."""

    models: Annotated[
        Path | None, _models("YAML file of models, which are loaded when they are asked for.", metavar="FILE")
    ] = None
    models_max: Annotated[
        int | None, _models("Most models that are loaded at once (default: what fits).", min=1, metavar="NUMBER")
    ] = None
    idle_timeout: Annotated[
        str | None,
        _models(
            "How long a model stays loaded after its last request, such as 10m (default: for good).", metavar="TIME"
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(GroupOptions):
    """Hosts that run one model together."""

    headless: Annotated[bool, host_option("Serve nothing here; what any host but 0 does.")] = False

    def check(self) -> None:
        super().check()
        if self.headless and self.node_rank == 0:
            raise ConfigError("--headless is for the hosts that do not serve: give it with --node-rank 1 and later")

    def llm_arguments(self) -> dict[str, Any]:
        return {
            "nnodes": self.nnodes,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "distributed_timeout_seconds": self.distributed_timeout_seconds,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of the server."""

    max_queued: Annotated[
        int, _limit("Most completions that wait; more are refused with 429.", min=0, metavar="NUMBER")
    ] = _DEFAULTS.max_queued
    response_ttl: Annotated[
        float,
        _limit("Hours that stored responses stay after their last use; 0 stores none.", min=0.0, metavar="HOURS"),
    ] = _DEFAULTS.response_ttl_seconds / 3600
    response_store_size: Annotated[
        str, _limit("Most bytes of all of them; in memory, or on disk with --kv-disk.", metavar="SIZE")
    ] = f"{_DEFAULTS.response_store_bytes // 2**20}MiB"
    request_timeout: Annotated[
        float, _limit("Seconds from a request to the end of its answer; 0 is no limit.", min=0.0, metavar="SECONDS")
    ] = _DEFAULTS.request_timeout_seconds or 0.0
    max_body_size: Annotated[
        str | None,
        _limit(
            f"Largest body of a request; without it {BODY_BYTES // 2**20}MiB, or more where a model's may need it.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None
    sse_keep_alive_interval: Annotated[
        float,
        _limit("Seconds of silence after which a stream gets a sign of life; 0 is none.", min=0.0, metavar="SECONDS"),
    ] = _DEFAULTS.sse_keep_alive_seconds
    stall_timeout: Annotated[
        float, _limit("Seconds a step may take before /health fails, compiling aside.", min=1.0, metavar="SECONDS")
    ] = _DEFAULTS.stall_seconds
    drain_timeout: Annotated[
        float, _limit("Seconds that requests get to end after SIGTERM.", min=0.0, metavar="SECONDS")
    ] = _DEFAULTS.drain_seconds

    def max_body_bytes(self) -> int | None:
        """Returns --max-body-size in bytes; None without it. Raises ConfigError if it is not a size."""
        return None if self.max_body_size is None else parse_bytes(self.max_body_size, "--max-body-size")
