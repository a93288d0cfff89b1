"""Several models at one address: engines are loaded on demand, and unloaded by time, by memory or by request."""
