"""A leader whose experts lie on two hosts' devices: `python -m tests.engine.hosts.expert_leader FOLDER SIZE PORT`."""

from __future__ import annotations

import json
import sys
from unittest import mock

from jaxis.layers.expert_stack import SpreadStack
from tests.engine.expert_parallel import results


def main(folder: str, size: str, port: str) -> None:
    arguments = {"nnodes": 2, "master_port": int(port), "tensor_parallel_size": int(size)}
    put = SpreadStack.put
    converted: list[int] = []

    def count(stack: SpreadStack, expert: int, *rest: object) -> None:
        converted.append(expert)
        put(stack, expert, *rest)

    with mock.patch.object(SpreadStack, "put", count):
        logits, tokens, parts = results(folder, **arguments, enable_expert_parallel=True)
    found = {"tokens": tokens, "logits": logits.tolist(), "shares": sorted(parts), "experts": sorted(set(converted))}
    print("ANSWERS", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
