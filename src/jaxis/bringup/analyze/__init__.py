"""Analyses whether a checkpoint can run, and what is missing if it cannot."""
