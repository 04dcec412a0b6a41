"""Workers: threads or tasks that capture jobs from a queue and run a handler on each."""
