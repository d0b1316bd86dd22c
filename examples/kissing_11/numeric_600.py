"""600 vectors: a core of 496 vectors of squared norm 4, and 104 more in its hole, found as 52 and their mirror images.

1. The core. As for 582, take 4-subsets of the coordinates of which any two share at most 2, here with at most one of
   the coordinates 8, 9, 10: 30 are possible, `blocks` makes them. With all signs these are 480 vectors; the vectors
   with one entry of 2 or -2 in a coordinate below 8 make it 496. All inner products are at most 2.
2. The hole. Few vectors of the core come near the space of the last three coordinates. Further unit vectors x must
   have inner product at most 1/2 with all others and with the core at length 1. Start at random, near that space, and
   minimise the sum of max(0, <x, y> - 0.4999)^2 over all pairs. A sum near 0 is a solution with some room.
3. The mirror. From 104 random vectors about one start in 140 ends with a solution: a minute or two of search. The core
   contains all signs, so it stays the same when the last three coordinates change sign. Sets that stay the same as well
   have half the unknowns, and there are enough solutions among them: of starts with 52 vectors and their images about
   one in three succeeds.
4. Integers. Multiply the core by 100,000, so that its vectors have length 200,000; give the others length 199,998 and
   round them. Rounding moves a vector by at most sqrt(11)/2 = 1.66: no norm exceeds the core's, and inner products of
   0.49997 still leave all distances large enough. The end is a check of the integers, which alone counts.

Different processors add in different orders, so the same seed may lead to other vectors there; the search goes on until
it has found 104. That takes about 2 seconds on one core, and rarely more than 8. No start with 53 vectors and their
images, of 600, came loose.

Source: 600 is the best published number of integer vectors (Station v1.5, 2026), after 592 by Ganzhinov
(arXiv 2207.08266), 593 by AlphaEvolve (arXiv 2506.13131) and 594 (EinsteinArena, 2026). The blocks and the search are
this program's own.
"""

import os
from itertools import combinations, product

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy loads: for matrices this small, threads only cost time

import numpy as np
from scipy.optimize import minimize

Array = np.ndarray
MORE = 104  # vectors beside the core
MIRROR = np.array([1] * 8 + [-1] * 3)  # changes the sign of the last three coordinates
SCALE = 100_000
LIMIT = 0.4999  # inner products above it cost
ROOM = 0.49997  # inner products below it survive the rounding


def blocks() -> list[tuple[int, ...]]:
    """30 subsets of 4 coordinates; any two share at most 2, and at most one of the coordinates 8, 9, 10 is in each.

    The coordinates 0 to 7 are the pairs (0, 1), (2, 3), (4, 5), (6, 7). Six subsets are unions of two pairs. The other
    24 take a coordinate from 8, 9, 10 and three from different pairs. To see that these triples share at most one
    coordinate: the plane over the integers modulo 3 without its origin has eight points, the pairs being v and -v. Its
    lines that miss the origin are the eight sets of three points, from different pairs, with sum 0, and two lines share
    at most one point. These are the triples of coordinate 8. Those of 9 and of 10 are the same with the two points
    exchanged in two of the pairs; no triple comes twice.
    """
    found: list[tuple[int, ...]] = [(2 * i, 2 * i + 1, 2 * j, 2 * j + 1) for i, j in combinations(range(4), 2)]
    points = [(0, 1), (1, 0), (1, 1), (1, 2)]  # the first of each pair; the second is minus it
    for special, exchanged in ((8, ()), (9, (2, 3)), (10, (1, 3))):
        for pairs in combinations(range(4), 3):
            for signs in product((1, -1), repeat=3):
                total = [sum(s * points[p][k] for s, p in zip(signs, pairs, strict=True)) for k in (0, 1)]
                if total[0] % 3 == total[1] % 3 == 0:
                    seconds = [(s == -1) != (p in exchanged) for s, p in zip(signs, pairs, strict=True)]
                    found.append((*(2 * p + second for p, second in zip(pairs, seconds, strict=True)), special))
    return found


def core() -> Array:
    """The 496 vectors of the core, (496, 11) integers of squared norm 4."""
    vectors = []
    for i in range(8):
        for sign in (2, -2):
            vectors.append([sign if k == i else 0 for k in range(11)])
    for block in blocks():
        for signs in product((1, -1), repeat=4):
            entry = dict(zip(block, signs, strict=True))
            vectors.append([entry.get(k, 0) for k in range(11)])
    return np.array(vectors)


def starts(rng: np.random.Generator, fixed: Array, number: int) -> Array:
    """Random unit vectors in the hole, (number, 11): near the last three coordinates and not close to the core."""
    found = np.empty((0, 11))
    while len(found) < number:
        x = rng.standard_normal((4_000, 11))
        x[:, 8:] *= 2.5
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        found = np.concatenate([found, x[(x @ fixed.T).max(axis=1) < 0.55]])  # about 1 in 40
    return found[:number]


def overlap(flat: Array, fixed: Array) -> tuple[float, Array]:
    """The sum to be minimised and its gradient. `flat`: half of the vectors, of any length, one after the other."""
    y = flat.reshape(-1, 11)
    length = np.linalg.norm(y, axis=1, keepdims=True)
    x = y / length
    to_core = np.maximum(x @ fixed.T - LIMIT, 0)
    both = np.concatenate([x, x * MIRROR])
    to_others = np.maximum(x @ both.T - LIMIT, 0)
    np.fill_diagonal(to_others, 0)
    gradient = 2 * (to_core @ fixed + to_others @ both)
    gradient -= (gradient * x).sum(axis=1, keepdims=True) * x  # along the sphere: the length of y does not matter
    return (to_core**2).sum() + (to_others**2).sum() / 2, (gradient / length).ravel()


def packed(rng: np.random.Generator, fixed: Array, number: int) -> Array:
    """Unit vectors at an end of the search, (number, 11): a solution or not."""
    start = starts(rng, fixed, number // 2).ravel()
    options = {"maxiter": 1_500, "maxfun": 4_000, "ftol": 0, "gtol": 1e-9}
    end = minimize(overlap, start, args=(fixed,), jac=True, method="L-BFGS-B", options=options)
    x: Array = end.x.reshape(-1, 11)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return np.concatenate([x, x * MIRROR])


def has_room(x: Array, fixed: Array) -> bool:
    """Whether all inner products are below `ROOM`."""
    others = x @ x.T
    np.fill_diagonal(others, -1)
    return bool(max((x @ fixed.T).max(), others.max()) < ROOM)


def is_valid(points: Array) -> bool:
    """The exact check: smallest squared distance >= largest squared norm.

    Entries are at most 200,000, so squared norms and inner products are below 11 * 4e10: far within 64 bits.
    """
    inner = points @ points.T
    norms = np.diag(inner)
    distances = norms[:, None] + norms[None, :] - 2 * inner
    np.fill_diagonal(distances, norms.max())
    return bool(distances.min() >= norms.max() and norms.min() > 0)


def run_code(seed: int = 0, more: int = MORE) -> list[list[int]]:
    """600 vectors in dimension 11."""
    fixed = core()
    rng = np.random.default_rng(seed)
    while True:
        x = packed(rng, fixed / 2, more)
        if has_room(x, fixed / 2):
            rounded = np.rint((2 * SCALE - 2) * x).astype(np.int64)
            points = np.concatenate([fixed * SCALE, rounded])
            if is_valid(points):
                return [[int(entry) for entry in point] for point in points]
