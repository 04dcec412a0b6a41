"""Events, renewal, re-entry, and queues of the process: what the facade is made of, and no SQL pattern."""
