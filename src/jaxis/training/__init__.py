"""Training of models: fine-tuning of all weights or of adapters, on conversations, texts, preferences and rewards.

A data row goes through `rows`, which reads it from a file, `examples`, which turns it into token ids with marks on
learned tokens, and `batches`. `trainer` puts together the parts of a run, `loop` has its loop. `objectives` and
`divergence` compute losses, `step` and `optimizer` update the trained weights of a `trainable`, which also writes the
finished model; `checkpoint` saves the state of a run.
"""
