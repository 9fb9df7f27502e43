"""Ops of the draft tree, the paged caches and the training losses: one folder each, the reference beside the kernel.

Knows tensors, nothing of models. Letters: B slots, N tree rows (row 0 is the root), D levels, K tree top-k,
C candidates, M frontier nodes, V vocabulary, H hidden, L K/V rows of a slot, P pages, T rows of a packed forward,
R those of them that are asked for.
"""
