"""The 22 vectors 2 e_i and -2 e_i: all squared norms are 4, all squared distances at least 8."""


def run_code() -> list[list[int]]:
    """22 vectors in dimension 11, each a list of integers."""
    points = []
    for i in range(11):
        for sign in (2, -2):
            vector = [0] * 11
            vector[i] = sign
            points.append(vector)
    return points
