"""Train EAGLE-3 heads: chats to rows, rows to batches, batches to a loss, and the record of the run."""
