"""How much is left in each of many bins, and which is the first with enough: both in logarithmic time."""

FULL = -(1 << 62)  # left in a bin that takes nothing more


class FreeSpace:
    """Bins 0, 1, ..., `most` of them at the most, all of them full until something is put down for them.

    A binary tree over the bins: each node holds the most that is left in one of the bins below it.
    """

    def __init__(self, most: int) -> None:
        self._leaves = 1 << max(0, most - 1).bit_length()
        self._tree = [FULL] * (2 * self._leaves)

    def of(self, place: int) -> int:
        """What is left in a bin."""
        return self._tree[self._leaves + place]

    def put(self, place: int, left: int) -> None:
        """Note what is left in a bin now."""
        tree, node = self._tree, self._leaves + place
        tree[node] = left
        while node > 1:
            node //= 2
            most = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == most:
                return
            tree[node] = most

    def first(self, size: int) -> int | None:
        """The first bin with at least so much left; None where there is none.

        >>> bins = FreeSpace(3)
        >>> bins.put(0, 2), bins.put(1, 5), bins.put(2, 9)
        (None, None, None)
        >>> bins.first(1), bins.first(3), bins.first(10)
        (0, 1, None)
        """
        tree, node = self._tree, 1
        if tree[node] < size:
            return None
        while node < self._leaves:
            node *= 2
            node += tree[node] < size
        return node - self._leaves
