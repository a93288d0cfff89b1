"""Training of models: fine-tuning of all weights or of adapters, on conversations, texts and preferences.

`rows` reads data files. `examples` turns data rows into token ids and marks the learned tokens. `packing` and `batches`
arrange examples into batches. `objectives` computes losses, `optimizer` and `step` update the trained weights,
`checkpoint` saves the state of a run, and `export` writes the finished model. `trainer` runs all of it.
"""
