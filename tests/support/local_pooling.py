"""A model that makes vectors, in a thread of this process."""

from __future__ import annotations

from jaxis.pooling.client.pooling_process import PoolingClient
from jaxis.pooling.client.pooling_thread import PoolingThread


class LocalPooling(PoolingClient):
    """A `PoolingClient` of an `Embedder` in this process, which no other thread may use from `connect` to `stop`."""

    def __init__(self, embedder):
        self.info, self.tokenizer, self._model = embedder.info, embedder.reader.tokenizer, embedder.model

    @property
    def pooling_info(self):
        return self.info

    def connect(self, loop, callbacks):
        def in_loop(function):
            return lambda argument: loop.call_soon_threadsafe(function, argument)

        self._thread = PoolingThread(self._model, in_loop(callbacks.deliver), in_loop(callbacks.fail))
        self._thread.start()

    @property
    def stats(self):
        return self._thread.stats

    def add(self, request):
        self._thread.add(request)

    def abort(self, request_id):
        self._thread.abort(request_id)

    def stop(self, timeout_seconds):
        return self._thread.stop(timeout_seconds)

    def is_making_progress(self, stall_seconds):
        return self._thread.is_making_progress(stall_seconds)
