"""An adapter under the name by which requests ask for it."""

from __future__ import annotations

from typing import NamedTuple


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
