"""The connection between an event loop and an engine: its thread or process, and the messages between them."""
