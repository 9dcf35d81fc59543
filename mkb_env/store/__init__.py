"""The store: one SQLite file with everything that experiments did."""
