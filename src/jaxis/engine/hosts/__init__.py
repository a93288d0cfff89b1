"""Several hosts that run one model: the leader decides, and its followers make the same program calls."""
