"""Engine client of an embedding model in a separate process. Imports no JAX."""

from __future__ import annotations

from typing import Protocol, cast

from jaxis.engine.client.engine_client import WorkerClient
from jaxis.engine.client.engine_process import WorkerProcess
from jaxis.pooling.client.wire import REPORTS, PoolingInfo, PoolingOutputs, PoolTexts


class PoolingClient(WorkerClient, Protocol):
    """Client of an embedding model, for an event loop."""

    @property
    def pooling_info(self) -> PoolingInfo:
        """Facts about the model."""
        ...

    def add(self, request: PoolTexts) -> None:
        """Queues a request."""
        ...


class PoolingProcess(WorkerProcess, PoolingClient):
    """Process of an embedding model; see `WorkerProcess`."""

    module = "jaxis.pooling.client.pooling_worker"
    reports = REPORTS

    @property
    def pooling_info(self) -> PoolingInfo:
        return cast(PoolingInfo, self.info)

    def delivery_of(self, report: PoolingOutputs) -> PoolingOutputs:
        return report

    def add(self, request: PoolTexts) -> None:
        self.send(request)
