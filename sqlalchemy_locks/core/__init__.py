"""The operation as a value, and what executes it."""
