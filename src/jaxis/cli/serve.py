"""`jaxis serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.kv_disk import kv_disk_arguments, kv_disk_line
from jaxis.cli.lora_options import LoraOptions
from jaxis.cli.options import ChatTemplate, Debug, EngineOptions, expand_options
from jaxis.cli.serve_options import (
    HostOptions,
    LimitOptions,
    ServeCommand,
    ServerOptions,
    SeveralModelsOptions,
)
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.worker_start import drop_ahead
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes
from jaxis.host.extras import check_extra
from jaxis.rooms import check_room
from jaxis.runners import Runner, kind_of
from jaxis.server.clients import KEY_VARIABLE, ServerAddress, client_lines
from jaxis.vision.access import ImageAccess

if TYPE_CHECKING:
    from jaxis.engine.client.async_engine import AsyncEngine
    from jaxis.engine.client.engine_process import EngineProcess
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.server.config import ServerConfig
    from jaxis.server.context import ServerParts
    from jaxis.server.run import DrainingServer
    from jaxis.server.several.model_settings import ModelSettings


@expand_options
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Folder, file or Hub id (default: embedded model); several are loaded when they are asked for.",
            show_default=False,
        ),
    ] = None,
    several: SeveralModelsOptions = SeveralModelsOptions(),  # noqa: B008
    server: ServerOptions = ServerOptions(),  # noqa: B008 (frozen; only its type is used)
    limits: LimitOptions = LimitOptions(),  # noqa: B008
    hosts: HostOptions = HostOptions(),  # noqa: B008
    lora: LoraOptions = LoraOptions(),  # noqa: B008
    chat_template: ChatTemplate = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="RUNNER",
            help="Generate text, or make vectors of texts; auto is what the checkpoint was made for.",
            rich_help_panel="Engine",
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="For requests that bring none (default: another at each start).",
            rich_help_panel="Engine",
        ),
    ] = None,
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="[SIZE]",
            help="Keep computed prompts on disk, over restarts (without SIZE: a quarter of what is free).",
            rich_help_panel="Engine",
        ),
    ] = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Serve a model, or several, with an OpenAI-compatible API.

    Ctrl-C or SIGTERM lets running requests end, then the server stops. With --nnodes, several hosts run one model.

    \b
    [bold]Examples[/bold]
      jaxis serve
      jaxis serve ./Qwen3-0.6B --max-model-len 8192 --port 8080
      jaxis serve Qwen/Qwen3-0.6B --served-model-name qwen --api-key "$KEY"
      jaxis serve ./base --enable-lora --lora-modules poet=./poet clerk=./clerk
      jaxis serve --models models.yaml --idle-timeout 10m
      jaxis serve ./model --host 0.0.0.0 --api-key-file keys.yaml --ssl-certfile cert.pem --ssl-keyfile key.pem
    """
    with report_errors(debug=debug):
        hosts.check()
        if hosts.node_rank > 0:
            _follow(hosts, model[0] if model else None)
            return
        check_extra("server", "jaxis serve")
        if several.models is not None or len(model or ()) > 1:
            _check_several(server, hosts, kv_disk, runner)
            lora.check_none("is for one model: give one MODEL")
            own = {"chat_template": chat_template, "seed": seed}
            groups = dataclasses.asdict(server) | dataclasses.asdict(limits) | dataclasses.asdict(engine)
            _serve_several(
                server, several, model or [], groups | own, _server_config(None, server, limits), debug=debug
            )
        else:
            only = model[0] if model else None
            arguments = {**engine.llm_arguments(), **hosts.llm_arguments(), "chat_template": chat_template}
            arguments |= lora.llm_arguments()
            arguments |= kv_disk_arguments(kv_disk, arguments)
            config = dataclasses.replace(_server_config(only, server, limits), lora_updates=lora.allows_updates)
            _serve_one(server, {"model": only, **arguments}, seed, config, runner=runner, debug=debug)


def _serve_one(
    server: ServerOptions,
    given: Mapping[str, Any],
    seed: int | None,
    config: ServerConfig,
    *,
    runner: Runner,
    debug: bool,
) -> None:
    # Checks everything that can fail before a minute of loading, not after it.
    server.check()
    drawn_seed = secrets.randbits(32) if seed is None else None
    engine_arguments = {
        **given,
        "seed": drawn_seed if seed is None else seed,
        "fit_memory": given["model"] is not None,
    }
    if (folder := given.get("kv_offloading_dir")) is not None:
        config = dataclasses.replace(config, response_folder=Path(folder))
    EngineArgs(**engine_arguments)
    from jaxis.server.listener import allow_many_connections, listen

    allow_many_connections()
    with listen(server.host, server.port) as listener:
        _serve(server, config, engine_arguments, listener, drawn_seed=drawn_seed, runner=runner, debug=debug)


def _check_several(server: ServerOptions, hosts: HostOptions, kv_disk: str | None, runner: Runner) -> None:
    """Raises ConfigError for options that several models cannot have in common."""
    if hosts.nnodes > 1:
        raise ConfigError("--nnodes is for one model: give one MODEL")
    if kv_disk is not None:
        raise ConfigError("--kv-disk is for one model: give --kv-offloading-size and --kv-offloading-dir")
    if server.weights_root is not None:
        raise ConfigError("--weights-root is for one model: give one MODEL")
    if runner != "auto":
        raise ConfigError("--runner is for one model: of several, each does what it was made for")
    for option, value in (("--served-model-name", server.served_model_name), ("--model-alias", server.model_alias)):
        if value:
            raise ConfigError(f"{option} is for one model: give it to each in a file of --models")


def _serve_several(
    server: ServerOptions,
    several: SeveralModelsOptions,
    models: Sequence[str],
    options: Mapping[str, Any],
    config: ServerConfig,
    *,
    debug: bool,
) -> None:
    check_room("server.several", "more than one MODEL (or --models)")
    from jaxis.cli.serve_models import read_models

    server.check()
    settings, pool_limits = read_models(models, several, options, config)
    with exit_on_interrupt():
        from jaxis.engine.client.engine_process import LogSettings
        from jaxis.host.logs import set_up_logs
        from jaxis.server.listener import allow_many_connections, listen
        from jaxis.server.one_model import behind_loop
        from jaxis.server.run import make_models_server
        from jaxis.server.several.pool import ModelPool

        log = LogSettings(as_json=server.log_format == "json", level=logging.DEBUG if debug else logging.INFO)

        def start_engine(of_model: ModelSettings, shared: MemoryBudget, admit: Callable[[int], None]) -> AsyncEngine:
            own = of_model.config
            arguments = of_model.engine_arguments
            process = _start_process(
                arguments, "auto", stall_seconds=own.stall_seconds, log=log, shared=shared, admit=admit
            )
            return behind_loop(process, own)

        pool = ModelPool(settings, pool_limits, start_engine)
        allow_many_connections()
    with listen(server.host, server.port) as listener:
        set_up_logs(as_json=log.as_json, level=log.level)
        tls = server.tls_files()
        uvicorn_server = make_models_server(pool, config, ssl_certfile=tls[0], ssl_keyfile=tls[1])
        host, port = listener.getsockname()[:2]
        for line in several_lines(settings, config, host, port, tls=tls[0] is not None):
            note(line)
        _run(uvicorn_server, config, listener)


def _follow(hosts: HostOptions, model: str | None) -> None:
    """Follows host 0; of the other options, only the model counts: its path on this host."""
    drop_ahead()  # the engine runs in this process
    with exit_on_interrupt():
        from jaxis.engine.follower import follow
        from jaxis.host.logs import set_up_logs
        from jaxis.host.progress import ProgressDisplay

        place = hosts.place()
        set_up_logs(as_json=False, level=logging.INFO)
        note(f"host {place.rank} of {place.num_hosts}: looking for host 0 at {place.address}:{place.port}")
        follow(place, {} if model is None else {"model": model}, ProgressDisplay())


def _serve(
    server: ServerOptions,
    config: ServerConfig,
    engine_arguments: dict[str, Any],
    listener: socket.socket,
    *,
    drawn_seed: int | None,
    runner: Runner,
    debug: bool,
) -> None:
    with exit_on_interrupt():
        from jaxis.engine.client.engine_process import LogSettings
        from jaxis.host.logs import set_up_logs

        log = LogSettings(as_json=server.log_format == "json", level=logging.DEBUG if debug else logging.INFO)
        process = _start_process(
            engine_arguments, runner, stall_seconds=config.stall_seconds, log=log, meanwhile=_import_server
        )
    from jaxis.server.one_model import behind_loop
    from jaxis.server.run import make_server

    set_up_logs(as_json=log.as_json, level=log.level)
    engine = behind_loop(process, config)
    if "completion" not in engine.info.capabilities:
        config, drawn_seed = dataclasses.replace(config, webui=False), None  # nobody chats with it
    tls = server.tls_files()
    uvicorn_server = make_server(engine, config, ssl_certfile=tls[0], ssl_keyfile=tls[1])
    host, port = listener.getsockname()[:2]
    lines = start_lines(engine, config, host, port, tls=tls[0] is not None, seed=drawn_seed)
    if (disk := kv_disk_line(engine_arguments)) is not None:
        lines.insert(2, disk)
    for line in lines:
        note(line)
    _run(uvicorn_server, config, listener)


def _run(server: DrainingServer, config: ServerConfig, listener: socket.socket) -> None:
    from jaxis.host.machine import yield_to_others

    # uvicorn raises its signals once more after the requests have ended: that is a success.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if config.api_key_file is not None or config.request_log is not None:
        parts: ServerParts = server.app.state.parts
        signal.signal(signal.SIGHUP, lambda *_: parts.reload())
    # Each of the engine's threads waits for all others at every product: one that makes room for an event loop holds up
    # every request.
    yield_to_others()
    # What start-up made stays: a collection need not look at it again.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    note("stopped")


def _import_server() -> None:
    """Imports the server, which takes as long as JAX, while the engine's process imports that."""
    importlib.import_module("jaxis.server.run")
    importlib.import_module("jaxis.server.protocol").protocols()
    gc.freeze()  # the modules stay: no collection need look at them


def _start_process(arguments: Mapping[str, Any], runner: Runner, **settings: Any) -> EngineProcess:
    """Starts the process of a model, of the kind that it was made for or that was asked for."""
    from jaxis.engine.client.engine_process import EngineProcess

    return EngineProcess(arguments, kind_of(EngineArgs(**arguments), runner), **settings)


def several_lines(
    models: Sequence[ModelSettings], config: ServerConfig, host: str, port: int, *, tls: bool
) -> list[str]:
    """Returns the message that a server of several models prints at the start: the models and the server's address."""
    url = _url(host, port, tls=tls)
    names = [", ".join(model.names.names) + (" (pinned)" if model.pinned else "") for model in models]
    lines = [f"models: {'; '.join(names)}", *_address_lines(url, config, host)]
    body = {"model": models[0].name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return [*lines, "try:", _curl(url, "v1/chat/completions", body, config)]


def start_lines(
    engine: AsyncEngine, config: ServerConfig, host: str, port: int, *, tls: bool, seed: int | None = None
) -> list[str]:
    """Returns the message that the server prints at the start: model, capacity, address, and commands that work.

    `seed` is the engine's, if it was drawn.
    """
    from jaxis.server.protocol import protocols

    url = _url(host, port, tls=tls)
    info, generates = engine.info, "completion" in engine.info.capabilities
    fits = f"{info.max_num_seqs} {engine.unit} at once, {info.max_model_len} tokens each at most"
    if generates:
        fits += f", {info.num_cache_tokens} tokens in the KV cache"
    lines = [
        f"model:  {', '.join(config.served_model_names)}",
        f"fits:   {fits}",
    ]
    address = _address_lines(url, config, host)
    if seed is not None:
        address.insert(1 + config.webui, f"seed:   {seed} for requests that bring none (--seed sets it)")
    lines += address
    if not generates:
        return [*lines, "try:", _curl_line(url, config, engine)]
    if engine.tokenizer is not None and engine.tokenizer.has_chat_template:
        name = config.served_model_names[0]
        clients = [client for protocol in protocols() for client in protocol.clients]
        lines += client_lines(clients, ServerAddress(url, name, engine.info.max_model_len, config.needs_key))
    elif engine.tokenizer is not None:
        lines.append(
            "note:   the model has no chat template, so chat requests are refused: --chat-template gives it one"
        )
    return [*lines, "try:", _curl_line(url, config, engine)]


def _url(host: str, port: int, *, tls: bool) -> str:
    """Returns the address for a client on this machine, without a path."""
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown_host}:{port}"


def _address_lines(url: str, config: ServerConfig, host: str) -> list[str]:
    """Describes the server's address, and its allowed clients."""
    from jaxis.server.listener import is_loopback

    lines = [f"url:    {url}/v1" + ("  (API key needed)" if config.needs_key else "")]
    if config.webui:
        lines.append(f"chat:   {url}/")
    if not is_loopback(host) and not config.needs_key:
        lines.append("note:   anyone who reaches this address can use the server: set --api-key or --api-key-file")
    return lines


def _curl_line(url: str, config: ServerConfig, engine: AsyncEngine) -> str:
    path, body, tokenizer = "v1/completions", dict[str, Any](), engine.tokenizer
    capabilities, sentence = engine.info.capabilities, "The capital of France is Paris."
    if "rerank" in capabilities:
        path, body["query"] = "v1/rerank", "What is the capital of France?"
        body["documents"] = [sentence, "Cats eat fish."]
    elif "classification" in capabilities:
        path, body = "classify", {"input": sentence}
    elif "completion" not in capabilities:
        path, body["input"] = "v1/embeddings", [1, 2, 3] if tokenizer is None else sentence
    elif tokenizer is None:
        body["prompt"] = [1, 2, 3]
    elif tokenizer.has_chat_template:
        path, body["messages"] = "v1/chat/completions", [{"role": "user", "content": "What is the capital of France?"}]
    else:
        body["prompt"] = "The capital of France is"
    return _curl(url, path, body, config)


def _curl(url: str, path: str, body: Mapping[str, Any], config: ServerConfig) -> str:
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if config.needs_key else ""
    return f"  curl {url}/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _server_config(model: str | None, server: ServerOptions, limits: LimitOptions) -> ServerConfig:
    from jaxis.parsing.model_parsers import check_parser_names
    from jaxis.server.config import ServerConfig, default_served_name
    from jaxis.server.listener import is_loopback

    check_parser_names(server.tool_call_parser, server.reasoning_parser)
    api_keys = server.api_keys()
    of_config = {field.name for field in dataclasses.fields(ServerConfig)}
    same = {name: value for name, value in vars(server).items() if name in of_config}
    others: dict[str, Any] = {
        "served_model_names": tuple(server.served_model_name or [default_served_name(model)]),
        "model_aliases": tuple(server.model_alias or ()),
        "api_keys": api_keys,
        "image_access": ImageAccess(server.allowed_local_media_path, tuple(server.allowed_media_domains or ())),
        "effort_budgets": server.effort_budgets(),
        "response_ttl_seconds": limits.response_ttl * 3600,
        "response_store_bytes": parse_bytes(limits.response_store_size, "--response-store-size"),
        "max_queued": limits.max_queued,
        "max_body_bytes": limits.max_body_bytes(),
        "request_timeout_seconds": limits.request_timeout or None,
        "sse_keep_alive_seconds": limits.sse_keep_alive_interval,
        "stall_seconds": limits.stall_timeout,
        "drain_seconds": limits.drain_timeout,
        # With API keys, a client that has one may use any host name.
        "only_allowed_hosts": is_loopback(server.host) and not (api_keys or server.api_key_file),
        "allowed_hosts": tuple(server.allowed_hosts or ()),
        "allowed_origins": tuple(server.allowed_origins or ()),
    }
    return ServerConfig(**same | others)


COMMANDS = (Command("serve", serve, "server", {"cls": ServeCommand}),)
