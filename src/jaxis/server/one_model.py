"""A server of one model, which is loaded before the server starts and stays loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fastapi import Request, Response

from jaxis.engine.client.async_engine import AsyncEngine, EngineClient
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.embedded_inputs.info import InputInfo
from jaxis.errors import EngineError
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.rooms import room_module
from jaxis.server.config import ServerConfig
from jaxis.server.context import Handler, KnownModel, ModelEntry, ServedModels, ServerContext, ServerParts
from jaxis.server.generation.model_info import ServedModelInfo
from jaxis.server.generation.served_model import ModelNames, ServedModel
from jaxis.server.lora.served_adapters import ServedAdapters
from jaxis.server.observability.metrics import ModelMetrics
from jaxis.vision.decode import DECODERS
from jaxis.vision.prompt_images import NoImages, PromptImages


def behind_loop(client: EngineClient, config: ServerConfig) -> AsyncEngine:
    """Returns an engine of either kind, served from the event loop with the settings of `config`."""
    max_queued, stall_seconds = config.max_queued, config.stall_seconds
    if "completion" in client.info.capabilities:
        return AsyncLLMEngine(client, max_queued=max_queued, stall_seconds=stall_seconds)
    pooling = room_module("pooling", "async_pooling", "the model")
    return pooling.AsyncPoolingEngine(client, max_queued=max_queued, stall_seconds=stall_seconds)


def model_context(
    parts: ServerParts, engine: AsyncEngine, config: ServerConfig, metrics: ModelMetrics | None = None
) -> ServerContext:
    """Returns the context of a loaded model.

    Args:
      parts: Parts that the server's models share.
      engine: Engine of the model.
      config: Settings of the model's serving.
      metrics: Metrics of the same model from an earlier load; None makes new ones.

    Raises:
      ConfigError: A parser does not exist.
    """
    parsers = ModelParsers.select(
        engine.tokenizer, engine.info.model_type, tool=config.tool_call_parser, reasoning=config.reasoning_parser
    )
    images, inputs = NoImages(engine.info.left_out), InputInfo.of(engine.info.features)
    if most := inputs.max_inputs:
        images = PromptImages.of_model(Path(inputs.files), engine.tokenizer, most, engine.info.max_model_len)
        DECODERS.start()
    model = ServedModel(
        names=config.served_model_names,
        tokenizer=engine.tokenizer
        and engine.tokenizer.limited_to(engine.info.max_model_len, may_grow=engine.info.may_grow),
        default_sampling_params=engine.info.default_sampling_params,
        grammar_compiler=engine.grammar_compiler,
        parsers=parsers,
        aliases=config.model_aliases,
        always_strict=config.tool_strictness == "always",
        reasoning_budget=config.reasoning_budget,
        effort_budgets=config.effort_budgets,
        fingerprint=engine.info.fingerprint or None,
        adapters=ServedAdapters.of(engine, config),
        images=images,
        image_access=config.image_access,
    )
    info = ServedModelInfo.of(engine.info, engine.tokenizer, parsers)
    if metrics is None:
        metrics = ModelMetrics(model.name, engine.info, engine.stats, prefix=config.metrics_prefix)
        parts.server_metrics.add(metrics)
        if (of_adapters := model.adapters.collector(model.name, config.metrics_prefix)) is not None:
            metrics.registry.register(of_adapters)
    else:
        metrics.watch(engine.info, engine.stats)
    shared = vars(parts) | {"config": config, "tracer": parts.tracer and parts.tracer.of_model(model.name)}
    return ServerContext(**shared, engine=engine, model=model, model_info=info, metrics=metrics)


class OneModel(ServedModels):
    """Serves one engine, whatever model a request asks for, since the routes check its name."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self._config = config

    @property
    def failure(self) -> EngineError | None:
        return self.engine.failure

    @property
    def request_bytes(self) -> int:
        return InputInfo.of(self.engine.info.features).request_bytes

    def join(self, parts: ServerParts) -> None:
        self._context = model_context(parts, self.engine, self._config)
        self._entry = ModelEntry(
            names=ModelNames(self._config.served_model_names, self._config.model_aliases, self._context.model.adapters),
            state="loaded",
            info=self._context.model_info,
            facts=KnownModel.of(self._context),
            context=self._context,
        )

    @property
    def only_context(self) -> ServerContext | None:
        return self._context

    def renew_fingerprint(self) -> None:
        model = dataclasses.replace(self._context.model, fingerprint=self.engine.info.fingerprint or None)
        self._context = dataclasses.replace(self._context, model=model)
        self._entry = dataclasses.replace(self._entry, context=self._context)

    async def start(self) -> None:
        self.engine.start()

    async def drain(self, deadline_seconds: float) -> None:
        await self.engine.drain(deadline_seconds)

    async def shutdown(self) -> None:
        await self.engine.shutdown()

    async def context_of(self, request: Request) -> ServerContext:  # noqa: ARG002 (there is one model)
        return self._context

    async def answer(self, request: Request, handler: Handler) -> Response:
        return await handler(request)

    def entries(self) -> Sequence[ModelEntry]:
        return [self._entry]

    def entry(self, name: str | None) -> ModelEntry:
        self._entry.names.check(name)
        return self._entry

    def keep(self, name: str, keep_alive: str | float | None) -> None:
        """Does nothing, since the model stays loaded."""

    async def load(self, name: str | None) -> None:
        """Checks the name; the model is loaded."""
        self._entry.names.check(name)

    async def unload(self, name: str | None) -> bool:
        """Checks the name, and returns False: the model stays loaded."""
        self._entry.names.check(name)
        return False

    @property
    def is_making_progress(self) -> bool:
        return self.engine.is_making_progress

    @property
    def is_accepting(self) -> bool:
        return self.engine.is_accepting
