"""The operation as a value, and the code that executes it."""
