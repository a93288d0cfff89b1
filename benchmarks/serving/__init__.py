"""What tests and measures a server from outside, for `load_test.py` and its tests."""
