"""Engine client for embedding models and classifiers, which run in a process of their own."""
