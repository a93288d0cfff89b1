"""Training of models: fine-tuning of all weights or of adapters, on conversations, texts, preferences and rewards.

`loop` has the loop of a run, and `trainer` puts together its parts. `rows` reads data rows from files, `examples` turns
them into token ids with marks on learned tokens, and `batches` arranges those in batch rows. `objectives` computes
losses, `optimizer` and `step` update the trained weights, `checkpoint` and `resume` save the state of a run, and
`export` writes the finished model.
"""
