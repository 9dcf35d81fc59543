"""Experiments: what they ask for, what of it is there already, and running the rest."""
