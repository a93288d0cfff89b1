"""How checkpoints store weights: one file for each format, a WeightFormat of two functions.

`tensors` says which tensors of the file a weight [out, in] is made of, `assemble` makes it of them. The same code
serves linear layers, embeddings and each expert of a mixture. Which modules are stored so is not a format's business:
that is read from config.json by `published.py` and `compressed_tensors.py`.
"""
