"""The queue: jobs that are put by a transaction and captured by workers."""
