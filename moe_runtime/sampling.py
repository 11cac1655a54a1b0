"""The next token as a pure function of (logits, parameters, seed, position).

Legend: S rows, V vocabulary.

Problem: a request that moves to another rank, or runs in another batch, must go on with the tokens
that it would have had. Choice: no generator has a state. Each position has its own random number,
drawn by a counter-based generator (Philox4x64-10 of Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011; numpy's implementation) with the seed as key and the position as counter.

    logits --temperature--> p --top_k--> --top_p--> kept, in order of p (ties: lowest id first)
    u(seed, position) in [0, 1)
    cumulative   |---- t0 ----|-- t1 --|- t2 -|       the token whose interval [low, high)
                 0                ^ u * total         contains u * total

Everything after the logits is float64 and computed row by row, so no row knows of another. The
cost is a Python loop over the rows that sample; rows that are greedy share one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.errors import MoeRuntimeError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class SamplingParamsInvalid(MoeRuntimeError, ValueError):
    """A sampling parameter is out of its range."""

    field: str
    expected: str
    found: str

    def _message(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


class LogitsInvalid(MoeRuntimeError):
    """A row of logits has no distribution."""

    row: int
    problem: str

    def _message(self) -> str:
        return f"logits of row {self.row}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Attributes:
        temperature: >= 0 and finite; 0 is greedy.
        top_p: In (0, 1]: the fewest tokens with at least this probability are kept. 1 keeps all.
        top_k: >= 0: as many tokens are kept, before top_p. 0 keeps all.
        seed: In [0, 2**64).
        max_tokens: >= 1, generated tokens.
        min_tokens: In [0, max_tokens]: no ending token is sampled before this many tokens.
        stop_token_ids: Tokens that end the request.
        ignore_eos: `eos_token_ids` do not end the request.
        eos_token_ids: The model's own ending tokens.

    Raises:
        SamplingParamsInvalid: A value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every range."""
        _check_number("temperature", self.temperature, 0.0, math.nextafter(math.inf, 0.0))
        _check_number("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0)
        _check_integer("top_k", self.top_k, 0, None)
        _check_integer("seed", self.seed, 0, (1 << 64) - 1)
        _check_integer("max_tokens", self.max_tokens, 1, None)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for field in ("stop_token_ids", "eos_token_ids"):
            for token_id in getattr(self, field):
                _check_integer(field, token_id, 0, None)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """Tokens that end the request; may repeat."""
        return self.stop_token_ids + (() if self.ignore_eos else self.eos_token_ids)

    def finish_reason(self, token_id: int, *, num_output: int) -> Literal["stop", "length"] | None:
        """Tell whether a request ends with this token.

        Args:
            token_id: The newest token.
            num_output: Tokens generated so far, this one included.
        """
        if token_id in self.ending_ids:
            return "stop"
        return "length" if num_output >= self.max_tokens else None


def _check_number(field: str, value: float, least: float, most: float) -> None:
    right_type = isinstance(value, int | float) and not isinstance(value, bool)
    if not right_type or not least <= value <= most:
        raise SamplingParamsInvalid(
            field=field, expected=f"a number in [{least:g}, {most:g}]", found=repr(value)
        )


def _check_integer(field: str, value: int, least: int, most: int | None) -> None:
    right_type = isinstance(value, int) and not isinstance(value, bool)
    if not right_type or value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise SamplingParamsInvalid(field=field, expected=f"an integer {limits}", found=repr(value))


def uniform(seed: int, position: int) -> float:
    """Return the random number of one position: in [0, 1), a multiple of 2**-53.

    Args:
        seed: In [0, 2**64).
        position: In [0, 2**64).
    """
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    outputs: Sequence[int] | None = None,
) -> list[int]:
    """Choose one token for each row. A row's token does not depend on the other rows.

    Args:
        logits: [S, V] float32; -inf forbids a token. Not changed.
        params: Of each row's request.
        positions: Position that each row's token will take in its sequence (any one-to-one
            numbering will do, as long as it is the same wherever the request is computed).
        outputs: Tokens each request generated before this one; needed where `min_tokens` is set.

    Returns:
        S token ids. Greedy rows: the lowest id among the largest logits.

    Raises:
        LogitsInvalid: A row has a NaN or +inf, or nothing but -inf.
    """
    num_rows = logits.shape[0]
    assert logits.dtype == torch.float32
    assert num_rows == len(params) == len(positions)
    if num_rows == 0:
        return []
    logits = _forbid_endings(logits, params, outputs)
    best = logits.argmax(dim=-1, keepdim=True)
    _check(logits, best)
    tokens: list[int] = best.squeeze(1).tolist()
    for row, (parameters, position) in enumerate(zip(params, positions, strict=True)):
        if not parameters.greedy:
            values = logits[row].cpu().numpy().astype(np.float64)
            tokens[row] = _draw(values, parameters, uniform(parameters.seed, position))
    return tokens


def _forbid_endings(
    logits: torch.Tensor, params: Sequence[SamplingParams], outputs: Sequence[int] | None
) -> torch.Tensor:
    """Give ending tokens -inf in the rows that have not reached their `min_tokens`."""
    rows: list[int] = []
    ids: list[int] = []
    for row, parameters in enumerate(params):
        if parameters.min_tokens == 0:
            continue
        assert outputs is not None, "min_tokens needs the number of tokens generated so far"
        if outputs[row] < parameters.min_tokens:
            known = [token_id for token_id in parameters.ending_ids if token_id < logits.shape[1]]
            rows += [row] * len(known)
            ids += known
    if rows:
        logits = logits.clone()
        logits[rows, ids] = -math.inf
    return logits


def _check(logits: torch.Tensor, best: torch.Tensor) -> None:
    # A NaN counts as the largest value, so the largest tells of all three faults.
    largest = logits.gather(1, best).squeeze(1)
    faulty = largest.isfinite().logical_not_().nonzero().flatten().tolist()
    if faulty:
        value = float(largest[faulty[0]])
        problem = {math.inf: "+inf", -math.inf: "every token is forbidden (-inf)"}.get(value, "NaN")
        raise LogitsInvalid(row=faulty[0], problem=problem)


def _draw(logits: Floats, parameters: SamplingParams, u: float) -> int:
    """Choose by inverse CDF among the tokens that the filters keep."""
    ids: Ids | None = None
    if 0 < parameters.top_k < len(logits):
        ids = _largest(logits, parameters.top_k)
        logits = logits[ids]
    # Tiny temperatures: 0 stays 0, everything below goes to -inf, and its weight to 0.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / parameters.temperature)
    if parameters.top_p < 1.0:
        kept = _nucleus(weights, parameters.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    cumulative = np.cumsum(weights)
    choice = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # u * total can round up to total: then it is the last token that has any weight.
    choice = min(choice, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    return choice if ids is None else int(ids[choice])


def _largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, descending; of equal values the lowest ids come first."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Ids of the fewest likeliest tokens with at least `top_p` of the weight, descending."""
    needed = top_p * float(weights.sum())
    # Tokens lighter than (1 - top_p) / V of the total together weigh less than what may be left
    # out, so they need no sorting; half of it leaves room for rounding.
    negligible = 0.5 * (1.0 - top_p) * float(weights.sum()) / len(weights)
    candidates = np.flatnonzero(weights > negligible)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(weights[order]), needed, side="left"))
    return order[: reached + 1]
