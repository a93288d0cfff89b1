"""The engines that are compared: each loads the same weights and runs the same loads.

A module has one class with this face:

    Peer(model, arguments, load)     loads the weights, to run loads no larger than `load`
    .run(load, rng) -> BatchRun      runs random prompts side by side, greedily
    .warm_up(load, rng)              does once whatever a first run would do beside running
    .decode_cost -> DecodeCost       what a decode step of this engine reads

Nothing here may import JAX, torch or llama.cpp but the module that needs it: one process runs one engine.
"""
