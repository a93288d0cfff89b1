"""Choice of each step's tokens, and account of the blocks that sequences hold: plain Python over integers."""
