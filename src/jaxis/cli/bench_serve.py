"""`jaxis bench serve`: how fast an OpenAI-compatible server answers, seen from outside."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from jaxis.cli.console import report_errors
from jaxis.cli.options import OUTPUT_PANEL, Debug, expand_options, parse_json_object
from jaxis.errors import ConfigError, EngineError
from jaxis.host.extras import check_extra

if TYPE_CHECKING:
    from jaxis.bench.serving.client import ServingClient
    from jaxis.bench.serving.dataset import ServingRequest
    from jaxis.bench.serving.load import LoadResult

API_KEY_VARIABLE = "OPENAI_API_KEY"
_METRICS = ("ttft", "tpot", "itl", "e2el")


def _option(panel: str, help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=panel, **settings)


def _server(help: str, **settings: Any) -> OptionInfo:
    return _option("Server", help, **settings)


def _load(help: str, **settings: Any) -> OptionInfo:
    return _option("Load", help, **settings)


def _prompts(help: str, **settings: Any) -> OptionInfo:
    return _option("Prompts", help, **settings)


def _output(help: str, **settings: Any) -> OptionInfo:
    return _option(OUTPUT_PANEL, help, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which server, and what every request asks of it."""

    base_url: Annotated[str, _server("Where it is.", metavar="URL")] = "http://127.0.0.1:8000"
    endpoint: Annotated[Literal["/v1/completions", "/v1/chat/completions"], _server("What to call.")] = (
        "/v1/completions"
    )
    model: Annotated[str | None, _server("Its name there (default: the first listed).", metavar="NAME")] = None
    api_key: Annotated[
        str | None,
        _server(f"Sent with every request (default: {API_KEY_VARIABLE}).", metavar="KEY"),
    ] = None
    temperature: Annotated[float, _server("0 always takes the most likely token.", min=0.0, metavar="NUMBER")] = 0.0
    ignore_eos: Annotated[bool, _server("Always generate the full length (vLLM, jaxis).", show_default=False)] = False
    extra_body: Annotated[str | None, _server("More fields of every request.", metavar="JSON")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When to send."""

    num_prompts: Annotated[int, _load("Requests in all.", min=1, metavar="NUMBER")] = 100
    request_rate: Annotated[
        float, _load("Requests a second, on average; inf sends all at once.", min=0.001, metavar="NUMBER")
    ] = float("inf")
    burstiness: Annotated[
        float, _load("1 is a Poisson process, less comes in bursts, more is more even.", min=0.01, metavar="NUMBER")
    ] = 1.0
    max_concurrency: Annotated[
        int | None, _load("Most requests at once; with a rate, waiting for a place counts.", min=1, metavar="NUMBER")
    ] = None
    num_warmups: Annotated[int, _load("Requests before that are not measured.", min=0, metavar="NUMBER")] = 1
    seed: Annotated[int, _load("Of prompts and times.", metavar="NUMBER")] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Workload options."""

    dataset_name: Annotated[
        Literal["random", "custom", "sharegpt"],
        _prompts('random; custom: lines of {"prompt": ...} or {"messages": ...}; sharegpt: its JSON file.'),
    ] = "random"
    dataset_path: Annotated[Path | None, _prompts("File of custom or sharegpt.", metavar="FILE")] = None
    output_len: Annotated[int, _prompts("Tokens to generate for prompts of a file.", min=1, metavar="TOKENS")] = 128
    random_input_len: Annotated[int, _prompts("Tokens of a random prompt.", min=1, metavar="TOKENS")] = 128
    random_output_len: Annotated[int, _prompts("Tokens to generate for it.", min=1, metavar="TOKENS")] = 128
    random_range_ratio: Annotated[
        float, _prompts("0.5 draws both lengths from 50% to 150%.", min=0.0, max=1.0, metavar="0..1")
    ] = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Output options."""

    percentile_metrics: Annotated[str, _output("Latencies to print.", metavar="NAMES")] = ",".join(_METRICS)
    metric_percentiles: Annotated[str, _output("Percentiles to give of each.", metavar="NUMBERS")] = "90,99"
    goodput: Annotated[
        list[str] | None,
        _output(
            "Most milliseconds for a request to count as good, such as ttft:500; can be given several times.",
            metavar="NAME:NUMBER",
        ),
    ] = None
    save_result: Annotated[bool, _output("Write all figures to a JSON file.", show_default=False)] = False
    save_detailed: Annotated[bool, _output("Write those of each request too.", show_default=False)] = False
    result_dir: Annotated[Path, _output("Folder of the file.", metavar="FOLDER")] = Path()
    result_filename: Annotated[str | None, _output("Its name (default: from model and time).", metavar="NAME")] = None

    def metrics(self) -> list[str]:
        """The names of --percentile-metrics."""
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        if unknown := [name for name in names if name not in _METRICS]:
            raise typer.BadParameter(
                f"{unknown[0]!r} is not one of {', '.join(_METRICS)}", param_hint="--percentile-metrics"
            )
        return names

    def percentiles(self) -> list[float]:
        """The numbers of --metric-percentiles."""
        return [_number(word, "--metric-percentiles", most=100) for word in self.metric_percentiles.split(",")]

    def limits(self) -> dict[str, float]:
        """Of --goodput, in milliseconds."""
        limits = {}
        for text in self.goodput or ():
            name, _, limit = text.partition(":")
            if name not in ("ttft", "tpot", "e2el"):
                raise typer.BadParameter(f"{text!r} is not ttft, tpot or e2el with a number", param_hint="--goodput")
            limits[name] = _number(limit, "--goodput")
        return limits


@expand_options
def serve(
    target: TargetOptions = TargetOptions(),
    load: LoadOptions = LoadOptions(),
    prompts: PromptOptions = PromptOptions(),
    result: ResultOptions = ResultOptions(),
    debug: Debug = False,
) -> None:
    """Measure an OpenAI-compatible server: latencies, requests and tokens a second.

    Latencies count from when a request was to be sent. Tokens are counted by the server.

    \b
    [bold]Examples[/bold]
      jaxis bench serve --num-prompts 200 --max-concurrency 16
      jaxis bench serve --request-rate 8 --random-input-len 512 --ignore-eos
      jaxis bench serve --dataset-name custom --dataset-path prompts.jsonl --output-len 64
      jaxis bench serve --request-rate 4 --goodput ttft:500 --goodput tpot:50
    """
    metrics, percentiles, limits = result.metrics(), result.percentiles(), result.limits()
    extra_body = parse_json_object(target.extra_body, "--extra-body") or {}
    with report_errors(debug=debug):
        check_extra("server", "jaxis bench serve")
        import asyncio  # here, since every command imports this file

        folder = _result_folder(result)
        requests, arrivals = _requests(target, load, prompts)
        from jaxis.bench.serving.report import details, format_report, summarize

        url, model, measured = asyncio.run(_measure(target, load, extra_body, requests, arrivals))
        report = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "url": url,
            "model_id": model,
            "num_prompts": load.num_prompts,
            "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
            "burstiness": load.burstiness,
            "max_concurrency": load.max_concurrency,
            "seed": load.seed,
            **summarize(measured, percentiles, limits),
        }
        print(format_report(report, metrics, percentiles))
        if folder is not None:
            name = result.result_filename or f"serve-{Path(model).name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
            _write(folder / name, report | (details(measured) if result.save_detailed else {}))
        if not report["completed"]:
            raise EngineError(f"all {report['failed']} requests failed")


def _requests(
    target: TargetOptions, load: LoadOptions, prompts: PromptOptions
) -> tuple[list[ServingRequest], list[float]]:
    """All requests, with those of the warm-up first, and the times to send the others."""
    import numpy as np

    from jaxis.bench.serving.dataset import arrival_times, random_requests, read_requests

    rng = np.random.default_rng(load.seed)
    num, chat = load.num_warmups + load.num_prompts, target.endpoint == "/v1/chat/completions"
    if (prompts.dataset_path is None) != (prompts.dataset_name == "random"):
        raise ConfigError("--dataset-path belongs to --dataset-name custom or sharegpt: give both, or neither")
    if prompts.dataset_path is None:
        requests = random_requests(
            rng,
            num,
            input_len=prompts.random_input_len,
            output_len=prompts.random_output_len,
            range_ratio=prompts.random_range_ratio,
            chat=chat,
        )
    else:
        requests = read_requests(
            prompts.dataset_path, prompts.dataset_name, rng, num, output_len=prompts.output_len, chat=chat
        )
    return requests, arrival_times(rng, load.num_prompts, load.request_rate, load.burstiness)


async def _measure(
    target: TargetOptions,
    load: LoadOptions,
    extra_body: dict[str, Any],
    requests: list[ServingRequest],
    arrivals: list[float],
) -> tuple[str, str, LoadResult]:
    from jaxis.bench.serving.client import ServingClient
    from jaxis.bench.serving.load import allow_many_connections, run_load
    from jaxis.host.progress import ProgressDisplay

    allow_many_connections()
    api_key = target.api_key or os.environ.get(API_KEY_VARIABLE)
    async with ServingClient(target.base_url, target.endpoint, api_key) as client:
        model = target.model or await client.first_model()
        parameters = {"model": model, "temperature": target.temperature}
        parameters |= ({"ignore_eos": True} if target.ignore_eos else {}) | extra_body
        bodies = [client.encode(request, parameters) for request in requests]
        await _warm_up(client, bodies[: load.num_warmups])
        with ProgressDisplay().generating(load.num_prompts) as progress:
            measured = await run_load(
                client,
                bodies[load.num_warmups :],
                arrivals,
                max_concurrency=load.max_concurrency,
                progress=progress,
            )
    return client.url, model, measured


async def _warm_up(client: ServingClient, bodies: list[bytes]) -> None:
    """Raises EngineError if a request fails: all others would too."""
    from jaxis.bench.serving.load import run_load

    for result in (await run_load(client, bodies, [0.0] * len(bodies))).results:
        if result.error is not None:
            raise EngineError(f"the warm-up request to {client.url} failed: {result.error}")


def _number(text: str, option: str, most: float = float("inf")) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise typer.BadParameter(f"{text!r} is not a number from 0 to {most:g}", param_hint=option)
    return value


def _result_folder(result: ResultOptions) -> Path | None:
    """The folder to write to, if any.

    Raises:
      ConfigError: It does not exist, which is better said before measuring than after.
    """
    if not result.save_result:
        return None
    if not result.result_dir.is_dir():
        raise ConfigError(f"--result-dir={result.result_dir} is not a folder: make it first, or give another")
    return result.result_dir


def _write(file: Path, report: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    print(f"\nwritten to {file}")
