"""Between a coroutine and a step: the engine's thread and process, and what they say to each other."""
