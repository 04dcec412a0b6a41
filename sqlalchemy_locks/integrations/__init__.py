"""What connects this library with others, each loaded by whoever uses it."""
