"""The subcommand compare: sides of every kind, outcomes as exit codes and as JSON, and mistakes in one line."""

import itertools
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from rlreason.records.reader import write_status
from rlreason.sweeps.state import write_state
from tests.sweep_folders import CONFIG, PROTOCOL, answers, ended, sweep

CHANCE = {"1e-4": 0.5, "1e-3": 0.8, "1e-2": 0.2}
CSV = "setting,seed,problem,correct\n"


@pytest.fixture(scope="module")
def rates(tmp_path_factory) -> Path:
    """A sweep of three learning rates with four seeds each, and one of two equal settings next to it."""
    folder = tmp_path_factory.mktemp("compare") / "rates"
    reference = {"learning_rate": "1e-4"}
    sweep(folder, "learning_rate", list(CHANCE), lambda v, s: answers(s, CHANCE[v]), reference=reference)
    sweep(folder.with_name("same"), "loss", ["a", "b"], lambda v, s: answers(s, 0.6, 400), reference={"loss": "a"})
    return folder


def test_a_sweep_alone_two_settings_and_expectations(rates, cli):
    """Bug: a sweep without Holm's correction, the best of one on the problems that chose it, or another exit code."""
    better, worse = cli.figures("compare", rates)
    assert (better["setting"], better["reference"]) == ("learning_rate=1e-3", "learning_rate=1e-4")
    assert (better["verdict"], worse["verdict"], better["seeds"], better["problems"]) == ("better", "worse", 4, 200)
    assert 0 < better["low"] < better["difference"] < better["high"] <= 1
    assert better["p"] <= better["adjusted_p"] <= 0.05
    a, b, same = rates / "learning_rate=1e-4", rates / "learning_rate=1e-3", rates.with_name("same")
    (one,) = cli.figures("compare", a, b)
    assert (one["verdict"], "was the best of 3" in one["notes"][0]) == ("better", True)
    (one,) = cli.figures("compare", a, rates / "learning_rate=1e-2")
    assert (one["verdict"], one["notes"]) == ("worse", [])
    (one,) = cli.figures("compare", f"{a},seed=0", f"{b},seed=0")  # models, which never settle what settings do
    assert (one["verdict"], one["seeds"]) == ("cannot tell", 1)
    (one,) = cli.figures("compare", same, rates)  # the best settings, on the problems of 200 that did not choose
    assert (one["setting"], one["verdict"], 50 < one["problems"] < 150) == ("rates: 1e-3", "better", True)
    assert "best of 3 settings on one half" in " ".join(one["notes"])
    expected = ((a, b, "better"), 0), ((a, b, "same"), 1), ((rates, "better"), 1), ((same, "same"), 0)
    for (*sides, word), code in (*expected, ((same, "--equal-within", "0.01", "same"), 1)):
        cli.printed("compare", *sides, "--expect", word, code=code)


def test_two_sweeps_are_compared_with_the_reference_of_the_first_and_a_failed_run_with_nothing(tmp_path, cli):
    """Bug: the setting typed first takes the reference's place, or a run that ran out of memory is a worse setting."""
    one, two = tmp_path / "one", tmp_path / "two"
    sweep(one, "loss", ["a", "b"], lambda v, s: answers(s, 0.5), reference={"loss": "b"})
    sweep(two, "loss", ["c"], lambda v, s: answers(s, 0.5), reference={"loss": "c"})
    for folder in (*one.glob("loss=*"), *two.glob("loss=*")):
        (folder / "config.yaml").write_text(f"{CONFIG}loss: {{loss_type: {folder.name[5]}}}\n")
    told = cli.figures("report", one, two, "--out", tmp_path / "out")["verdicts"]
    assert {(v["reference"], v["setting"]) for v in told} == {("loss.loss_type=b", f"loss.loss_type={v}") for v in "ac"}
    failed = one / "loss=a,seed=1"
    (failed / "summary.json").unlink()
    write_status(failed, "failed")
    (verdict,) = cli.figures("compare", one)
    assert (verdict["seeds"], "Seed 1 of a does not enter (failed)" in verdict["sentence"]) == (3, True)


def test_looks_count_for_two_settings_too(tmp_path, cli):
    """Bug: settings of a sweep that took looks (seed=auto), given one by one, are told apart as if it took none."""
    state = sweep(tmp_path / "s", "x", ["1", "2"], lambda v, s: answers(40 * int(v) + s, 0.4 + int(v) / 10))
    sides = [tmp_path / "s"], [tmp_path / "s/x=1", tmp_path / "s/x=2"]
    plain = cli.figures("compare", tmp_path / "s")[0]["p"]
    write_state(tmp_path / "s", replace(state, max_seeds=8))
    whole, two = ([cli.figures("compare", *paths)[0][end] for end in ("p", "low", "high")] for paths in sides)
    assert (two == whole, two[0] > plain) == (True, True)


def test_problems_that_chose_are_in_no_validation_set(tmp_path, cli):
    """Bug: a set shares problems with the runs' own validation, and judges a setting by what chose it."""
    for name, chance in (("a", 0.5), ("b", 0.55)):
        sweep(tmp_path / name, "x", ["1", "2", "3"], lambda v, s: answers(7 * int(v) + s, chance))  # noqa: B023
        for run in (tmp_path / name).glob("x=*"):
            shutil.copytree(run / "evals", tmp_path / "copy")
            (tmp_path / "copy").rename(run / "evals/hard")
    own, hard = cli.figures("compare", tmp_path / "a", tmp_path / "b")
    assert (hard["set"], hard["problems"], hard["difference"]) == ("hard", own["problems"], own["difference"])
    for file in tmp_path.glob("*/*/evals/hard/*"):
        file.write_text(file.read_text().partition("\n")[0])  # the first problem, which is of the half that chose
    said = cli.printed("compare", tmp_path / "a", tmp_path / "b")
    assert "On hard: Not compared: their runs have no problem in common to be compared on." in said


def test_settings_measured_otherwise(tmp_path, cli):
    """Bug: accuracies under two prompts, temperatures or problem sets are compared, or what differs has no name; or
    they are where the first run has failed.
    """
    for name, steps in (("one", "40"), ("two", "20")):
        ended(tmp_path / name, answers(0, 0.5), config=CONFIG.replace("40", steps))
    assert "n_steps (40 in one, 20 in two)" in cli.figures("compare", tmp_path / "one", tmp_path / "two")[0]["notes"][0]
    for name, change in (("s", {"sampling.temperature": 0.0}), ("p", {"prompt": "{question}!"})):
        other = {"b": PROTOCOL | change | {"hash": "b"}}
        key = "prompt" if name == "p" else "x"  # what a sweep is about may differ
        sweep(tmp_path / name, key, ["a", "b"], lambda v, s: answers(s, 0.5), reference={key: "a"}, protocols=other)
    assert "sampling.temperature is 0.0 in b and 1.0 in a" in cli.refused("compare", tmp_path / "s")
    (one,) = cli.figures("compare", tmp_path / "s", code=2)
    assert (one["verdict"], one["difference"]) == ("not compared", None)
    cli.figures("compare", tmp_path / "s", "--expect", "better", code=2)  # nothing was compared, whatever is expected
    assert cli.figures("compare", tmp_path / "p")[0]["difference"] is not None
    (tmp_path / "s/x=a,seed=0/summary.json").unlink()  # and so has no protocol
    write_status(tmp_path / "s/x=a,seed=0", "failed")
    assert "sampling.temperature is 0.0 in b and 1.0 in a" in cli.refused("compare", tmp_path / "s")
    for name in ("rel_tol", "workers"):
        ended(tmp_path / name, answers(0, 0.5), config=f"{CONFIG}grading: {{{name}: 1}}\n")
        (tmp_path / name / "summary.json").unlink()
        write_status(tmp_path / name, "interrupted")
    assert cli.figures("compare", tmp_path / "one", tmp_path / "workers")[0]["difference"] is not None
    assert "grading.rel_tol is 1 in rel_tol" in cli.refused("compare", tmp_path / "one", tmp_path / "rel_tol")
    for name, asked, digest in (("all", 200, "d1"), ("few", 64, "d2")):  # a hash says nothing: its setting does
        protocol = PROTOCOL | {"data": digest, "problems": asked, "hash": digest}
        config = CONFIG.replace("stories_long}", f"stories_long, n_validation: {asked}}}")
        ended(tmp_path / name, answers(0, 0.6, asked), protocol, config)
    error = cli.refused("compare", tmp_path / "all", tmp_path / "few")
    assert ("data.n_validation is 64 in few and 200 in all" in error, "d1" in error) == (True, False)


# ---- files of others ----


def rows(name: str, seeds: int, right: float, problems: int = 80) -> str:
    return "".join(f"{name},{s},p{p},{int(p < right * problems + s)}\n" for s in range(seeds) for p in range(problems))


def test_csv_files(rates, tmp_path, cli):
    """Bug: the order of columns, several samples or the ids of problems change a verdict on somebody's CSV file."""
    file = tmp_path / "results.csv"
    file.write_text(CSV + rows("old", 3, 0.5) + rows("new", 3, 0.7))
    (one,) = cli.figures("compare", file)
    assert (one["setting"], one["reference"], one["verdict"]) == ("setting=new", "setting=old", "better")
    assert one["difference"] == pytest.approx(0.2)
    parts = [line.split(",") for line in file.read_text().splitlines()]
    file.write_text("".join(f"{p},note,{c},{s},{n}\n" for n, s, p, c in parts))
    assert cli.figures("compare", file) == [one]  # columns in another order, and one too many
    for hits in (("10", "11"), (["0.5"], ["True"])):  # several samples, or their share
        lines = [f"{n},0,p{p},{v}\n" for n, of in zip("ab", hits, strict=True) for p in range(70) for v in of]
        file.write_text(CSV + "".join(lines))
        assert cli.figures("compare", file)[0]["difference"] == 0.5
    answered = itertools.product(enumerate("ab"), range(3), range(80))
    lines = [f"{n},{s},p{p},{int(p < 40 + of * 8)},{p // 8}\n" for (of, n), s, p in answered]
    file.write_text(CSV.strip() + ",cluster\n" + "".join(lines))
    (one,) = cli.figures("compare", file)
    assert (one["verdict"], one["clusters"], one["clustered_by"]) == ("cannot tell", 10, "cluster")
    for cell in ("9", " "):  # another one in the last seed, or none
        file.write_text(CSV.strip() + ",cluster\n" + "a,0,p0,1,0\n" + "".join(lines[1:]) + f"b,3,p0,1,{cell}\n")
        assert "results.csv: problem p0 has the clusters '0' and '" in cli.refused("compare", file)
    of_b = [row for row in rows("b", 3, 0.9).splitlines() if not row.startswith("b,1,") or row.startswith("b,1,p7,")]
    file.write_text(CSV + rows("a", 3, 0.3) + "\n".join(of_b))
    assert cli.figures("compare", file)[0]["problems"] == 1  # seed 1 of b answered no other
    for name in ("p{}", "What is {} + 1?"):  # of a run: the id of a problem, or its question
        file.write_text(CSV + "".join(f"theirs,{s},{name.format(p)},1\n" for s in range(4) for p in range(200)))
        (one,) = cli.figures("compare", rates / "learning_rate=1e-4", file)
        assert (one["setting"], one["verdict"], one["seeds"], one["problems"]) == ("results.csv", "better", 4, 200)
        assert "results.csv does not say" in one["notes"][0]


def completions(folder: Path, right: float) -> None:
    """An output_dir of TRL's GRPOTrainer with log_completions: a file a step, the last of which counts."""
    import pyarrow
    from pyarrow import parquet

    (folder / "completions").mkdir(parents=True)
    for step in (1, 2):
        hits = [float(k < right * 160) * (step == 2) for k in range(160)]
        rows = [{"step": step, "prompt": f"What is {k // 2}?", "accuracy_reward": hit} for k, hit in enumerate(hits)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"completions/completions_{step:05d}.parquet")


def lm_eval_samples(folder: Path, right: float) -> None:
    """A folder of lm-eval with --log_samples: the newest file counts, under the first of its filters."""
    (folder / "model__name").mkdir(parents=True)
    for time, share in (("2026-01-02T03-04-05.67", right), ("2025-01-02T03-04-05.67", 0.0)):
        with (folder / f"model__name/samples_gsm8k_{time}.jsonl").open("w") as file:
            for k, name in itertools.product(range(80), ("strict", "flexible")):
                row = {"doc_id": k, "doc": {"question": f"What is {k}?"}, "filter": name, "doc_hash": f"h{k}"}
                file.write(json.dumps(row | {"exact_match": float(k < share * 80) * (name == "strict")}) + "\n")


def inspect_log(folder: Path, right: float) -> None:
    """A log of Inspect in a folder, two epochs of 40 questions."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "2026-01-02T03-04-05+00-00_gsm8k_abc.eval", "w") as log:
        for k in range(80):
            score = {"match": {"value": "C" if k < right * 80 else "I"}, "second": {"value": 0.3}}
            sample = {"id": k // 2, "input": f"What is {k // 2}?", "scores": score}
            log.writestr(f"samples/{k // 2}_epoch_{1 + k % 2}.json", json.dumps(sample))


@pytest.mark.parametrize(("write", "problems"), [(completions, 80), (lm_eval_samples, 80), (inspect_log, 40)])
def test_logs_of_other_programs(write, problems, tmp_path, cli):
    """Bug: another step, filter, scorer or file of TRL, lm-eval or Inspect counts, or repeated questions do."""
    for name, right in (("one", 0.5), ("two", 0.8)):
        for seed in (0, 1, 2):
            write(tmp_path / name / f"seed_{seed}", right + 0.025 * seed)
    (found,) = cli.figures("compare", tmp_path / "one", tmp_path / "two")
    assert (found["verdict"], found["seeds"], found["problems"]) == ("better", 3, problems)
    assert found["difference"] == pytest.approx(0.3)
    file = max((path for path in (tmp_path / "two/seed_0").rglob("*") if path.is_file()), key=str)
    assert cli.figures("compare", tmp_path / "one/seed_0", file)[0]["difference"] == pytest.approx(0.3)
    write(tmp_path / "one/again", 0.5)
    assert "the number of its seed" in cli.refused("compare", tmp_path / "one", tmp_path / "two")
    file.write_bytes(b"{}")
    assert "cannot be read as" in cli.refused("compare", tmp_path / "one/seed_0", file)


WRONG = [
    ("setting,seed,correct\na,0,1\n", "no column problem"), (CSV, "no row"), (CSV + "a,0,,1\n", "row 1"),
    (CSV + "a,0,p,1\na,x,p,1\n", "seed=x"), (CSV + "a,0,p,1\nb,0,p,nan\n", "correct=nan"),
    (CSV + "a,0,p,1\n", "one setting"), ("\x00\udce4", "cannot be read as CSV"),
]  # fmt: skip


def test_wrong_sides(rates, tmp_path, cli):
    """Bug: sides that cannot be compared, or a wrong row, end in a traceback or a verdict."""
    for text, says in WRONG:
        (tmp_path / "wrong.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert says in cli.refused("compare", tmp_path / "wrong.csv")
    a, b, other = (tmp_path / f"{name}.csv" for name in ("a", "b", "other"))
    for file in (a, b):
        file.write_text(CSV + f"{file.stem},0,p4,1\n{file.stem}x,0,p4,0\n")
    other.write_text(CSV + rows("theirs", 4, 0.9).replace(",p", ",q"))
    for *words, says in (
        (tmp_path / "nowhere.csv", "nowhere.csv is not there"), (rates / "learning_rate=7", "no run of"),
        (rates, "--equal-within", "0", "--equal-within"), (a, b, "too few problems"),
        (other, rates / "learning_rate=1e-4", "no problem in common"),
    ):  # fmt: skip
        assert says in cli.refused("compare", *words)
