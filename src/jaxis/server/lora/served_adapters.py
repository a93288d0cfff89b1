"""Adapters of a served model, by the names under which requests ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.errors import CheckpointError, ConfigError, RequestError
from jaxis.server.config import ServerConfig
from jaxis.server.generation.served_model import ModelNames, untagged
from jaxis.server.http.errors import ModelNotFoundError
from jaxis.server.lora.metrics import AdapterMetrics
from jaxis.server.lora.named_adapter import NamedAdapter, NamedAdapters

FEATURE = "adapter"
"""Name of the engine's feature, which is the request's argument that it reads."""
MAX_NAME_CHARACTERS = 256


class ServedAdapters(NamedAdapters):
    """Adapters by name, as requests see them. Only the event loop changes them.

    Args:
      engine: The engine, with the adapters that it was started with.
      names: Names of the model itself, which no adapter may have.
    """

    def __init__(self, engine: AsyncEngine, names: ModelNames) -> None:
        self._engine, self._names = engine, names
        named = msgspec.convert(engine.info.features[FEATURE], list[NamedAdapter])
        self._found = {each.name: each for each in named}
        self._changes = asyncio.Lock()

    @classmethod
    def of(cls, engine: AsyncEngine, config: ServerConfig) -> NamedAdapters:
        """Returns the adapters of an engine.

        Raises:
          ConfigError: An adapter has the model's name.
        """
        if FEATURE not in engine.info.features:
            return NamedAdapters()
        names = ModelNames(config.served_model_names)
        served = cls(engine, names)
        for each in served.values():
            if names.is_named(each.name):
                raise ConfigError(f"--lora-modules {each.name}={each.source}: the model has this name: choose another")
        return served

    def __getitem__(self, name: str) -> NamedAdapter:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def collector(self, model_name: str, prefix: str) -> AdapterMetrics:
        return AdapterMetrics(lambda: self._engine.stats().places, self.names_of, model_name, prefix)

    def names_of(self, digest: bytes) -> list[str]:
        """Returns the names of an adapter; none for an adapter that was unloaded while requests use it."""
        return [each.name for each in self._found.values() if each.digest == digest]

    async def load(self, name: str, source: str, *, replace: bool) -> None:
        """Loads an adapter under a name. Running requests keep the adapter that the name meant before."""
        # Runs to its end even if the client leaves, since it must be known what the engine has loaded.
        await asyncio.shield(asyncio.ensure_future(self._load(name, source, replace)))

    async def unload(self, name: str) -> None:
        async with self._changes:
            if name not in self._found:
                raise ModelNotFoundError(f"there is no adapter called {name[:MAX_NAME_CHARACTERS]!r}")
            self._release(self._found.pop(name))

    async def _load(self, name: str, source: str, replace: bool) -> None:
        async with self._changes:
            _check_name(name)
            if self._names.is_named(name):
                raise RequestError("is the model's own: choose another", param="lora_name")
            before = self._found.get(name)
            if before is not None and not replace:
                raise RequestError(
                    "is loaded already: unload it, or send load_inplace to replace it", param="lora_name"
                )
            if before is None and self._has_tagged(name):
                raise RequestError("differs from another adapter's only in the tag :latest", param="lora_name")
            try:
                digest, chat_template = await load_adapter(self._engine, source)
            except (CheckpointError, ConfigError) as error:
                raise RequestError(f": {error}", param="lora_path") from None
            self._found[name] = NamedAdapter(name, source, digest, chat_template)
            if before is not None:
                self._release(before)

    def _has_tagged(self, name: str) -> bool:
        return untagged(name) in map(untagged, self._found)

    def _release(self, adapter: NamedAdapter) -> None:
        """Makes the engine unload an adapter, unless it has another name."""
        if all(each.digest != adapter.digest for each in self._found.values()):
            unload_adapter(self._engine, adapter.digest)


async def load_adapter(engine: AsyncEngine, source: str) -> tuple[bytes, str | None]:
    """Makes an engine load an adapter; returns its digest, which prompts name it by, and its chat template.

    Raises:
      JaxisError: The adapter cannot be loaded.
      UnavailableError: The engine takes no more requests, or was shut down meanwhile.
    """
    digest, chat_template = await engine.call("load_adapter", source, returns=tuple[bytes, str | None])
    engine.repeat(digest, "load_adapter", source)
    return digest, chat_template


def unload_adapter(engine: AsyncEngine, adapter: bytes) -> None:
    """Makes an engine forget an adapter once no request uses it; requests that use it go on."""
    engine.do_not_repeat(adapter)
    engine.start_call("unload_adapter", adapter)


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise RequestError(f"must be 1 to {MAX_NAME_CHARACTERS} printable characters", param="lora_name")
