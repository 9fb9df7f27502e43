"""Head checkpoints: `reference.py` is our own and the reference naming; one further file per foreign format."""
