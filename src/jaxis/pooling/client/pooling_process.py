"""Runs a model that makes vectors in a separate process. Imports no JAX."""

from __future__ import annotations

from typing import Protocol, cast

from jaxis.engine.client.engine_client import WorkerClient
from jaxis.engine.client.engine_process import WorkerProcess
from jaxis.pooling.client.wire import REPORTS, PoolingInfo, PoolingOutputs, PoolTexts


class PoolingClient(WorkerClient, Protocol):
    """A model that makes vectors, as seen from an event loop."""

    @property
    def pooling_info(self) -> PoolingInfo:
        """Facts about it."""
        ...

    def add(self, request: PoolTexts) -> None:
        """Queues a request."""
        ...


class PoolingProcess(WorkerProcess, PoolingClient):
    """A process that makes vectors; see `WorkerProcess`."""

    module = "jaxis.pooling.client.pooling_worker"
    reports = REPORTS

    @property
    def pooling_info(self) -> PoolingInfo:
        """See `PoolingClient`."""
        return cast(PoolingInfo, self.info)

    def delivery_of(self, report: PoolingOutputs) -> PoolingOutputs:
        """See `WorkerProcess.delivery_of`."""
        return report

    def add(self, request: PoolTexts) -> None:
        """See `PoolingClient.add`."""
        self.send(request)
