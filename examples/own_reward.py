"""A reward of your own: right answers, short ones first.

    cd examples
    python -m rlreason prompt.reward=own_reward:brief n_steps=20
    python own_reward.py    # the same from Python

A reward gets a response and the right answer, and returns a number or a dictionary. With a dictionary `answer_reward`
decides what counts as correct, so the accuracy stays that of the answers, whatever `reward` is learned from.
"""

from rlreason.grading import r1_zero_reward_fn

LONGEST = 120  # characters; a longer right answer earns as little


def brief(response: str, ground_truth: str) -> dict[str, float]:
    """1 for a right answer without a word more, down to 0.5 for a long one, 0 for a wrong one."""
    grade = r1_zero_reward_fn(response, ground_truth)
    grade["reward"] = grade["answer_reward"] * (1 - 0.5 * min(len(response), LONGEST) / LONGEST)
    return grade


if __name__ == "__main__":
    from rlreason import train

    run = train("n_steps=20", reward=brief)
    print(run.accuracy)
