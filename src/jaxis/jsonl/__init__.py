"""JSONL files: rows one at a time, and the conversations in them."""
