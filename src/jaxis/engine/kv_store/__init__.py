"""Storage of KV cache blocks beyond the devices: in host memory, on disk, and exchanged with other engines."""
