"""Trains models: fine-tuning of all weights or of adapters, on conversations, texts and preferences.

From data to a model: `rows` reads files, `examples` makes token ids of them and marks what is learned, `packing` and
`batches` arrange those, `objectives` computes losses, `optimizer` and `step` update what is trained, `checkpoint` keeps
it, `export` writes what other programs read. `trainer` goes through all of it.
"""
