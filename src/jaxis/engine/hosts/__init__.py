"""Several hosts that run one model: one decides, and the others make the same program calls."""
