"""EAGLE-3 heads and the targets they draft for: tensors and Hugging Face models, no loops, no trackers.

Shape letters used in every docstring:
    T rows of one packed forward      B batch (requests, slots)     S tokens of a document
    R those rows that are asked for   L K/V rows of a slot          P pages
    N tree rows (root included)       D tree depth                  K tree top-k
    H hidden width                    F feature width (captured layers x H)
    V vocabulary (Vd: draft vocab)    q / p draft / target probabilities
"""

__version__ = "0.1.0"
