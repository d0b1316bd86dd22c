"""112 points, the most that a cap in dimension 6 can have: two families with many symmetries.

Take ten of the twenty 3-subsets of the six coordinates so that each pair of coordinates is in exactly two of them. It
follows that no two of the ten are complements of each other, and that of the five through one coordinate no three lie
within four coordinates.
- 80 points: for each of the ten triples the 8 vectors with 1 or 2 in its places and 0 elsewhere.
- 32 points: the vectors of 1 and 2 with an even number of 2.

Why no three of them are on a line. In each coordinate of a line the three entries are equal or all different, so that
next to a 0 there is either 0, 0 or one 1 and one 2; entries that are not 0 are all equal. How many points are of the
second family?
- Three: they are equal in every coordinate, so they are no three points.
- Two, and one of a triple T: equal on T, opposite on the other three coordinates. Those hold three 2 in both together,
  so that the numbers of 2 in the two points differ by an odd number, and one of them is odd.
- One, and two of triples T and U: no coordinate is outside both, so T and U are complements, which do not occur.
- None: each coordinate is in none, two or all of the triples T, U, V. If two of them are the same triple, the third is
  as well, and the points are equal. If all differ, one coordinate is in all and three are in two of them: three triples
  through one coordinate within four coordinates, which do not occur.

Source: caps of this size are in Calderbank and Fishburn, Maximal three-independent subsets of {0,1,2}^n (Designs, Codes
and Cryptography 4, 1994), and in Edel, Extensions of generalized product caps (the same journal, 31, 2004); that none
is larger is proved by Potechin, Maximal caps in AG(6,3) (the same journal, 46, 2008).
"""

from itertools import product


def ten_triples() -> list[set[int]]:
    """Ten 3-subsets of the coordinates 0 to 5, each pair in two: coordinates 0 to 4 on a circle, and 5 beside it."""
    with_5 = [{5, i, (i + 1) % 5} for i in range(5)]
    others = [{i, (i + 1) % 5, (i + 3) % 5} for i in range(5)]
    return with_5 + others


def run_code() -> list[list[int]]:
    """112 vectors in dimension 6."""
    points = []
    for triple in ten_triples():
        for entries in product((1, 2), repeat=3):
            entry = dict(zip(sorted(triple), entries, strict=True))
            points.append([entry.get(i, 0) for i in range(6)])
    for entries in product((1, 2), repeat=6):
        if entries.count(2) % 2 == 0:
            points.append(list(entries))
    return points
