"""Run an EAGLE-3 head: the engine, its command line and its report. Knows nothing of training."""
