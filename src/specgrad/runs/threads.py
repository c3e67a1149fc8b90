"""How many threads a run may use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def thread_limit(threads: int | None) -> Iterator[None]:
    """Context in which PyTorch, the BLAS of NumPy and SciPy, and child processes use at most ``threads`` threads.

    The number of threads can change the last bits of a result, so a sweep gives every run the same number, however many
    workers there are. None changes nothing.

    Raises:
        ValueError: if ``threads`` is below 1.
    """
    if threads is None:
        yield
        return
    if threads < 1:
        raise ValueError(f"`threads` must be >= 1; got {threads}.")
    from threadpoolctl import threadpool_limits

    before, environment = torch.get_num_threads(), {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, str(threads)))
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
        for name, value in environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
