"""Products of rows with the weight of each row's group, which the experts of a mixture are made of.

`reference.py` is the definition, `loop.py` the same on CPU; `kernels.weights.grouped` has the product over any weight.
`packed.py` is the native kernel of a whole layer of experts.
"""
