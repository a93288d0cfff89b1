"""When the readers of streams run."""

import asyncio
import time

from jaxis.engine.client.output_stream import OutputStream
from jaxis.engine.client.stream_waker import StreamWaker
from jaxis.outputs import CompletionOutput, RequestOutput


def output(token_id, finished=False):
    completion = CompletionOutput(0, str(token_id), [token_id], finish_reason="stop" if finished else None)
    return RequestOutput("r", None, [1], None, [completion], finished)


def test_what_comes_between_the_first_and_the_last_output_is_read_before_the_last():
    async def scenario():
        stream, waker = OutputStream(), StreamWaker(asyncio.get_running_loop())
        for token_id in range(5):
            stream.put(output(token_id))
            waker.wake([stream])
            async with asyncio.timeout(5):
                new = await stream.get()
            assert new.outputs[0].token_ids == [token_id]

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_what_comes_while_readers_rest_is_read_together_and_a_last_output_at_once():
    async def scenario():
        stream, ending, waker = OutputStream(), OutputStream(), StreamWaker(asyncio.get_running_loop())
        got = []

        async def read():
            while True:
                got.append((await stream.get()).outputs[0].token_ids)
                time.sleep(0.2)  # what formatting and sending would take

        stream.put(output(0))
        waker.wake([stream])
        reader = asyncio.create_task(read())
        while not got:
            await asyncio.sleep(0)
        stream.put(output(1))
        waker.wake([stream])  # a round, after which readers rest for 0.6 s
        while len(got) < 2:
            await asyncio.sleep(0)
        for token_id in range(2, 6):
            stream.put(output(token_id))
            waker.wake([stream])
            await asyncio.sleep(0.01)
        ending.put(output(9, finished=True))
        waker.wake([ending])
        async with asyncio.timeout(0):
            assert (await ending.get()).finished
        while len(got) < 3:
            await asyncio.sleep(0.01)
        reader.cancel()
        assert got == [[0], [1], [2, 3, 4, 5]]

    asyncio.run(asyncio.wait_for(scenario(), 10))
