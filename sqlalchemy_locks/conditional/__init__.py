"""Conditional UPDATEs: mutexes and timeouts, one row each."""
