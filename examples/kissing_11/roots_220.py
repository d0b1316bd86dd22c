"""220 vectors: the roots of D11, which are all vectors with two entries of 1 or -1 and nine zeros.

Two coordinates out of 11 and two signs: 55 * 4 = 220. All squared norms are 2. Two different ones have inner product 1,
0, -1 or -2, so squared distance 2 + 2 - 2 = 2 or more.

Source: Conway and Sloane, Sphere Packings, Lattices and Groups, chapter 4 (the lattice D_n has 2n(n-1) shortest
vectors).
"""

from itertools import combinations, product


def run_code() -> list[list[int]]:
    """220 vectors in dimension 11."""
    points = []
    for i, j in combinations(range(11), 2):
        for a, b in product((1, -1), repeat=2):
            vector = [0] * 11
            vector[i], vector[j] = a, b
            points.append(vector)
    return points
