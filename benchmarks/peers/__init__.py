"""The engines that are compared: each loads the same weights and runs the same loads.

A module has one class with this face:

    Peer(model, arguments, loads)    loads the weights, to run loads no larger than `loads`
    .run(load, rng) -> BatchRun      runs random prompts side by side, greedily
    .warm_up(load, rng)              does once whatever a first run would do beside running
    .decode_cost -> DecodeCost       what a decode step of this engine reads

Nothing here may import JAX, torch or llama.cpp but the module that needs it: one process runs one engine. And
`decode_cost`, which imports JAX through `jaxis.bench.cost`, imports it when it is called: after an engine's start.
"""
