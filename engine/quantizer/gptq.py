"""Error feedback: choose codes and scales that keep a layer's *outputs*, not its weights.

With inputs X and second moments ``H = Xᵀ X``, the squared error of the outputs is
``Σ_rows (w - q) H (w - q)ᵀ``. GPTQ (Frantar et al. 2022) rounds one input feature after the other and spreads
the error of each over those not rounded yet, by the inverse of H. Here this is done with

- NVFP4's group scales chosen on the way, each by the loss that the feedback inside the group leaves;
- the groups of the most active inputs first (GPTQ's "act-order", by whole groups, so that scales stay
  contiguous);
- optionally for inputs that differ from those which the original layers give, so that part of the error of
  earlier layers is made good (as in GPTAQ, Li et al. 2025, and quantisation error propagation, Arai &
  Ichikawa 2025);
- passes of coordinate descent after it, over codes and scales of one group at a time, others fixed. They
  never raise the loss.
"""

from __future__ import annotations

import numpy as np

from engine.quantizer import kernels
from engine.quantizer.nvfp4 import (
    E4M3_POSITIVE,
    GROUP_SIZE,
    NVFP4Weight,
    pack,
    quantize_group,
)

__all__ = ["DAMPING", "REFINEMENTS", "damped", "output_error", "quantize_with_feedback"]

DAMPING = 0.1
"""added to the diagonal of H, relative to its mean: few calibration tokens make small eigenvalues
untrustworthy"""
PROPAGATION = 0.5
"""how much of the error of earlier layers a linear tries to make good; all of it would fit the calibration
text's noise"""
REFINEMENTS = 2
_BLOCK = 128  # features between two updates of all later ones (a matrix product each)


def quantize_with_feedback(
    weight: np.ndarray,
    moments: np.ndarray,
    global_scale: float,
    *,
    cross: np.ndarray | None = None,
    propagation: float = PROPAGATION,
    refinements: int = REFINEMENTS,
) -> NVFP4Weight:
    """Quantise float32 [N, K] for inputs with second moments `moments` [K, K] (positive semidefinite).

    Rows do not depend on each other: linears with the same input may be stacked along N.

    Parameters
    ----------
    moments
        H = X̂ᵀ X̂, X̂ being the inputs that the quantised layers before this one give.
    cross
        X̂ᵀ X, X being the inputs that the original layers give. The target is then not W but
        ``W + p · W (Xᵀ X̂ - H) (H + λI)⁻¹``, whose outputs on X̂ are closer to those of W on X. For p = 1 and
        λ = 0 it is the least-squares solution.
    propagation
        p above.
    refinements
        Passes of coordinate descent after the feedback.
    """
    energy = np.diag(moments)
    groups = np.argsort(-energy.reshape(-1, GROUP_SIZE).sum(axis=1), kind="stable")
    order = (groups[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)).ravel()
    hessian = damped(moments)
    inverse = np.linalg.inv(hessian)
    if cross is not None:
        drift = (cross - moments).astype(np.float32).T / np.float32(_scale(moments))
        weight = weight + np.float32(propagation) * (weight @ drift @ inverse.astype(np.float32))
    target = np.ascontiguousarray(weight.T[order], dtype=np.float32) / np.float32(global_scale)

    values, scales = _feedback(target, inverse[np.ix_(order, order)])
    if refinements:
        permuted = np.ascontiguousarray(hessian.astype(np.float32)[np.ix_(order, order)])
        _refine(target, permuted, values, scales, refinements)

    plain_values, plain_scales = np.empty_like(values), np.empty_like(scales)
    plain_values[order], plain_scales[groups] = values, scales
    return pack(plain_values, plain_scales, global_scale)


def damped(moments: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """`moments` float64 [K, K] in units of the mean of their diagonal, with `damping` added to it.

    Always positive definite: inputs that were never anything but zero get the damping alone.
    """
    hessian = moments.astype(np.float64) / _scale(moments)
    hessian[np.diag_indices(len(hessian))] += damping
    return hessian


def _scale(moments: np.ndarray) -> float:
    """Mean of the diagonal, or 1 where all inputs were zero."""
    return float(np.diag(moments).mean()) or 1.0


def output_error(weight: np.ndarray, quantized: np.ndarray, moments: np.ndarray) -> float:
    """``Σ_rows (w - q) H (w - q)ᵀ``: squared error of the outputs; both weights float32 [N, K]."""
    difference = weight - quantized
    return float(np.einsum("nk,nk->", difference @ moments.astype(np.float32), difference, dtype=np.float64))


def _feedback(target: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values float32 [K, N] and scale codes uint8 [K/16, N] by GPTQ with the groups in the order given."""
    columns, rows = target.shape
    # U with UᵀU = H⁻¹, upper triangular: row k says how the error of feature k spreads over the later ones.
    factor = np.ascontiguousarray(np.linalg.cholesky(inverse).T.astype(np.float32))
    work = target.copy()
    values = np.empty_like(work)
    scales = np.empty((columns // GROUP_SIZE, rows), np.uint8)
    errors = np.empty((_BLOCK, rows), np.float32)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        for start in range(begin, end, GROUP_SIZE):
            stop = start + GROUP_SIZE
            error = errors[start - begin : stop - begin]
            block = factor[start:stop, start:stop]
            quantize_group(work, start // GROUP_SIZE, block, values, scales, error, feedback=True)
            if stop < end:
                kernels.subtract_product(work[stop:end], factor[start:stop, stop:end], error)
        if end < columns:
            work[end:] -= factor[begin:end, end:].T @ errors[: end - begin]
    return values, scales


def _refine(
    target: np.ndarray,
    hessian: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray,
    passes: int,
) -> None:
    """Coordinate descent over groups, in place."""
    columns, rows = target.shape
    gradient = hessian @ (target - values)
    deltas = np.empty((_BLOCK, rows), np.float32)
    for _ in range(passes):
        for begin in range(0, columns, _BLOCK):
            end = min(begin + _BLOCK, columns)
            for start in range(begin, end, GROUP_SIZE):
                stop = start + GROUP_SIZE
                delta = deltas[start - begin : stop - begin]
                block = np.ascontiguousarray(hessian[start:stop, start:stop])
                kernels.descend_group(
                    gradient, block, start // GROUP_SIZE, E4M3_POSITIVE, values, scales, delta
                )
                kernels.subtract_product(gradient[begin:end], hessian[start:stop, begin:end], delta)
            if begin:
                gradient[:begin] -= hessian[:begin, begin:end] @ deltas[: end - begin]
            if end < columns:
                gradient[end:] -= hessian[end:, begin:end] @ deltas[: end - begin]
