"""The engine behind an event loop: its thread or process, and the messages between them."""
