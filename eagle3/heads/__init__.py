"""Draft heads, one file per family; `protocol.py` is what the runtime and the trainer rely on."""
