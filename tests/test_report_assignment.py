"""The write-up of an assignment: what is found, what is said of it, and what is said where nothing has been run."""

import gzip
import html
import json
import os
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report.assignment import FILES, MARKDOWN, PAGE, sections, write_up
from rlreason.report.assignment.courses import Found, Runs, course_of, found_below
from rlreason.report.assignment.figures import interval_of, metrics_table, verdict_of, with_bands
from rlreason.report.assignment.sections import DONE, IN_WORDS, NOT_YET, PARTLY, Section
from rlreason.report.charts import standalone
from rlreason.report.content import LIGHT
from rlreason.report.figures import figures_of
from rlreason.report.read import read_study
from rlreason.report.study import Series, Study
from rlreason.sweeps.state import RunState, SweepState, read_state, write_state
from tests.sweep_folders import CONFIG, answers, ended, sweep
from tools.keep_write_up import keep

ROOT = Path(__file__).parents[1]
COURSES = ("cs336_2025", "cs336_2026", "pku_hw3")
HOSTILE = "</pre><script>alert(1)</script>\u202e | `x` </details>"
RATES = {"1e-6": 0.2, "1e-5": 0.5, "3e-5": 0.8, "1e-4": None}
ENTROPY = {"none": 0.5, "group_std": 0.25}


def metrics(run: Path, entropy: float, accuracy: float, shift: float = 0.0) -> None:
    """Rows of a run of 40 steps, an evaluation at each fourth."""
    rows = []
    for step in range(0, 41, 4):
        time = {"rollout_step": step, "train_step": step, "tokens/generated": 100 * step, "time/active": 2.0 * step}
        row = time | {"time/total": 3.0 * step, "eval/accuracy": accuracy * step / 40, "eval/entropy": entropy}
        rows.append(row | {"train/grad_norm": 0.123456789 + shift, "rollout/entropy": entropy + shift})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rates(folder: Path, name: str = "grpo_learning_rate") -> Path:
    """The sweep of learning rates, the last of which diverged."""
    sweep(
        folder / name,
        "learning_rate",
        list(RATES),
        lambda value, seed: None if (chance := RATES[value]) is None else answers(seed, chance),
        reference={"learning_rate": "1e-5"},
    )
    for run in (folder / name).glob("*seed=*"):
        metrics(run, 0.3, 0.5, 0.001 * int(run.name[-1]))
    return folder / name


def evaluated(folder: Path, response: str = "no tags at all") -> Path:
    """A run of algorithm=evaluate: of 40 responses 12 right, 13 wrong with the format and 15 without it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: evaluate\nseed: 0\nmodel: {name: tiny}\ndata: {name: stories}\n")
    rows = []
    for k in range(40):
        right, formatted = k < 12, k < 25
        said = f"so </think> <answer>{k + right}</answer>" if formatted else response
        outcome = "correct" if right else "wrong" if formatted else "no_format"
        rows.append(
            {
                "problem_id": f"p{k}", "question": f"What is {k} + 1?", "gold": str(k + 1), "response": said,
                "outcome": outcome, "format_reward": float(formatted), "answer_reward": float(right),
                "reward": float(right), "path": "number", "length": 5, "finish_reason": "stop", "sample": 0,
            }
        )  # fmt: skip
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    protocol = {"reward": "r1_zero", "hash": "bb", "prompt": "{question}", "data": "d"}
    summary = {"status": "finished", "reason": "", "accuracy": 0.3, "eval_problems": 40, "protocol": protocol}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Some of what CS336 2025 asks for."""
    folder = tmp_path_factory.mktemp("runs")
    rates(folder / "sweeps/grpo_assignment")
    for name, key, values in (
        ("grpo_group_standard_deviation", "std_norm", ("group_std", "none")),
        ("sft_filtered", "data.filter", ("none", "correct")),
    ):
        chance = dict(zip(values, (0.7, 0.4) if key == "std_norm" else (0.4, 0.9), strict=True))
        sweep(
            folder / "sweeps" / name, key, values, lambda v, s, of=chance: answers(s, of[v]), reference={key: values[0]}
        )
    for run in (folder / "sweeps/grpo_group_standard_deviation").glob("*seed=*"):
        metrics(run, 0.3, 0.5, ENTROPY["none" if "none" in run.name else "group_std"] + 0.001 * int(run.name[-1]))
    for run in (folder / "sweeps/sft_filtered").glob("*correct*"):
        summary = json.loads((run / "summary.json").read_text())
        sizes = {"train_before_filter": 3000, "train_filtered": 1308, "train": 1308}
        (run / "summary.json").write_text(json.dumps(summary | {"data_sizes": sizes}))
    evaluated(folder / "zero", HOSTILE)
    return folder


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("out")
    return out, write_up("cs336_2025", runs, out, Console()).figures


def test_the_checklist_says_what_is_done_and_how_to_run_the_rest(written):
    out, figures = written
    states = {one["question"]: one["state"] for one in figures["questions"]}
    assert list(states) == [question.id for question in course_of("cs336_2025").questions]
    assert states["zero_shot"] == states["grpo_learning_rate"] == states["grpo_train_loop"] == DONE
    assert states["sft_experiment"] == PARTLY
    assert states["grpo_baselines"] == NOT_YET
    assert states["think_about_length_normalization"] == IN_WORDS
    (missing,) = (one["missing"] for one in figures["questions"] if one["question"] == "sft_experiment")
    assert len(missing) == 2
    assert "sweep=sft_tuning" in missing[0]
    assert "sweep=sft_dataset_size" in missing[1]
    text = (out / MARKDOWN).read_text()
    assert "`python -m rlreason -m sweep=grpo_baselines experiment=cs336_2025 data.path=MATH_DIR`" in text
    assert figures["problems"] == []


def test_figures_and_sentences_are_those_of_the_runs(written):
    text = (written[0] / MARKDOWN).read_text()
    assert "12 format 1, answer 1; 13 format 1, answer 0; 15 format 0, answer 0" in text
    assert "the filtered set has 1,308 of 3,000 traces (43.6%)." in text
    assert "format 0, answer 0: the first 10 of 15" in text
    assert text.count("zero/responses.jsonl:") == 20
    assert "Pass bar 25.0%, grpo\\_learning\\_rate: reached, as 3e-5, the best of 4 settings" in text
    assert "| none | 0.625<br>0.623 to 0.627<br>higher |" in text
    assert "1e-4 diverged in 4 of 4 seeds" in text


def test_published_directions_stand_beside_what_was_found(written):
    text = (written[0] / MARKDOWN).read_text()
    rows = re.findall(r"^\| (grpo\S+|sft\S+|expert\S+) \| .* \| ([^|]+) \|$", text[text.index("## Directions") :], re.M)
    said = [(name.replace("\\", ""), word) for name, word in rows]
    rate = [word for name, word in said if name == "grpo_learning_rate"][:3]
    assert rate == ["agrees", "agrees", "agrees"]
    assert ("grpo_group_standard_deviation", "agrees") in said
    assert ("grpo_baselines", "not run") in said
    assert ("sft_experiment", "agrees") in said


def test_a_published_direction_is_found_in_either_off_policy_sweep():
    """Where the broad sweep chose the arms, or ran alone, three of its published directions read as not run."""
    reference = "epochs_per_rollout=1 train_batch_size=256"
    broad = [
        SimpleNamespace(typed=(f"epochs_per_rollout={epochs} train_batch_size={size}", reference))
        for epochs, size in ((1, 64), (4, 64), (4, 256))
    ]
    directions = [one for one in course_of("cs336_2025").directions if one.question == "grpo_off_policy_sweep"]
    assert [broad.index(verdict_of(one, broad)) for one in directions] == [0, 2, 1]
    focused = [SimpleNamespace(typed=("off_policy=e4_full", "off_policy=on_policy"))]
    assert [verdict_of(one, [*broad, *focused]) in focused for one in directions] == [False, True, False]


def test_the_page_has_no_script_and_hostile_texts_are_text(written):
    out = written[0]
    page, text = (out / PAGE).read_text(), (out / MARKDOWN).read_text()
    assert "script-src" not in page
    assert "default-src 'none'" in html.unescape(page)
    assert not re.search(r"<script|<[^>]* (src|href|on\w+)=", page)
    assert "\u202e" not in page + text
    assert "&lt;/pre&gt;&lt;script&gt;" in page
    assert page.count("<details>") == page.count("</details>")
    quoted = text[text.index("format 0, answer 0: the first") :]
    assert re.search(r"^````?`?text\n</pre><script>", quoted, re.M)  # inside a fence
    colours = set(re.findall(r'(?:fill|stroke)="(#\w{6})"', page))
    assert not colours & set(LIGHT.values())  # they follow the page's colours


def test_every_picture_named_is_there_and_none_is_left_over(written):
    out = written[0]
    named = set(re.findall(rf"{FILES}/([\w.]+)", (out / MARKDOWN).read_text()))
    assert named == {path.name for path in (out / FILES).iterdir()}
    assert len(named) > 8


def test_nothing_at_all_is_a_list_of_commands(tmp_path):
    for course in COURSES:
        out = tmp_path / course  # which is made
        answer = write_up(course, tmp_path, out, Console())
        states = {one["state"] for one in answer.figures["questions"]}
        assert states <= {NOT_YET, IN_WORDS}
        assert "0 runs" in (out / MARKDOWN).read_text()
        said = "not part of this write-up: the kissing number" in (out / MARKDOWN).read_text()
        assert said == (course == "pku_hw3")
    with pytest.raises(ConfigError, match="is no folder"):
        write_up("cs336_2025", tmp_path / "nowhere", None, Console())


def test_the_newest_of_each_name_counts(tmp_path):
    old, new = rates(tmp_path / "a"), rates(tmp_path / "b")
    os.utime(new / "sweep.json", (1e9, 1e9))
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert [one.path for one in found_below(tmp_path)] == [old, new]
    gathered = Runs(course_of("cs336_2025"), found_below(tmp_path))
    assert gathered.sweep("grpo_learning_rate").path == old


def test_a_sweep_is_what_was_asked_for_and_not_what_its_folder_is_called(tmp_path):
    """What was typed with experiment= or sweep_name= stands in a folder of another name, and was not found."""
    mine = rates(tmp_path, "grpo_learning_rate,experiment=cs336_2025")
    state = read_state(mine)
    state.sweep = "grpo_learning_rate"
    write_state(mine, state)
    typed = rates(tmp_path, "grpo_baselines")  # learning rates of one's own, by sweep_name=grpo_baselines
    state = read_state(typed)
    state.sweep = ""
    write_state(typed, state)
    gathered = Runs(course_of("cs336_2025"), found_below(tmp_path))
    assert gathered.sweep("grpo_learning_rate").path == mine
    assert gathered.sweep("grpo_baselines") is None


@pytest.mark.parametrize(
    "real", [{"tiny": "qwen2_5_math_1_5b", "stories_long": "math"}, {"n_steps: 40": "n_steps: 200"}]
)
def test_the_real_sweep_answers_and_not_a_rehearsal_that_is_newer(real, tmp_path):
    rehearsal, mine = rates(tmp_path / "a"), rates(tmp_path / "b")
    for run in mine.glob("*seed=*"):
        config = (run / "config.yaml").read_text()
        for before, after in real.items():
            config = config.replace(before, after)
        (run / "config.yaml").write_text(config)
    os.utime(mine / "sweep.json", (1e9, 1e9))
    gathered = Runs(course_of("cs336_2025"), found_below(tmp_path))
    assert gathered.sweep("grpo_learning_rate").path == mine
    assert rehearsal.is_dir()


def section_of(course: str, question: str, folder: Path) -> Section:
    found = course_of(course)
    (wanted,) = (one for one in found.questions if one.id == question)
    return sections.section_of(wanted, Runs(found, found_below(folder)))


def trained(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: {name: tiny}\ndata: {name: stories}\n")
    (folder / "status.json").write_text('{"status": "finished"}')
    (folder / "model").mkdir()
    return folder / "model"


def changed(run: Path, **settings) -> Path:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in settings.items():
        group, _, name = key.partition("__")
        config[group] = (config.get(group) or {}) | {name: value} if name else value
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return run


def test_zero_shot_is_answered_by_the_untrained_model_alone(tmp_path):
    """After the evaluation of a trained model the write-up said what share is right before any training."""
    model = trained(tmp_path / "mine")
    run = changed(evaluated(tmp_path / "after"), model__path=str(model))
    section = section_of("cs336_2025", "zero_shot", tmp_path)
    assert (section.state, section.missing) == (NOT_YET, section.question.commands())
    assert any("after" in line and "mine" in line for line in section.lines)
    os.utime(evaluated(tmp_path / "before") / "config.yaml", (1e9, 1e9))
    assert section_of("cs336_2025", "zero_shot", tmp_path).state == DONE
    assert run.is_dir()


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt__name": "question_only"},
        {"data__name": "gsm8k"},
        {"model__name": "olmo2_1b"},
        {"sampling__temperature": 0.0},
        {"eval__prompt": {"name": "question_boxed"}},
    ],
)
def test_zero_shot_is_not_answered_by_another_measurement(settings, tmp_path):
    changed(evaluated(tmp_path / "other"), **settings)
    section = section_of("cs336_2025", "zero_shot", tmp_path)
    assert section.state == NOT_YET
    assert "does not answer this" in section.lines[0]


def test_zero_shot_is_not_answered_by_weights_that_no_training_began_with(tmp_path):
    run = changed(evaluated(tmp_path / "copied"), model__path="/models/mine")
    (run / "provenance.json").write_text('{"model": {"start_weights": "aa"}}')
    assert section_of("cs336_2025", "zero_shot", tmp_path).state == DONE
    (tmp_path / "training").mkdir()
    (tmp_path / "training/config.yaml").write_text("algorithm: grpo\nmodel: {name: tiny, path: /models/base}\n")
    (tmp_path / "training/provenance.json").write_text('{"model": {"start_weights": "bb"}}')
    assert section_of("cs336_2025", "zero_shot", tmp_path).state == NOT_YET


def test_zero_shot_is_not_answered_by_a_part_of_the_split(tmp_path):
    run = evaluated(tmp_path / "part")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"data_sizes": {"validation": 5000}}))
    assert "40 of 5000" in section_of("cs336_2025", "zero_shot", tmp_path).lines[0]


def test_zero_shot_under_three_prompts_is_put_together_and_lacks_what_has_not_run(tmp_path):
    for name in ("r1_zero", "question_boxed"):
        changed(evaluated(tmp_path / name), prompt__name=name)
    section = section_of("cs336_2026", "zero_shot", tmp_path)
    assert section.state == PARTLY
    assert any("r1_zero_three_shot" in line for line in section.lines)
    changed(evaluated(tmp_path / "shots"), prompt__name="r1_zero_three_shot")
    section = section_of("cs336_2026", "zero_shot", tmp_path)
    assert (section.state, len(section.tables) > 2) == (DONE, True)


@pytest.mark.parametrize(
    ("settings", "answers_it"),
    [
        ({}, True),
        ({"prompt__reward": "rlreason.grading:coin"}, False),
        ({"loss__loss_type": "no_baseline"}, False),
        ({"train_batch_size": 8, "rollout_batch_size": 16}, False),
        ({"train_batch_size": 16, "rollout_batch_size": 16}, True),
    ],
)
def test_the_train_loop_is_answered_by_its_own_settings(settings, answers_it, tmp_path):
    folder = tmp_path / "loop"
    ended(folder, answers(0, 0.5))
    changed(folder, **settings)
    assert (section_of("cs336_2025", "grpo_train_loop", tmp_path).state == DONE) == answers_it


def test_a_sweep_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "grpo_baselines").mkdir()
    (tmp_path / "grpo_baselines/sweep.json").write_text("{")
    figures = write_up("cs336_2025", tmp_path, None, Console()).figures
    (problem,) = figures["problems"]
    assert "grpo_baselines" in problem
    assert problem in html.unescape((tmp_path / PAGE).read_text())
    assert {one["state"] for one in figures["questions"]} == {NOT_YET, IN_WORDS}


def test_runs_that_have_not_ended_make_a_question_partly_done(tmp_path):
    folder = rates(tmp_path)
    state = read_state(folder)
    for run in state.runs[:2]:
        (folder / run.name / "summary.json").unlink()
        (folder / run.name / "status.json").write_text(json.dumps({"status": "running"}))
    write_state(folder, state)
    section = section_of("cs336_2025", "grpo_learning_rate", tmp_path)
    assert section.state == PARTLY
    assert section.missing == section.question.commands()


def test_the_leaderboards_figure_is_the_average_over_all_problems(tmp_path):
    """What is handed in is over all 5,000; the half that did not choose is for the comparison alone."""
    study = read_study([rates(tmp_path, "leaderboard")])
    lines = section_of("cs336_2025", "leaderboard", tmp_path).lines
    best = max(study.settings, key=lambda one: np.mean([run.accuracy for run in one.runs]))
    average = np.mean([run.accuracy for run in best.runs])
    assert any(f"{100 * average:.1f}%" in line and "all 200 problems" in line for line in lines)


def rated(folder: Path, config: str = CONFIG) -> tuple[Study, Section]:
    """The study and the section of a sweep of learning rates with this config."""
    for run in rates(folder).glob("*seed=*"):
        (run / "config.yaml").write_text(config)
    section = section_of("cs336_2025", "grpo_learning_rate", folder)
    return section.reads[0].study, section


MATH = CONFIG.replace("tiny", "qwen2_5_math_1_5b").replace("stories_long", "math")


def test_a_bar_is_that_of_the_model_that_was_run_and_not_of_its_name(tmp_path):
    study, section = rated(tmp_path, MATH)
    (bar,) = (line for line in section.lines if "Pass bar" in line)
    assert "says nothing" not in bar
    assert "200 steps, and these runs came to 40" in bar
    for run in study.runs:
        run.provenance = {"model": {"parameters": 39_616}}
    assert not course_of("cs336_2025").has(study)


def test_bands_are_drawn_and_causes_named_only_for_the_published_model(tmp_path):
    course = course_of("cs336_2025")
    (question,) = (one for one in course.questions if one.id == "grpo_learning_rate")
    for name, config, bands in (("tiny", CONFIG, 0), ("math", MATH, 1)):
        study, section = rated(tmp_path / name, config)
        figure = with_bands(figures_of(study)[0], course, question.id, study)
        assert len(figure.rows["published"]) == bands
        assert any("not below" in line for line in section.lines) == bool(bands)
        assert any("says nothing of this model" in line for line in section.lines) != bool(bands)
    for low, below in ((0.03, "far below"), (0.46, "you are below")):
        for run in study.runs:
            run.accuracy, run.totals = low + 0.001 * run.seed, {"step": 200.0}
        section = Section(question)
        sections._headline(section, found_of(study), Runs(course, []))
        assert below in section.lines[-1]
        assert "Commonest causes" in section.lines[-1]


def found_of(study: Study) -> Found:
    found = Found(study.folders[0], 0.0)
    found.study = study
    return found


def test_a_pass_bar_is_of_the_whole_interval_on_problems_that_did_not_choose(tmp_path):
    study, section = rated(tmp_path)
    assert any("Pass bar" in line and "on the other half" in line for line in section.lines)
    mean, low, high = interval_of(study.reference.runs)
    assert low < mean < high
    one = interval_of(study.reference.runs[:1])
    assert one[1] < study.reference.runs[0].accuracy < one[2]  # of one seed, over its problems


def test_other_metrics_are_judged_by_pairs_of_seeds_and_corrected_for_all_of_them(tmp_path):
    """What stands by itself may not among the metrics of all settings; what is far beyond the spread of seeds does."""
    study, _ = rated(tmp_path)

    def higher(study: Study) -> list[str]:
        return [row[0] for row in metrics_table(study).rows if row[1].endswith("higher")]

    def end(setting, values):
        for run, value in zip(setting.runs, values, strict=True):
            run.series = {**run.series, "train/grad_norm": Series({"step": np.array([1.0])}, np.array([value]))}

    assert higher(study) == []
    reference, one = study.settings[:2]
    for setting in study.settings:
        end(setting, [1.0, 1.1, 1.2, 1.3])
    end(one, [1.05, 1.17, 1.23, 1.38])
    assert higher(replace(study, settings=[reference, one])) == [one.label]
    assert higher(study) == []
    end(one, [9.0, 9.1, 9.2, 9.31])
    assert higher(study) == [one.label]
    for setting in study.settings:
        setting.runs = setting.runs[:1]  # one seed judges nothing
    assert higher(study) == []


def cells(folder: Path, of: list[dict[str, str]], config: str = CONFIG, seeds: tuple[int, ...] = (0, 1)) -> list[Path]:
    """A sweep over settings of several keys, the first of which is the reference; the folders of its runs."""
    runs = []
    for number, seed in ((number, seed) for number in range(len(of)) for seed in seeds):
        name, words = f"cell{number},seed={seed}", [f"{key}={value}" for key, value in of[number].items()]
        ended(folder / name, answers(seed, 0.2 + 0.1 * number), config=config)
        runs.append(RunState(name, [*words, f"seed={seed}"], of[number], seed, seconds=60.0))
    axes = list(dict.fromkeys(key for one in of for key in one))
    write_state(folder, SweepState(folder.name, "x", axes, of[0], "finished", 1, "basic", runs, sweep=folder.name))
    return [folder / run.name for run in runs]


def test_all_sizes_of_a_budget_are_curves_of_one_picture_with_a_colour_each(tmp_path):
    """Ten settings in one picture left four sizes grey and without a name, and two budgets on one axis."""
    sizes, budgets = (
        ("null", "128", "256", "512", "1024"),
        ({"epochs": "3", "n_steps": "null"}, {"epochs": "null", "n_steps": "40"}),
    )
    settings = [{"data.limit": size, **budget} for budget in budgets for size in sizes]
    for run in cells(tmp_path / "sft_dataset_size", settings, CONFIG.replace("grpo", "sft")):
        metrics(run, 0.3, 0.5)
        if run.name.startswith("cell1,"):  # 128 examples, 3 epochs: 4 steps
            (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").open().readlines()[:2]))
    section = section_of("cs336_2025", "sft_experiment", tmp_path)
    labels = [f"{size} examples" for size in ("all", "1024", "512", "256", "128")]
    assert len({one.stem for one in section.pictures}) == len({one.figure.title for one in section.pictures}) == 2
    for one in section.pictures:
        assert [(entry.label, entry.colour) for entry in one.legend] == list(zip(labels, range(5), strict=True))
        assert {line.setting for line in one.figure.curves.lines} == set(labels)
        assert all(label in standalone(one.figure, one.legend) for label in labels)
    scales = [one.figure.x.scale.get("type") == "symlog" for one in section.pictures]
    assert scales == [True, False]  # where a curve is a tenth as long as another
    against_all = [verdicts for asked, verdicts in section.verdicts if "n_steps=40" in asked]
    assert [verdict.setting for verdict in against_all[0]] == labels[1:]


def test_what_n_responses_are_worth_is_one_picture_before_and_after_grpo(tmp_path):
    """Each way to choose had a picture, and a model's legend was its path, cut off before it told the two apart."""
    ways = {"pass@N": [[0.2, 0.1, 0.3], [0.6, 0.5, 0.7]], "best mean log-prob": [[0.2, 0.1, 0.3], [0.3, 0.2, 0.4]]}
    path = "a/long/path/to/the/runs/sweeps/pku_best_of_n/pku_grpo/seed=0"
    models = [{"model.path": "MODEL"}, {"model.path": path}]
    runs = cells(tmp_path / "a/pku_before_and_after", models, CONFIG.replace("grpo", "best_of_n"), (0,))
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"n_list": [1, 4], "best_of_n": ways}))
    section = section_of("pku_hw3", "best_of_n", tmp_path / "a")
    (picture,) = section.pictures
    assert [entry.label for entry in picture.legend] == [
        f"{when} GRPO: {way}" for way in ways for when in ("before", "after")
    ]
    assert len(picture.figure.rows["means"]) == 8
    assert path not in " ".join(verdict.sentence for _, verdicts in section.verdicts for verdict in verdicts)
    (tmp_path / "b").mkdir()
    runs[0].rename(tmp_path / "b/run")
    (picture,) = section_of("pku_hw3", "best_of_n", tmp_path / "b").pictures
    assert [entry.label for entry in picture.legend] == list(ways)


#: Questions for which the handout asks for metrics besides the accuracy.
ASKS_FOR_ENTROPY = ("grpo_baselines", "grpo_length_normalization", "grpo_group_standard_deviation")


def test_every_sweep_setting_and_figure_of_the_data_files_is_there():
    named = {path.stem: path.read_text() for path in (ROOT / "multirun_sweeps").glob("*.yaml")}
    for name in COURSES:
        course = course_of(name)
        ids = [question.id for question in course.questions]
        assert len(set(ids)) == len(ids)
        for question in course.questions:
            assert set(question.sweeps) <= named.keys()
            assert {"entropy", "train/grad_norm"} <= set(question.figures) or question.id not in ASKS_FOR_ENTROPY
            commands = question.commands()
            assert all(f"experiment={name}" in one for one in commands)
            assert all(("data.path=MATH_DIR" in one) == (name == "cs336_2025") for one in commands)
        assert {got.question for got in course.figures} | {one.question for one in course.directions} <= set(ids)
        assert all(0 <= got.low <= got.high <= 100 for got in course.figures)
    for one in course_of("cs336_2025").directions:
        for word in {word for typed in (one.setting, one.reference, *one.small) for word in typed.split()}:
            key, _, value = word.partition("=")
            mine = [text for text in named.values() if key in text and (value in text or f'{key}: "${{div' in text)]
            assert mine, word


def test_the_commands_of_the_page_are_those_of_the_checklist():
    page = (ROOT / "docs/assignments.md").read_text()
    for name in ("cs336_2025", "cs336_2026"):
        for question in course_of(name).questions:
            for command in question.commands():
                assert f"`{command}" in page, command


def test_what_is_kept_is_small_and_the_same_twice(runs, tmp_path):
    for name in ("a", "b"):
        assert keep("cs336_2025", runs, tmp_path / name) == []
    mine, again = (tmp_path / name / "metrics/grpo_learning_rate.tar.gz" for name in ("a", "b"))
    assert mine.read_bytes() == again.read_bytes()
    assert not list((tmp_path / "a" / FILES).glob("*_dark.svg"))
    assert "_dark.svg" not in (tmp_path / "a" / MARKDOWN).read_text()
    with gzip.open(mine) as packed, tarfile.open(fileobj=packed) as tar:
        names = tar.getnames()
        file = tar.extractfile(names[0])
        assert file is not None
        rows = [json.loads(line) for line in file]
    assert len(names) == 16
    assert len(rows) == 11
    assert rows[0]["train/grad_norm"] == 0.1235


def test_the_rehearsal_stands_with_what_it_names():
    folder = ROOT / "docs/rehearsal"
    text = (folder / MARKDOWN).read_text()
    named = set(re.findall(rf"{FILES}/([\w.]+)", text))
    assert named == {path.name for path in (folder / FILES).iterdir()}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 5e6
    assert "cannot tell" in text
