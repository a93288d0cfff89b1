"""Adapters under the names by which requests ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from jaxis.errors import RequestError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


class NamedAdapter(NamedTuple):
    """An adapter that requests ask for by name.

    Attributes:
      name: Name that requests use.
      source: Folder of the adapter.
      digest: Digest by which the engine knows it.
      chat_template: Jinja source of the adapter's own chat template; None: it has the model's.
    """

    name: str
    source: str
    digest: bytes
    chat_template: str | None = None


class NamedAdapters(Mapping[str, NamedAdapter]):
    """Adapters of a model by name. This base class has none, and loads none."""

    def __getitem__(self, name: str) -> NamedAdapter:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def collector(self, model_name: str, prefix: str) -> Collector | None:
        """Returns their metrics, under a model's name and a prefix; None for none."""
        del model_name, prefix
        return None

    async def load(self, name: str, source: str, *, replace: bool) -> None:
        """Loads an adapter from a folder under a name, which may `replace` another adapter's.

        Raises:
          RequestError: The name is taken or invalid, or the adapter cannot be loaded.
        """
        del name, source, replace
        _none()

    async def unload(self, name: str) -> None:
        """Removes an adapter's name, and the adapter once no request uses it.

        Raises:
          ModelNotFoundError: No adapter has this name.
        """
        del name
        _none()


def _none() -> NoReturn:
    """Raises the RequestError of servers that load no adapters."""
    raise RequestError("this server has no adapters by request: start it with one model and --enable-lora")
