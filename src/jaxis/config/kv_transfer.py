"""Configuration of the transfer of blocks between engines, under vLLM's names."""

from __future__ import annotations

import ipaddress
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxis.config.argument_keys import check_keys
from jaxis.errors import ConfigError
from jaxis.host.tls import mutual_context

ROLES = ("kv_producer", "kv_consumer", "kv_both")
# vLLM's, which change no answer here, whatever their value: blocks wait in the host's memory, and any number of engines
# may take part.
_NO_EFFECT = ("kv_buffer_device", "kv_rank", "kv_parallel_size", "enable_permute_local_kv")
# vLLM's, with what they may be here, and what to do otherwise.
_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "kv_connector": (
        (None, "native"),
        "blocks go over jaxis's own protocol, between jaxis servers only; leave it out, on both sides",
    ),
    "kv_connector_module_path": ((None,), "no code is loaded; leave it out"),
    "kv_load_failure_policy": (("recompute",), "blocks that do not arrive are computed; leave it out"),
}
_TLS_KEYS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_EXTRA_KEYS = (*_TLS_KEYS, "lease_seconds")


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """The argument `kv_transfer_config`; names and defaults are those of vLLM, except for the last four.

    Attributes:
      kv_role: "kv_producer" computes prompts for other engines, "kv_consumer" decodes after prompts that others
        computed, "kv_both" does either.
      kv_ip: Address at which a producer serves blocks, and by which consumers reach it.
      kv_port: Port of that address; 0 is any free one.
      kv_buffer_size: Bytes of the host's memory for blocks in transfer, if `kv_offloading_size` gives none.
      engine_id: Name of the producer in its answers; None makes one.
      ssl_certfile, ssl_keyfile: Files with this engine's certificate and its key, PEM, from
        `kv_connector_extra_config`; None: only engines of this machine take part, without TLS.
      ssl_ca_certs: File with the CA that signed the certificates of all engines that take part, from the same object.
      lease_seconds: Time for which a producer keeps a prompt's blocks after they were last read, from the same object.
    """

    kv_role: str
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_size: float = 1e9
    engine_id: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    lease_seconds: float = 60.0

    @property
    def is_producer(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        return self.kv_role != "kv_producer"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> KVTransferConfig | None:
        """Reads the configuration, which may be None. Raises ConfigError if a name or a value is not supported."""
        if given is None:
            return None
        own = {field.name for field in fields(cls)} - set(_EXTRA_KEYS)
        check_keys("kv_transfer_config", given, (*sorted(own), "kv_connector_extra_config", *_NO_EFFECT, *_ONLY))
        for name, (accepted, instead) in _ONLY.items():
            if name in given and given[name] not in accepted:
                raise ConfigError(f"kv_transfer_config: {name}={given[name]!r} is not supported: {instead}")
        extra = given.get("kv_connector_extra_config") or {}
        check_keys("kv_connector_extra_config", extra, _EXTRA_KEYS)
        values = {name: value for name, value in given.items() if name in own}
        values = {name: value for name, value in {**values, **extra}.items() if value is not None}
        if values.get("kv_role") not in ROLES:
            raise ConfigError(
                f"kv_transfer_config: kv_role={values.get('kv_role')!r} must be one of {', '.join(ROLES)}"
            )
        config = cls(**values)
        config._check()
        return config

    def ssl_context(self, *, is_server: bool) -> ssl.SSLContext | None:
        """Returns TLS for one side of the connections; None within this machine. Raises ConfigError if a file cannot be
        used.
        """
        if self.ssl_certfile is None or self.ssl_keyfile is None or self.ssl_ca_certs is None:
            return None
        return mutual_context(
            is_server=is_server,
            certfile=Path(self.ssl_certfile),
            keyfile=Path(self.ssl_keyfile),
            ca_certs=Path(self.ssl_ca_certs),
            name="kv_transfer_config",
        )

    def _check(self) -> None:
        for name, kind in (("kv_ip", str), ("engine_id", str), *((key, str) for key in _TLS_KEYS), ("kv_port", int)):
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                raise ConfigError(f"kv_transfer_config: {name}={value!r} must be of type {kind.__name__}")
        if not 0 <= self.kv_port < 1 << 16:
            raise ConfigError(f"kv_transfer_config: kv_port={self.kv_port} must be a port, from 0 to 65535")
        for name in ("kv_buffer_size", "lease_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"kv_transfer_config: {name}={value!r} must be a number greater than 0")
        if self.kv_ip in ("", "*", "0.0.0.0", "::"):
            raise ConfigError(
                f"kv_transfer_config: kv_ip={self.kv_ip!r} is no address that others could reach: give that of this "
                "machine's private network"
            )
        missing = [key for key in _TLS_KEYS if getattr(self, key) is None]
        if 0 < len(missing) < len(_TLS_KEYS):
            raise ConfigError(f"kv_transfer_config: TLS needs {', '.join(_TLS_KEYS)}: {missing[0]} is missing")
        if self.is_producer and self.ssl_certfile is None and not is_loopback(self.kv_ip):
            raise ConfigError(
                f"kv_transfer_config: kv_ip={self.kv_ip!r} is open to other machines: give "
                '"kv_connector_extra_config": {"ssl_certfile": FILE, "ssl_keyfile": FILE, "ssl_ca_certs": FILE} '
                "on both sides, with certificates that one CA has signed"
            )


def is_loopback(host: str) -> bool:
    """Returns whether an address is this machine's own; names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
