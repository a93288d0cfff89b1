"""`jaxis serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.options import ChatTemplate, Debug, EngineOptions, expand_options
from jaxis.cli.serve_options import KEY_VARIABLE, HostOptions, LimitOptions, ServerOptions, client_lines
from jaxis.engine.arguments import EngineArgs
from jaxis.host.extras import check_extra

if TYPE_CHECKING:
    from jaxis.engine.frontend.async_engine import AsyncLLMEngine
    from jaxis.server.config import ServerConfig
    from jaxis.server.context import ServerParts
    from jaxis.tokenizer import Tokenizer


@expand_options
def serve(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder, file or Hub id (default: embedded model).", show_default=False),
    ] = None,
    server: ServerOptions = ServerOptions(),  # noqa: B008 (frozen; only its type is used)
    limits: LimitOptions = LimitOptions(),  # noqa: B008
    hosts: HostOptions = HostOptions(),  # noqa: B008
    chat_template: ChatTemplate = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="For requests that bring none (default: another at each start).",
            rich_help_panel="Engine",
        ),
    ] = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Ctrl-C or SIGTERM lets running requests end, then the server stops. With --nnodes, several hosts run one model.

    \b
    [bold]Examples[/bold]
      jaxis serve
      jaxis serve ./Qwen3-0.6B --max-model-len 8192 --port 8080
      jaxis serve Qwen/Qwen3-0.6B --served-model-name qwen --api-key "$KEY"
      jaxis serve ./model --host 0.0.0.0 --api-key-file keys.yaml --ssl-certfile cert.pem --ssl-keyfile key.pem
    """
    with report_errors(debug=debug):
        hosts.check()
        if hosts.node_rank > 0:
            _follow(hosts, model)
            return
        check_extra("server", "jaxis serve")
        config = _server_config(model, server, limits)
        server.check_files()
        server.check_tls()
        server.check_metrics()
        server.check_tracing()
        # Checks everything that can fail before a minute of loading, not after it.
        drawn_seed = secrets.randbits(32) if seed is None else None
        engine_arguments = {
            "model": model,
            **engine.llm_arguments(),
            **hosts.llm_arguments(),
            "seed": drawn_seed if seed is None else seed,
            "chat_template": chat_template,
            "fit_memory": model is not None,
        }
        EngineArgs(**engine_arguments)
        from jaxis.server.run import allow_many_connections, listen

        allow_many_connections()
        with listen(server.host, server.port) as listener:
            _serve(server, config, engine_arguments, listener, drawn_seed=drawn_seed, debug=debug)


def _follow(hosts: HostOptions, model: str | None) -> None:
    """Does what host 0 says; of the other options, only the model counts: where this host has it."""
    with exit_on_interrupt():
        from jaxis.engine.follower import follow
        from jaxis.engine.hosts.meeting import HostPlace
        from jaxis.host.logs import set_up_logs
        from jaxis.host.progress import ProgressDisplay

        place = HostPlace(
            hosts.nnodes, hosts.node_rank, hosts.master_addr, hosts.master_port, hosts.distributed_timeout_seconds
        )
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
    debug: bool,
) -> None:
    with exit_on_interrupt():
        from jaxis.engine.frontend.async_engine import AsyncLLMEngine
        from jaxis.engine.frontend.engine_process import EngineProcess, LogSettings
        from jaxis.host.logs import set_up_logs
        from jaxis.host.machine import yield_to_others
        from jaxis.server.run import make_server

        log = LogSettings(as_json=server.log_format == "json", level=logging.DEBUG if debug else logging.INFO)
        process = EngineProcess(engine_arguments, stall_seconds=config.stall_seconds, log=log)
    set_up_logs(as_json=log.as_json, level=log.level)
    engine = AsyncLLMEngine(process, max_queued=config.max_queued, stall_seconds=config.stall_seconds)
    uvicorn_server = make_server(
        engine,
        config,
        ssl_certfile=server.ssl_certfile and os.fspath(server.ssl_certfile),
        ssl_keyfile=server.ssl_keyfile and os.fspath(server.ssl_keyfile),
    )
    host, port = listener.getsockname()[:2]
    for line in start_lines(engine, config, host, port, tls=server.ssl_certfile is not None, seed=drawn_seed):
        note(line)
    # uvicorn raises its signals once more after the requests have ended: that is a success.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if config.api_key_file is not None or config.request_log is not None:
        parts: ServerParts = uvicorn_server.app.state.parts
        signal.signal(signal.SIGHUP, lambda *_: parts.reload())
    # Each of the engine's threads waits for all others at every product: one that makes room for an event loop holds up
    # every request.
    yield_to_others()
    # What start-up made stays: a collection need not look at it again.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn_server.run(sockets=[listener])
    if engine.failure is not None:
        raise engine.failure
    note("stopped")


def start_lines(
    engine: AsyncLLMEngine, config: ServerConfig, host: str, port: int, *, tls: bool, seed: int | None = None
) -> list[str]:
    """The message printed when the server starts: the model, what fits, where, and commands that work.

    Args:
      engine: Built.
      config: How it is served.
      host: Where the server listens.
      port: The same.
      tls: Whether it does so with TLS.
      seed: The engine's, if it was drawn.
    """
    from jaxis.server.http.hosts import is_loopback

    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'https' if tls else 'http'}://{shown_host}:{port}"
    lines = [
        f"model:  {', '.join(config.served_model_names)}",
        f"fits:   {engine.info.max_num_seqs} completions at once, {engine.info.max_model_len} tokens each at most, "
        f"{engine.info.num_cache_tokens} tokens in the KV cache",
        f"url:    {url}/v1" + ("  (API key needed)" if config.needs_key else ""),
    ]
    if config.webui:
        lines.append(f"chat:   {url}/")
    if seed is not None:
        lines.append(f"seed:   {seed} for requests that bring none (--seed sets it)")
    if not is_loopback(host) and not config.needs_key:
        lines.append("note:   anyone who reaches this address can use the server: set --api-key or --api-key-file")
    if engine.tokenizer is not None and engine.tokenizer.has_chat_template:
        name = config.served_model_names[0]
        lines += client_lines(url, name, engine.info.max_model_len, needs_key=config.needs_key)
    elif engine.tokenizer is not None:
        lines.append(
            "note:   the model has no chat template, so chat requests are refused: --chat-template gives it one"
        )
    return [*lines, "try:", _curl_line(url, config, engine.tokenizer)]


def _curl_line(url: str, config: ServerConfig, tokenizer: Tokenizer | None) -> str:
    path, body = "completions", {}
    if tokenizer is None:
        body["prompt"] = [1, 2, 3]
    elif tokenizer.has_chat_template:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "What is the capital of France?"}]
    else:
        body["prompt"] = "The capital of France is"
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if config.needs_key else ""
    return f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _server_config(model: str | None, server: ServerOptions, limits: LimitOptions) -> ServerConfig:
    from jaxis.parsing.model_parsers import check_parser_names
    from jaxis.server.config import ServerConfig, default_served_name
    from jaxis.server.http.hosts import is_loopback

    check_parser_names(server.tool_call_parser, server.reasoning_parser)
    api_keys = server.api_keys()
    return ServerConfig(
        served_model_names=tuple(server.served_model_name or [default_served_name(model)]),
        model_aliases=tuple(server.model_alias or ()),
        api_keys=api_keys,
        api_key_file=server.api_key_file,
        request_log=server.request_log,
        request_log_level=server.request_log_level,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        max_queued=limits.max_queued,
        max_body_bytes=limits.max_body_bytes(),
        request_timeout_seconds=limits.request_timeout or None,
        sse_keep_alive_seconds=limits.sse_keep_alive_interval,
        strict_fields=server.strict_fields,
        stall_seconds=limits.stall_timeout,
        drain_seconds=limits.drain_timeout,
        webui=server.webui,
        ollama_api=server.ollama_api,
        tokenizer_info=server.tokenizer_info,
        metrics_prefix=server.metrics_prefix,
        # With API keys, a client that has one may use any host name.
        only_allowed_hosts=is_loopback(server.host) and not (api_keys or server.api_key_file),
        allowed_hosts=tuple(server.allowed_hosts or ()),
        allowed_origins=tuple(server.allowed_origins or ()),
        otlp_traces_endpoint=server.otlp_traces_endpoint,
    )
