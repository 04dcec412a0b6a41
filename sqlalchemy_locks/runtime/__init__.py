"""The parts of the facade that contain no SQL pattern: events, renewal, re-entry, and queues in the process."""
