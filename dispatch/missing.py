"""Weights of a token when some of its choices are left out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


def without_missing(weights: Weights, masked: Flags, missing: Flags) -> Weights:
    """Return the weights with 0 for left-out choices, the rest scaled up for missing experts.

    The scale keeps a token's sum of weights. A token without missing experts keeps its weights'
    bits; one whose experts are all missing gets zeros.

        weights 0.5 0.3 0.2, the first expert missing  ->  0 0.6 0.4

    Args:
        weights: [T, K].
        masked: [T, K] choices that are -1: they never counted.
        missing: [T, K] choices whose expert nobody holds.

    Returns:
        [T, K], fresh.
    """
    counted = np.where(masked, np.float32(0), weights)
    if not missing.any():
        return counted
    rest = np.where(missing, np.float32(0), counted)
    # Summed column by column: the order of a library sum may depend on the shape.
    before, after = np.zeros((2, len(weights), 1), np.float32)
    for k in range(weights.shape[1]):
        before += counted[:, k : k + 1]
        after += rest[:, k : k + 1]
    usable = missing.any(1, keepdims=True) & (after != 0)
    scale = np.divide(before, after, out=np.ones_like(before), where=usable)
    return rest * scale
