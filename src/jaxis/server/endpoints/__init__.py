"""The endpoints: each turns a request into a generation job, and its outputs into an answer."""
