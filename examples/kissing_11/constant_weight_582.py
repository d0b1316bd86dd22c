"""582 vectors: two times the unit vectors, and all signed words of a constant weight code.

A code here is a family of 4-subsets of the 11 coordinates of which any two share at most 2. Each subset gives the 16
vectors with entries 1 or -1 in its four places, of squared norm 4 like the 22 vectors with one entry of 2 or -2.
- Same subset: the two differ in at least one sign, so <x, y> <= 3 - 1 = 2.
- Different subsets: they share at most 2 places, so <x, y> <= 2.
- One entry of 2 and one subset: <x, y> <= 2.
So all squared distances are at least 4 + 4 - 2 * 2 = 4. The largest code, A(11, 4, 4), has 35 subsets:
22 + 35 * 16 = 582.

`largest_code` finds one of 35 by a search with swaps: add a subset that clashes with none or with just one of the
family; in the second case that one leaves, and is tabu for a few steps so that the two do not change places for ever.
Some searches are caught among smaller families: after 1,000 steps a new one begins.

Source: Conway and Sloane, Sphere Packings, Lattices and Groups, chapter 5 (constructions from binary codes); A(11,4,4)
= 35: Brouwer, Shearer, Sloane and Smith, A new table of constant weight codes, IEEE Transactions on Information Theory
36 (1990).
"""

import random
from itertools import combinations, product

DIMENSION = 11
TABU = 7  # steps before a subset that had to leave may come back
STEPS = 1_000  # of one search


def largest_code(size: int = 35, seed: int = 0) -> list[set[int]]:
    """A family of `size` 4-subsets of which any two share at most 2 elements; searches until it has one."""
    rng = random.Random(seed)
    subsets = [set(subset) for subset in combinations(range(DIMENSION), 4)]
    number = range(len(subsets))
    clashing = [{j for j in number if j != i and len(subsets[i] & subsets[j]) > 2} for i in number]
    family: set[int] = set()
    while len(family) < size:
        family = searched(clashing, size, rng)
    return [subsets[i] for i in sorted(family)]


def searched(clashing: list[set[int]], size: int, rng: random.Random) -> set[int]:
    """One search: numbers of subsets that do not clash, `size` of them or what was left after the last step."""
    family: set[int] = set()
    free_from = [0] * len(clashing)  # the step from which a subset is not tabu any more
    for step in range(STEPS):
        free = [i for i, first in enumerate(free_from) if first <= step and i not in family]
        fits = [i for i in free if not clashing[i] & family]
        candidates = fits or [i for i in free if len(clashing[i] & family) == 1]
        if not candidates:
            continue  # all are tabu: wait
        new = rng.choice(candidates)
        for old in clashing[new] & family:
            family.remove(old)
            free_from[old] = step + TABU
        family.add(new)
        if len(family) == size:
            break
    return family


def run_code() -> list[list[int]]:
    """582 vectors in dimension 11."""
    points = []
    for i in range(DIMENSION):
        for sign in (2, -2):
            points.append([sign if k == i else 0 for k in range(DIMENSION)])
    for subset in largest_code():
        for signs in product((1, -1), repeat=4):
            entry = dict(zip(sorted(subset), signs, strict=True))
            points.append([entry.get(k, 0) for k in range(DIMENSION)])
    return points
