"""A reward of one's own, as `prompt.reward=own_reward:all_right`."""


def all_right(response: str, gold: str) -> float:
    return 1.0
