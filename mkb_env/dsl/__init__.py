"""The two kernel DSLs, one module each; importing this package loads neither."""
