"""Workers: threads or tasks that take jobs from a queue and run a handler on each."""
