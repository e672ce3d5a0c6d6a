"""A request's bits among others and alone."""

from __future__ import annotations

import dataclasses

import torch
from decode_reference import Problem, run

Result = tuple[torch.Tensor, torch.Tensor]


def alone(problem: Problem, request: int) -> Problem:
    """One request of several, and nothing of the others; never packed."""
    tokens = problem.query[request]
    if problem.cum_q is not None:
        tokens = problem.query[problem.cum_q[request] : problem.cum_q[request + 1]]
    return dataclasses.replace(
        problem,
        query=tokens[None],
        rows=problem.rows[request : request + 1],
        cum_q=None,
        seq_lens=problem.seq_lens[request : request + 1],
        block_tables=problem.block_tables[request : request + 1],
        max_q_len=None,
    )


def of_request(problem: Problem, result: Result, request: int) -> list[torch.Tensor]:
    if problem.cum_q is None:
        return [rows[request] for rows in result]
    return [rows[problem.cum_q[request] : problem.cum_q[request + 1]] for rows in result]


def differing(problem: Problem, together: Result, **options) -> list[int]:
    """Requests whose bits are not those that they have alone."""
    found = []
    for request, seq_len in enumerate(problem.seq_lens):
        mine = of_request(problem, together, request)
        if len(mine[0]) and seq_len:
            single = run(alone(problem, request), max_seq_len=seq_len, **options)
            if not all(torch.equal(a, b[0]) for a, b in zip(mine, single, strict=True)):
                found.append(request)
    return found
