"""Answers by themselves: how often an expression is visited, and what the grader's face says of one answer."""

from fractions import Fraction

import pytest

from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
from rlreason.grading.answers.evaluate import Calculator
from rlreason.grading.answers.lexer import tokens
from rlreason.grading.answers.parser import Node, parse


class Counting(Calculator):
    """Counts the nodes that it is asked for."""

    visits = 0

    def value(self, node: Node):
        self.visits += 1
        return super().value(node)


def nodes(node: Node) -> int:
    return 1 + sum(map(nodes, node.args))


@pytest.mark.parametrize(("terms", "before"), [(20, 419), (80, 6_479)])
def test_each_node_is_evaluated_once(terms, before):
    """`before`: how often the exact evaluator was asked while it was asked again at every node of the other one."""
    for text in (r"\pi", "1/2", r"x^2"):
        node = parse(tokens("+".join([text] * terms)))
        for bits in (None, 512):
            evaluator = Counting({"x": Fraction(7, 3)}, bits)
            evaluator.value(node)
            assert evaluator.visits == nodes(node)
    assert nodes(parse(tokens("+".join([r"\pi"] * terms)))) == 2 * terms - 1 < before


def test_what_was_read_says_why_there_is_no_answer():
    def said(response: str, reward: str = "r1_zero") -> tuple[bool, str, str]:
        read = Grader(reward=reward).read(response)
        assert read.answer is None
        return read.formatted, read.reason, read.detail

    assert said("</think> <answer>1</answer> so") == (True, "no answer can be read", "text behind </answer>")
    assert said(r"</think> <answer>\boxed{1</answer>") == (True, "no answer can be read", r"\boxed is never closed")
    assert said("</think>\n <answer>1</answer>")[2] == r"'\n '"
    assert said(r"\boxed{1", "question_only") == (False, r"\boxed is never closed", "")
    with pytest.raises(ValueError, match="mine:reward"):
        Grader(reward="mine:reward").read("1")


def test_the_face_follows_the_settings_and_starts_no_worker():
    sentences = Grader(GradingConfig(extract="last_number", percent=False))
    assert sentences.read("</think> <answer>She sold 38 clips</answer>").candidates == ("She sold 38 clips", "38")
    assert sentences.same("She sold 38 clips today", "38")
    assert not sentences.same("38%", "38")
    assert Grader().same("38%", "38")
    assert not Grader().same(r"\int_0^1 x\,dx", "0.5")  # only the symbolic library could tell
    assert sentences._pool._server is None
