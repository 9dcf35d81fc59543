"""A store's results as a static site and as one JSON file."""
