"""Which tokens of which sequences run in a step, and which blocks they hold: plain Python over integers."""
