"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlreason.cli.doctor_findings import (
    FAIL,
    OK,
    TESTED,
    VLLM,
    WARN,
    DoctorFinding,
    Installed,
    disk_findings,
    gpu_findings,
    installed,
    lines_of,
    machine_findings,
    package_finding,
    read_machine,
    version_findings,
)
from rlreason.cli.doctor_probes import Probe, ProbeResult, probe_findings
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.fitting import describe_placement, engine_gpus, ranks_here
from rlreason.model.savings import cure, planned, verdict
from rlreason.model.shapes import Device, Driver, processor, query_driver, shape_of, with_second
from rlreason.records.console import Console
from rlreason.runtime.streams import Answer, Parser
from rlreason.runtime.text import first_line

if TYPE_CHECKING:
    from rlreason.model.savings import Planned

NO_SETTINGS = {"dtype": "auto", "weights": "float32", "attention": "auto"}


class Examination(NamedTuple):
    """The findings by section, the memory plan if there is a run, and the seconds that each import took."""

    sections: dict[str, list[DoctorFinding]]
    plan: "Planned | None"
    seconds: dict[str, float]


@contextmanager
def under_way(probes: dict[str, Probe]) -> Iterator[dict[str, Probe]]:
    """Start probes for the block, and end them all after it."""
    try:
        yield probes
    finally:
        for probe in probes.values():
            if probe.process.poll() is None:
                probe.kill()


def examine_machine(there: Installed, unread: str, patience_s: float) -> Examination:
    """Check what is possible if a broken library makes settings unreadable; `unread`: its error."""
    with under_way({"torch": Probe("torch", NO_SETTINGS)}) as probes:
        driver, results = query_driver(), {name: probe.wait(patience_s) for name, probe in probes.items()}
    lost = DoctorFinding("settings", FAIL, f"cannot be read: {unread}", "mend the libraries above first")
    sections = {
        "libraries": libraries_of(there, results, ()),
        "machine": [*gpus_of(results["torch"], driver), *machine_findings(read_machine(), uses_vllm=False)],
        "this run": [lost],
    }
    return Examination(sections, None, seconds_of(results))


def libraries_of(
    there: Installed, results: dict[str, ProbeResult], wanted: Sequence[str], idle: Mapping[str, str] | None = None
) -> list[DoctorFinding]:
    """Return findings on versions and pairs, and on the imports that were tried.

    `wanted`: packages that the run needs; `idle`: others -> why they are not needed.
    """
    of_imports = [one for name, found in results.items() for one in probe_findings(name, found, _cure(name, there))]
    return [*version_findings(there, wanted, idle), *of_imports]


def _cure(name: str, there: Installed) -> str:
    """Return what helps if a package cannot be imported: a version of the range, or the same one again."""
    own = next((one for one in (VLLM if name == "vllm" else (name,)) if one in there.versions), None)
    if own is None or package_finding(name, own, there.versions[own]).state != OK:
        return TESTED[name].cure
    again = f"pip install --force-reinstall --no-deps '{own}=={there.versions[own]}'"
    return again if name == "torch" else f"{again}, or the torch that it was built for"


def gpus_of(torch: ProbeResult, driver: Driver, used: str = "") -> list[DoctorFinding]:
    """Return findings on GPUs, from torch and from the driver."""
    has_driver = shutil.which("nvidia-smi") is not None
    return gpu_findings(torch.facts, driver, os.environ.get("CUDA_VISIBLE_DEVICES"), has_driver, used)


def seconds_of(results: dict[str, ProbeResult]) -> dict[str, float]:
    """Return how long each import took."""
    return {name: round(found.seconds, 1) for name, found in results.items()}


FAST = "rollout=vllm, which decodes several times faster on a GPU"


def run_findings(run: RunConfig, torch: ProbeResult, has_vllm: bool) -> list[DoctorFinding]:
    """Return findings on what a run would use. `torch`: result of torch's probe; `has_vllm`: it is installed."""
    device = torch.facts.get("device")
    if device is None:  # the probe failed, which has a finding of its own
        return [grader_finding(run)]
    return [
        device_finding(torch.facts),
        engine_finding(run, device, has_vllm, len(torch.facts.get("gpus") or [])),
        attention_finding(run, torch.facts),
        sync_finding(run, device, len(torch.facts.get("gpus") or [])),
        grader_finding(run),
    ]


def device_finding(facts: Mapping[str, Any]) -> DoctorFinding:
    """Return where the model is computed, and in which precision."""
    if facts["device"] == "cuda":
        return DoctorFinding("device", OK, f"{facts['gpus'][0]['name']}, products in {facts['products']}")
    return DoctorFinding("device", OK, f"processor, products in {facts['products']}: torch sees no GPU")


def engine_finding(run: RunConfig, device: str, has_vllm: bool, gpus: int) -> DoctorFinding:
    """Return which engine samples, where and why."""
    rollout = run.rollout
    if rollout.engine == "hf":
        words = "hf, in this process: needs nothing but transformers (rollout=auto takes vLLM where there is a GPU)"
        if run.model.made_on_the_spot:
            words = "hf, in this process: the built-in model is sampled there"
        elif device == "cuda":
            return DoctorFinding(
                "engine", WARN, words, FAST + ("" if has_vllm else ", after pip install 'vllm>=0.28,<0.33'")
            )
        return DoctorFinding("engine", OK, words)
    if not has_vllm:
        cure = "pip install 'vllm>=0.28,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
        return DoctorFinding("engine", FAIL, "rollout=vllm, and vLLM is not installed", f"{cure}; or rollout=hf")
    return placed(rollout.placement, device, gpus, rollout.gpus, ranks_here(run))


def placed(placement: str, device: str, gpus: int = 0, engines: int = 1, ranks: int = 1) -> DoctorFinding:
    """Return where vLLM runs. `gpus`: how many are visible; `ranks`: of the trainer.

    >>> placed("auto", "cpu").words, placed("second_gpu", "cpu").state
    ('vllm, in this process on the processor (rollout.placement=auto, and there is no GPU)', 'fail')
    """
    from rlreason.training.preflight import too_few_gpus  # the check of a start

    if why := too_few_gpus(placement, gpus, engines, ranks):
        words, _, helps = why.rpartition(": ")
        return DoctorFinding("engine", FAIL, words, helps)
    if device != "cuda" and placement in ("colocate", "second_gpu"):
        words = f"rollout.placement={placement}, and the policy is not on a GPU"
        return DoctorFinding("engine", FAIL, words, "rollout.placement=auto")
    if device == "cuda" and placement == "cpu":
        words = "rollout.placement=cpu, and the policy is on the GPU, where vLLM belongs too"
        return DoctorFinding("engine", FAIL, words, "rollout.placement=auto")
    if engines > 1 or ranks > 1:
        on = engine_gpus(placement, engines, ranks, gpus)
        return DoctorFinding("engine", OK, describe_placement(placement, on, ranks))
    if placement == "second_gpu":
        return DoctorFinding("engine", OK, "vllm, in a process and on a GPU of its own (rollout.placement=second_gpu)")
    if device == "cuda":
        return DoctorFinding("engine", OK, f"vllm, in this process on the policy's GPU (rollout.placement={placement})")
    words = f"vllm, in this process on the processor (rollout.placement={placement}, and there is no GPU)"
    return DoctorFinding("engine", OK, words)


def gpus_used(run: RunConfig, visible: int) -> str:
    """Return which of several GPUs the run uses, and for what; "" if it is only the first."""
    rollout, ranks = run.rollout, ranks_here(run)
    trained = f"{_numbers(range(ranks))} for training (gpus={ranks})" if ranks > 1 else "0 for training"
    engines = list[int]()
    if rollout.engine == "vllm":
        with suppress(ConfigError):  # too few: reported with the engine
            engines = engine_gpus(rollout.placement, rollout.gpus, ranks, visible)
    if not engines:
        return trained if ranks > 1 else ""
    if ranks == 1 and engines == [0]:
        return ""
    return (
        f"{trained}, {_numbers(engines)} for vLLM (rollout.gpus={rollout.gpus} rollout.placement={rollout.placement})"
    )


def _numbers(gpus: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, gpus[:-1])), str(gpus[-1]))))


def attention_finding(run: RunConfig, facts: Mapping[str, Any]) -> DoctorFinding:
    """Return which kernel computes attention in training."""
    if not facts["kernel"]:
        words, _, cure = str(facts["why"]).rpartition(": ")
        return DoctorFinding("attention", FAIL, words, cure)
    why = f"model.attention={run.model.attention}: {facts['why']}"
    meaning = {"sdpa": "sdpa, one call per sequence", "varlen": "varlen, torch's own kernel for packed sequences"}
    return DoctorFinding("attention", OK, f"{meaning.get(facts['kernel'], facts['kernel'])} ({why})")


def sync_finding(run: RunConfig, device: str, gpus: int) -> DoctorFinding:
    """Return how new weights reach the engine."""
    rollout = run.rollout
    if rollout.engine == "hf":
        return DoctorFinding("weight sync", OK, "none: the engine samples from the very weights that are trained")
    if rollout.placement == "second_gpu":
        if gpus < 2:
            words = "NCCL, to vLLM's process on a second GPU, which is not here"
            return DoctorFinding("weight sync", FAIL, words, "rollout.placement=auto")
        return DoctorFinding(
            "weight sync", OK, "NCCL, to vLLM's process on the second GPU; digests of the weights are compared"
        )
    how = "copied within this process after each update and compared bit by bit"
    if device == "cuda" and rollout.sleep:
        how += "; vLLM's memory is given to training in between (rollout.sleep=true)"
    return DoctorFinding("weight sync", OK, how)


def grader_finding(run: RunConfig) -> DoctorFinding:
    """Return which grader the run uses."""
    workers, memory = run.grading.workers, run.grading.memory_mb
    several = "processes" if workers > 1 else "process"
    own = run.prompt.reward if ":" in run.prompt.reward else "answers that the exact rules cannot decide"
    return DoctorFinding("grader", OK, f"{workers} {several} of at most {memory} MB for {own}")


class RequestedRun(NamedTuple):
    """A run and the folder that it would write to."""

    run: RunConfig
    folder: Path


def requested_run(words: Sequence[str], subcommand: str, note: Callable[[str], object]) -> RequestedRun:
    """Compose and check the run as a start would; `ConfigError` in one line for a mistake.

    What only a start refuses (a missing package, a full disk) is left to findings. `subcommand`: named in messages.
    """
    from rlreason.cli.check import prepared
    from rlreason.cli.compose import composed_run
    from rlreason.cli.flags import composing, read
    from rlreason.cli.mistakes import in_one_line, mistakes_in
    from rlreason.config.store import register

    with mistakes_in(words):
        if wrong := next((word for word in words if "=" not in word and not word.startswith(("~", "-"))), None):
            raise ConfigError(f"{wrong} is no setting of a run: write rlreason {subcommand} key=value ...")
        register()
        request = read(words)
        if request.multirun or not request.starts:
            raise ConfigError(
                f"rlreason {subcommand} looks at one run: leave the flags out, and give each setting one value"
            )
        with composing(request), in_one_line(request.overrides, request.config_name):
            one = composed_run(prepared(request, note).overrides, request.config_name)
    run: AnyRunConfig = one.run
    if not works_on_a_model(run):
        raise ConfigError(
            f"rlreason {subcommand} is about runs that load a model here, and algorithm={run.algorithm} loads none"
        )
    return RequestedRun(run, one.folder)


STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def examine_run(request: RequestedRun, there: Installed, patience_s: float) -> Examination:
    """Check libraries and machine for a run, what it will use, and its memory."""
    from rlreason.training.preflight import assumed_prompt

    run, uses_vllm = request.run, request.run.rollout.engine == "vllm"
    with under_way(_probes(run, there)) as probes:
        driver = query_driver()
        results = {name: probe.wait(patience_s) for name, probe in probes.items()}
    torch, model = results["torch"], results.pop("model", None)
    told = planned(run, _device(torch, driver.gpus), assumed_prompt(run))
    wanted = ["flash-attn"] * (run.model.attention == "flash_attention_2") + ["vllm"] * uses_vllm
    idle = {
        "flash-attn": f"model.attention={run.model.attention} takes torch's own kernels",
        "vllm": "the run samples in this process",
    }
    memory = DoctorFinding("memory", STATES[told.verdict], verdict(told), cure(told))
    has_vllm = any(name in there.versions for name in VLLM)
    machine = [
        *gpus_of(torch, driver, gpus_used(run, len(torch.facts.get("gpus") or []))),
        *machine_findings(read_machine(), uses_vllm),
        *_disk(request),
    ]
    sections = {
        "libraries": [*libraries_of(there, results, wanted, idle), *packages(run)],
        "machine": machine,
        "this run": [*run_findings(run, torch, has_vllm), *weight_findings(model), memory],
    }
    return Examination(sections, told, seconds_of(results))


def _probes(run: RunConfig, there: Installed) -> dict[str, Probe]:
    """Start the imports to try: what every run needs, what is often broken, and this run's engine."""
    settings = {"dtype": run.model.dtype, "weights": run.model.weights, "attention": run.model.attention}
    found = {"torch": Probe("torch", settings)}
    if "flash-attn" in there.versions:
        found["flash-attn"] = Probe("flash_attn")
    if run.rollout.engine == "vllm" and any(name in there.versions for name in VLLM):
        found["vllm"] = Probe("vllm")
    if (folder := run.model.folder) and (Path(folder).is_dir() or is_cached(folder)):
        found["model"] = Probe("model", {"path": folder})
    return found


def weight_findings(looked: ProbeResult | None) -> list[DoctorFinding]:
    """Return whether the weights fit the model; [] if it is generated or not downloaded yet."""
    if looked is None:
        return []
    if refused := looked.facts.get("refused"):
        words, _, helps = refused.rpartition(": ")
        return [DoctorFinding("weights", FAIL, words, helps)]
    if looked.failure:
        return [
            DoctorFinding("weights", WARN, f"cannot be looked at: {looked.failure}", "start the run, which says more")
        ]
    return [DoctorFinding("weights", OK, looked.facts["holds"])]


def packages(run: RunConfig) -> list[DoctorFinding]:
    """Return the missing packages that the settings need, except vLLM, which has findings of its own."""
    from rlreason.training.preflight import missing_packages

    found = []
    for line in missing_packages(run):
        words, _, helps = line.partition(": ")
        if not words.startswith("rollout=vllm"):
            found.append(DoctorFinding("packages", FAIL, words, helps))
    return found


def _device(torch: ProbeResult, driver: Sequence[Device]) -> Device:
    """Return where the run computes; from the driver if torch's probe failed."""
    if gpus := torch.facts.get("gpus"):
        return with_second([Device("cuda", one["name"], one["free"], one["total"], one["bf16"]) for one in gpus])
    return with_second(list(driver)) if driver and "cuda" not in torch.facts else processor()


def _disk(request: RequestedRun) -> list[DoctorFinding]:
    from huggingface_hub import constants

    from rlreason.training.preflight import RECORDS, space_needed

    run, folder = request.run, request.run.model.folder
    download = 0
    if folder and not Path(folder).is_dir() and not is_cached(folder):
        shape = shape_of(run.model).shape
        download = 2 * shape.numbers if shape else 0
    space = space_needed(run)
    writes = RECORDS + space.model, RECORDS + space.peak
    return disk_findings(request.folder, writes, Path(constants.HF_HUB_CACHE), download)


def is_cached(name: str) -> bool:
    """Return whether a model's config and weights have been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    weights = ("model.safetensors", "model.safetensors.index.json")
    try:
        there = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *weights)]
    except HFValidationError:
        return False
    return there[0] and any(there[1:])


PATIENCE_S = 60.0  # for an import: a minute suffices for a cold disk
MOST_PATIENCE = 3600.0
READ_BY = {"hydra-core", "omegaconf", "antlr4-python3-runtime"}  # needed to read settings


def add_arguments(parser: Parser) -> None:
    """Add the words of a run, and how long an import may take."""
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings of the run, as it would start")
    parser.add_argument(
        "--patience", type=_seconds, default=PATIENCE_S, metavar="S", help="seconds that an import may take (60)"
    )


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_PATIENCE:
        raise ConfigError(f"--patience {word} must be a number of seconds, up to {MOST_PATIENCE:g}: try --patience 60")
    return seconds


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    there, what = installed(), "looking at libraries and GPUs"
    try:  # the imports too: OmegaConf cannot be imported with a wrong antlr4
        request = requested_run(arguments.words, "doctor", console.say)
    except Exception as error:
        if not settings_unreadable(there):
            raise
        with console.wait(what):
            return answer(examine_machine(there, first_line(error), arguments.patience), console.width)
    with console.wait(what):
        return answer(examine_run(request, there, arguments.patience), console.width)


def settings_unreadable(there: Installed) -> bool:
    """Return whether a library that reads settings is itself broken, so that an error in them may be false."""
    return any(one.state == FAIL and one.name in READ_BY for one in version_findings(there))


def answer(looked: Examination, width: int) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    every = [one for findings in looked.sections.values() for one in findings]
    failed, warned = (sum(one.state == state for one in every) for state in (FAIL, WARN))
    lines: list[str] = []
    plan = None
    for title, findings in looked.sections.items():
        lines += [title, *lines_of(findings, width), ""]
    if looked.plan is not None:
        from rlreason.model.savings import figures, table

        plan = figures(looked.plan)
        lines += ["memory plan", *(f"  {line}" for line in table(looked.plan)), ""]
    told: dict[str, Any] = {
        "findings": [{"section": title} | one.figures() for title, found in looked.sections.items() for one in found],
        "memory": plan,
        "failed": failed,
        "warned": warned,
        "seconds": looked.seconds,
    }
    return Answer("\n".join([*lines, ending(failed, warned)]), told, 1 if failed else 0)


def ending(failed: int, warned: int) -> str:
    """Return the last line.

    >>> ending(0, 1), ending(2, 0)
    ('nothing is in the way; ? 1 to look at', '! 2 in the way')
    """
    start = f"! {failed} in the way" if failed else "nothing is in the way"
    return start + (f"; ? {warned} to look at" if warned else "")
