"""What the words of a discover log mean: strategies, kinds of prompts, outcomes of calls, kinds of errors."""

STRATEGIES = {
    "simple": "every call asks the first prompt anew, with nothing before it: independent draws",
    "best_of_n": "several replies to the first prompt side by side, again and again; the verifier selects the best",
    "refine": "one conversation, in which the exact error is given back after a failure, and a larger set is asked for "
    "after a valid one",
    "hybrid": "as refine, with several replies to every prompt, of which the verifier selects the one to go on with",
}
PROMPTS = {
    "first": "the first prompt",
    "error": "the exact error given back",
    "extend": "a larger set asked for",
    "no_code": "a program asked for that was missing",
}
#: Outcomes of calls other than "ok".
CALLS = {
    "timeout": "no answer in time",
    "connection": "no connection",
    "empty": "an empty answer",
    "no_code": "a reply without a program",
    "truncated": "a reply cut at the limit of tokens",
    "broken": "an answer that is not in the protocol",
    "interrupted": "the run was stopped meanwhile",
}
#: Kinds of errors -> (whose they are, what they mean).
ERRORS = {
    "exception": ("program", "it raised an error"),
    "exit": ("program", "it ended before it gave points"),
    "timeout": ("program", "it took too long"),
    "memory": ("program", "it took too much memory"),
    "output": ("program", "it printed without end"),
    "disk": ("program", "it wrote too much"),
    "processes": ("program", "it ran too many processes"),
    "no_points": ("program", "it gave no points"),
    "type": ("program", "it gave values that are no integers"),
    "size": ("program", "it gave too many rows, digits or bytes"),
    "channel": ("program", "what it gave are no rows of integers"),
    "program": ("program", "it cannot be read, or is too large"),
    "empty": ("set", "it has no points"),
    "ragged": ("set", "its rows have different lengths"),
    "dimension": ("set", "its vectors have another dimension"),
    "zero_vector": ("set", "it holds the zero vector"),
    "too_close": ("set", "two of its points are too close, or equal"),
    "alarm": ("set", "its score is impossible: look at the verifier"),
}


def of_call(outcome: str) -> str:
    """An outcome of a call in words; "" for one that is not known.

    >>> of_call("http_429")
    'the endpoint refused it with status 429'
    """
    status = outcome.removeprefix("http_")
    if status != outcome and status.isdecimal() and len(status) == 3:
        return f"the endpoint refused it with status {status}"
    return CALLS.get(outcome, "")
