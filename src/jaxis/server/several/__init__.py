"""Several models at one address: engines that are loaded on demand, and unloaded by time, by memory or by request."""
