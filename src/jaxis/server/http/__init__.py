"""The HTTP application: limits, keys, errors, streams."""
