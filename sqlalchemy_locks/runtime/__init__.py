"""Transactions, retries, queues and threads of the process: what the facade is made of, and no SQL pattern."""
