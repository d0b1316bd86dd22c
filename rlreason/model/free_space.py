"""How much is left in each of many bins, and which is the first with enough, without a look at every bin."""

FULL = -(1 << 62)  # left in a bin that takes nothing more


class FreeSpace:
    """Tokens and rows left in bins 0, 1, ..., `most` of them at the most; a bin takes nothing until it is put down.

    A binary tree over the bins: each node holds the most tokens, and the most rows, left in one of the bins below it.
    """

    def __init__(self, most: int) -> None:
        self._leaves = 1 << max(0, most - 1).bit_length()
        self._tokens, self._rows = ([FULL] * (2 * self._leaves) for _ in range(2))

    def of(self, place: int) -> tuple[int, int]:
        """(tokens, rows) that are left in a bin."""
        return self._tokens[self._leaves + place], self._rows[self._leaves + place]

    def put(self, place: int, tokens: int, rows: int) -> None:
        """Note what is left in a bin now."""
        for tree, left in ((self._tokens, tokens), (self._rows, rows)):
            node = self._leaves + place
            tree[node] = left
            while node > 1:
                node //= 2
                most = max(tree[2 * node], tree[2 * node + 1])
                if tree[node] == most:
                    break
                tree[node] = most

    def close(self, place: int) -> None:
        """A bin takes nothing more."""
        self.put(place, FULL, FULL)

    def first(self, tokens: int, rows: int) -> int | None:
        """The first bin with at least so much left of both; None where there is none.

        >>> bins = FreeSpace(3)
        >>> bins.put(0, 2, 9), bins.put(1, 5, 1), bins.put(2, 9, 2)
        (None, None, None)
        >>> bins.first(1, 1), bins.first(3, 1), bins.first(3, 2), bins.first(10, 1)
        (0, 1, 2, None)
        """
        waiting = [1]
        while waiting:
            node = waiting.pop()
            if self._tokens[node] >= tokens and self._rows[node] >= rows:
                if node >= self._leaves:
                    return node - self._leaves
                waiting += (2 * node + 1, 2 * node)
        return None
