"""Chat templates: the prompt is the tokenizer's own, to the token, and what a template cannot do is one line."""

import copy
import re
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from rlreason.config.leaves import prompt_renderer
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import protocol_of
from rlreason.evaluation.protocol import differences
from rlreason.model.chat import Chat, PromptEncoder, check_prompts, end_of_turn, remarks
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.training.build import make_sampling, make_traces
from rlreason.training.warm_start import shipped
from rlreason.types import Problem
from tests.run_settings import settings
from tests.starts import ROOT

TEMPLATES = ROOT / "tests/chat_templates"
CHATML = (TEMPLATES / "smollm2.jinja").read_text("utf-8")
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text("utf-8")  # its parts that a single turn meets
ONE = Problem("one", "What is 1 + 1?", "2", solution="1+1=2")


def with_template(tokenizer, template, bos=False):
    """A copy of the tokenizer with a chat template and its special tokens; `bos`: it puts one before every text."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<bos>"]})
    own.chat_template = template
    if bos:
        own.bos_token = "<bos>"
        own.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", own.bos_token_id)]
        )
    return own


@pytest.fixture
def asking(tokenizer):
    """A policy whose tokenizer has this chat template."""

    def make(template, bos=False) -> Policy:
        own = with_template(tokenizer, template, bos)
        return Policy(build_model(len(own), width=16, layers=1, init_scale=0.3, seed=1), own)

    return make


def prompt(**chosen):
    return replace(shipped("chat"), **chosen)


USER = "What is 1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(("template", "system"), [(CHATML, None), (QWEN3, "Be brief.")])
def test_a_prompt_is_what_the_tokenizer_makes_of_the_conversation(asking, template, system):
    policy = asking(template)
    conversation = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": USER}]
    expected = policy.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    encode = PromptEncoder(policy, prompt(system=system))
    assert encode(ONE) == expected
    encode.check([ONE, replace(ONE, question="What does <s> mean?")])
    with pytest.raises(ConfigError, match=re.escape("<|im_end|>")):  # it would end its own turn
        encode.check([ONE, replace(ONE, question="What does <|im_end|> mean?")])


def test_a_prompt_is_the_same_on_every_day_with_one_token_at_its_begin(asking):
    dated = CHATML + """{{ 'Today Date: ' + strftime_now("%d %b %Y") }}"""  # as Llama 3's says it
    policy = asking("{{ bos_token }}" + dated, bos=True)
    ids = PromptEncoder(policy, prompt())(ONE)
    assert policy.tokenizer.decode(ids).endswith("Today Date: 26 Jul 2024")
    assert ids.count(policy.tokenizer.bos_token_id) == 1


def test_thinking_is_switched_where_the_template_has_the_switch(asking):
    policy = asking(QWEN3)
    ids = [PromptEncoder(policy, prompt(enable_thinking=choice))(ONE) for choice in (None, True, False)]
    alone, on, off = map(policy.tokenizer.decode, ids)
    assert alone == on
    assert off == on + "<think>\n\n</think>\n\n"
    with pytest.raises(ConfigError, match=r"^prompt\.enable_thinking=false: "):
        Chat(asking(CHATML).tokenizer, enable_thinking=False).check()


@pytest.mark.parametrize(
    ("template", "system"),
    [
        (None, None),
        ("{{ raise_exception('System role not supported') }}", "Be brief."),  # as Gemma's
        ("{{ messages[-1]['content'] }}", "Be brief."),  # leaves it out
        (CHATML.replace("['content']", "['content'][:4000]"), None),
    ],
)
def test_what_a_template_cannot_do_is_refused_before_the_weights_are_loaded(asking, template, system, tmp_path):
    asking(template).tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # and no weights at all
    run = settings("model=local", f"model.path={tmp_path}", "data=stories", "prompt=chat")
    run.prompt.system = system
    with pytest.raises(ConfigError, match=r"^prompt\.chat=true"):
        check_prompts(run)
    with pytest.raises(ConfigError, match=r"^eval\.prompt\."):
        check_prompts(replace(run, eval=replace(run.eval, prompt=replace(run.prompt)), prompt=settings().prompt))


def test_a_trace_follows_the_generation_prompt_and_ends_the_turn(asking):
    """ChatML's end of turn is not this tokenizer's end of text, as with a base model that has a chat template."""
    policy = asking(CHATML)
    end = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != policy.tokenizer.eos_token_id
    run = settings("algorithm=sft", "model=smollm2_135m", "prompt=chat")
    ids = PromptEncoder(policy, run.prompt)
    two = Problem("two", "2+2?", "4", response="It is 4.<|im_end|>")
    trace, given = make_traces(run, policy, [ONE, two], ids, Console())
    assert trace.response.prompt_ids == ids(ONE)
    *body, last = trace.response.token_ids
    assert (policy.tokenizer.decode(body), last) == ("1+1=2\n\\boxed{2}", end)
    assert given.response.token_ids[-1] == end
    assert given.response.token_ids.count(end) == 1
    assert make_sampling(run, policy).end_ids == {end}  # and a sampled response ends there
    assert make_sampling(settings("model=smollm2_135m"), policy).end_ids == set()  # of another prompt's, training's own
    assert end_of_turn(settings().prompt, policy.tokenizer) is None  # elsewhere the tokenizer's own
    assert end_of_turn(prompt(), asking("{{ messages }}\n").tokenizer) is None  # left to the end of text


def test_any_file_may_be_the_users_turn_and_a_prompt_of_the_datas_own_is_left_alone(asking):
    """Bug: questions in a field `prompt` are asked without any template, and nobody is told."""
    policy = asking(QWEN3)
    bare = PromptEncoder(policy, prompt(file="question_only.prompt"))
    assert policy.tokenizer.decode(bare(ONE)).startswith(f"<|im_start|>user\n{ONE.question}<|im_end|>")
    own = Problem("own", "1+1?", "2", prompt="Say: ")
    assert policy.tokenizer.decode(bare(own)) == "Say: "
    assert [len(remarks(prompt(), problems)) for problems in ([ONE, own], [ONE])] == [1, 0]
    r1_zero = settings().prompt
    filled = replace(own, prompt=prompt_renderer(r1_zero.file)("1+1?"))
    assert [len(remarks(r1_zero, [one])) for one in (own, filled)] == [1, 0]


def test_a_protocol_knows_the_chat_template_and_what_was_chosen(asking):
    run = settings("model=smollm2_135m", "prompt=chat")
    qwen, chatml = asking(QWEN3).tokenizer, asking(CHATML).tokenizer
    first = protocol_of(run.evaluation, [ONE], qwen)
    other = protocol_of(run.evaluation, [ONE], chatml)
    assert [line.split(":")[0] for line in differences(first, other)] == ["chat.prompt", "chat.template"]
    run.prompt.system = "Be brief."
    assert protocol_of(run.evaluation, [ONE], qwen)["hash"] not in (first["hash"], other["hash"])
