"""jaxis inside other systems. No other code imports these modules, and each imports its system on import."""
