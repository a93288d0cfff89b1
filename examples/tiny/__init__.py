"""What the embedded model is made of: tables, corpus and tokenizer. `train_tiny.py` beside this package trains it."""
