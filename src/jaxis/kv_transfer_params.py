"""A request's parameters for another engine that computes its prompt, or decodes after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxis.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class KVTransferParams:
    """A request's `kv_transfer_params`, as far as vLLM's have a meaning here.

    Attributes:
      do_remote_decode: Keep the prompt's blocks for another engine, and return their address.
      do_remote_prefill: Fetch the prompt's blocks from another engine.
      remote_engine_id: Name of that engine, which is not used.
      remote_host, remote_port: Address of that engine.
      transfer_id: Name of a request to each of both engines, which may be sent at the same time.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    transfer_id: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVTransferParams:
        """Reads these values; others, such as vLLM's ids of blocks, are ignored. Raises RequestError for a value of a
        wrong type.
        """
        values: dict[str, Any] = {}
        kinds = {"remote_engine_id": str, "remote_host": str, "remote_port": int, "transfer_id": str}
        for name in (field.name for field in fields(cls)):
            kind = kinds.get(name, bool)
            if (value := given.get(name)) is None:
                continue
            if type(value) is not kind:
                raise RequestError(f"={value!r} must be of type {kind.__name__}", param=f"kv_transfer_params.{name}")
            values[name] = value
        params = cls(**values)
        if params.remote_port is not None and not 0 < params.remote_port < 1 << 16:
            raise RequestError(
                f"={params.remote_port} must be a port, from 1 to 65535", param="kv_transfer_params.remote_port"
            )
        return params

    @property
    def peer(self) -> tuple[str, int] | None:
        """Host and port of the engine that has the prompt's blocks; None if there is none."""
        if not self.do_remote_prefill or not self.remote_host or self.remote_port is None:
            return None
        return self.remote_host, self.remote_port
