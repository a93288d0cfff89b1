"""Products of rows with the weight of each row's group: the building block of mixture-of-experts layers.

`reference.py` is the definition, `loop.py` the same on CPU; `kernels.weights.grouped` has the product over any weight.
`packed.py` is the native kernel of a whole layer of experts.
"""
