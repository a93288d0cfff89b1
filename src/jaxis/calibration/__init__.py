"""What quantization does to a model's predictions: measuring it on text, and choosing for the least of it."""
