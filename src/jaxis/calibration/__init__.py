"""The effect of quantization on a model's predictions: measured on text, and kept small by the choice of formats."""
