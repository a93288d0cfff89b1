"""Formats of weights in checkpoints: one file for each format, a WeightFormat of two functions.

`tensors` specifies the tensors that make up a weight [out, in], and `assemble` builds it from them. The same code
serves linear layers, embeddings and the experts of a mixture. A format does not know which modules are stored in it:
the tools' files in `quantization/checkpoints/` read that from config.json.
"""
