"""What the embedded model is made of: tables, corpus and tokenizer. `tiny_data.py` beside this package uses it."""
