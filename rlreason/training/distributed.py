"""Training on several ranks that each hold the whole model or a part of it: how they meet, learn and score together."""

import copy
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError, EngineError
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import use_fast_products
from rlreason.model.parameters import from_config, materialize, pick_device, round_weights, skeleton_of
from rlreason.model.policy import LogProbScorer, Pairs, Policy, TokenScores, scored_rows
from rlreason.objectives.terms import StepSums, StepValues
from rlreason.records.files import RANKS_LOG
from rlreason.records.reader import write_status
from rlreason.runtime import machine, signals
from rlreason.runtime.files import alive
from rlreason.runtime.text import first_line
from rlreason.training.build import frozen_copy, learner_settings, mode_of, set_threads, set_trained
from rlreason.training.learner import Learner, is_finite, local, sampled_elements
from rlreason.types import Sample

FOREVER = timedelta(days=365)  # rank 0 may load, sample and evaluate for any length of time
PATIENCE = timedelta(minutes=5)  # with the store; NCCL's beyond ours, whose message is better
LIMIT_S = 3600.0  # to wait for a rank in a collective call, if waits.run_s sets none
BEGIN = "begin"  # a key of the store; rank 0 writes a limit in seconds there,
NOTHING = b"nothing"  # or that no run begins
ENDING_S, LOOK_S = 10.0, 0.2  # for a rank to end; between two looks at it
GRACE_S = 4.0  # for rank 0 to notice by itself that another rank has ended
GONE = ("connection closed", "connection reset", "timed out")  # of a rank that is not a child of this process
RESUME = "resume=RUN goes on from the last checkpoint"


class Ranks:
    """One process's connection to all ranks, in torch's default group. Its collective calls are made by all at once.

    Rank 0 orders what the others do, and ends with any of them: a lost rank is found by the error of a collective call
    (`together`), or by a thread that looks for it (`_watch`), since a call of NCCL never ends.
    """

    def __init__(self, store: Any, rank: int, world: int, limit_s: float) -> None:
        """`limit_s`: seconds to wait for a rank in a collective call."""
        self.store, self.rank, self.world, self.limit_s = store, rank, world, limit_s
        self.device = pick_device()
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.broken = False  # a collective call was broken off: the others wait in it, and cannot be reached
        self._watched = store.clone()  # the other client is locked while it waits for a rank
        self._lock, self._over = threading.RLock(), threading.Event()

    def lead(self, folder: Path) -> None:
        """Start the other ranks, unless torchrun has, with their output in the run's `folder`, and meet them."""
        self.folder = folder
        self.store.set(BEGIN, str(self.limit_s))
        if not machine.place_of():
            if sys.platform == "linux":  # all ranks are on this machine: no one else may reach them
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with (folder / RANKS_LOG).open("ab") as out:
                for rank in range(1, self.world):
                    values = map(str, (rank, self.world, rank, self.world, machine.ADDRESS, self.store.port))
                    env, nothing = os.environ | dict(zip(machine.NAMES, values, strict=True)), subprocess.DEVNULL
                    command = [sys.executable, "-m", "rlreason"]
                    self.children[rank] = subprocess.Popen(command, env=env, stdin=nothing, stdout=out, stderr=out)
        if signals.owns_process():  # never end the process of a user's script or notebook
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.meet()

    def meet(self) -> None:
        """Join torch's default group, once every rank has loaded its libraries."""
        keys = [f"device{number}" for number in range(self.world)]
        self.store.set(keys[self.rank], self.device.type)
        while not self.store.check(keys):  # until every rank has loaded its libraries
            if lost := self.lost():
                raise EngineError(f"training on {self.world} ranks ended before it began: {lost}")
            time.sleep(LOOK_S)
        if len({self.store.get(key) for key in keys}) > 1:
            raise ConfigError(f"gpus={self.world}: not all of the ranks have a GPU: start as many ranks as GPUs")
        backend, later = ("gloo", timedelta()) if self.device.type == "cpu" else ("cpu:gloo,cuda:nccl", PATIENCE)
        limit = timedelta(seconds=0.8 * self.limit_s)  # before this process is ended for hanging, without a word
        own, limit_of_all = self.store, limit + later
        dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.world, timeout=limit_of_all)
        self._orders = dist.new_group(backend="gloo", timeout=FOREVER if self.rank else limit)
        self._objects = dist.new_group(backend="gloo", timeout=limit)

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Run this block on all ranks: when rank 0 comes to it, the others call the method `name` with `arguments`.

        One such block at a time, in whichever thread; no signal interrupts it, because the others would wait. An error
        that follows from another rank's end becomes an `EngineError`, which says which rank is lost, and why.
        """
        if self.rank:
            yield
            return
        with self._lock, signals.held():
            if self.broken:
                raise EngineError(f"training on {self.world} ranks is over")
            try:
                alive()
                self.broadcast((name, arguments), self._orders)
                yield
                alive()
            except BaseException as error:
                self.broken = True
                if not isinstance(error, RuntimeError):
                    raise
                time.sleep(LOOK_S)  # a connection closes before its process ends
                if not (lost := self.lost()):
                    if not any(sign in str(error).lower() for sign in GONE):
                        raise
                    lost = f"one has gone, or not answered within waits.run_s={self.limit_s:g} s ({first_line(error)})"
                self._over.set()
                raise EngineError(f"training on {self.world} ranks ended in {name}: {lost}; {RESUME}") from error

    def orders(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield what rank 0 comes to next, waiting without a limit; `RuntimeError` if it has gone."""
        while order := self.broadcast(None, self._orders):
            yield order
        dist.destroy_process_group()

    def broadcast(self, value: Any, group: Any = None) -> Any:
        """Return rank 0's value on every rank: anything that can be pickled."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group or self._objects, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank: anything that can be pickled."""
        found = [None] * self.world
        dist.all_gather_object(found, value, self._objects)
        return found

    def lost(self) -> str:
        """Return which ranks have ended, and how; "" if all live. Rank 0 alone looks."""
        if self.rank:
            return ""
        lost = []
        for rank in range(1, self.world):
            code = self.children[rank].poll() if rank in self.children else None
            if self._watched.check([f"error{rank}"]):
                lost.append(f"rank {rank} failed: {self._watched.get(f'error{rank}').decode()}")
            elif code is not None:
                lost.append(f"rank {rank} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        return ", ".join(lost)

    def _watch(self) -> None:
        """End this process if another rank has ended and nothing here notices."""
        while not self._over.wait(LOOK_S):
            lost = ""
            with suppress(RuntimeError):  # torchrun's store may be gone
                lost = self.lost()
            if lost and not self._over.wait(GRACE_S):
                log = f" (see {self.folder / RANKS_LOG})" if self.children else ""
                why = f"training on {self.world} ranks: {lost}{log}"
                with suppress(Exception):  # such as a full disk, which must not prevent the end
                    write_status(self.folder, "failed", why)
                signals.leave_at_once(f"ended: {why}; {RESUME}", 1)

    def close(self) -> None:
        """End the other ranks; those that do not end are killed, and at once if they hang in a broken call."""
        if not self.broken:
            with suppress(RuntimeError), self._lock:
                self.broadcast(None, self._orders)
        self._over.set()
        until = time.monotonic() + (0.0 if self.broken else ENDING_S)
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            child.kill()
            child.wait()
        log = self.folder / RANKS_LOG
        if log.exists() and not log.stat().st_size:
            log.unlink()
        if dist.is_initialized():
            dist.destroy_process_group()


def store_of(place: machine.Place) -> Any:
    """Return the store where the processes of torchrun, or those of rank 0, meet."""
    store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=PATIENCE))
    return store


def release_torchrun_ranks() -> None:
    """Tell the processes started by torchrun that this command does not need them, unless a run has begun."""
    if place := machine.place_of():
        store = store_of(place)
        if not store.check([BEGIN]):
            store.set(BEGIN, NOTHING)


def on_all_ranks(method: Callable[..., Any]) -> Any:
    """Run a method on all ranks at once: when rank 0 calls it, the others do, with the same arguments."""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        with self.ranks.together(method.__name__, *arguments):
            return method(self, *arguments)

    return call


class RankedLearner(Learner):
    """One rank's learner: each has the whole model, and gradients are summed over all ranks (`parallel=replicate`).

    The trainer has that of rank 0; what is marked `on_all_ranks` the others do with it, on its orders.
    """

    in_step = False  # whether all ranks must run the same number of passes, since each gathers the others' weights
    take_step = on_all_ranks(Learner.take_step)
    restart = on_all_ranks(Learner.restart)

    def __init__(
        self, run: TrainingConfig, ranks: Ranks, policies: Mapping[str, Policy], whole: Mapping[str, Policy]
    ) -> None:
        """Give `policies`, this rank's by name, the weights of `whole`, the complete ones on rank 0; none elsewhere."""
        self.ranks, self.policies, self.whole = ranks, policies, whole.get("policy")
        self.sharers = ranks.world
        for name, policy in policies.items():
            fill(ranks, policy, whole.get(name))
        super().__init__(policies["policy"], **learner_settings(run))

    def read(self, done: StepSums, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Add the sums of all ranks, each over its own samples; `more` is the same on all of them."""
        counts, parts = zip(*self.ranks.all_gather((done.n_micro, done.read(samples, *more))), strict=True)
        done.n_micro = sum(counts)
        sums = dict[str, float]()
        for part in parts:
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        each = zip(*(part.entropies for part in parts), strict=True)
        entropies = [next((entropy for entropy in same if entropy is not None), None) for same in each]
        return StepValues(sums, parts[0].more, entropies, [value for part in parts for value in part.mismatches])

    def step_micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """Yield rank r's micro-batches of the step: r, r + world, ..."""
        rank, world, every = self.ranks.rank, self.ranks.world, list(super().step_micro_batches(samples))
        for with_gradient in (True, False):
            batches = [places for needed, places in every if needed == with_gradient]
            for places in batches[rank::world]:
                yield with_gradient, places
            if self.in_step and 0 < len(batches) % world <= rank:  # a pass that counts nothing
                s = samples[batches[0][0]].response
                with torch.set_grad_enabled(with_gradient):
                    flat, _ = self.policy.log_probs(self.policy.pack([(s.prompt_ids, s.token_ids)]), self.temperature)
                    if with_gradient:
                        (0 * flat.sum()).backward()

    def clip(self) -> Tensor:
        """Sum the gradients of all ranks, then clip."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                total = parameter.grad.float().contiguous()
                dist.all_reduce(total)
                parameter.grad.copy_(total)
        return super().clip()

    def weights_moved(self) -> None:
        """Check that all ranks have the same weights, by some elements of each tensor."""
        marks = torch.cat([part.float().reshape(-1).cpu() for part in sampled_elements(self.parameters)])
        digests = self.ranks.all_gather(hashlib.sha256(marks.numpy().tobytes()).hexdigest()[:16])
        if len(set(digests)) > 1:
            raise EngineError(
                f"training on {self.ranks.world} ranks: their weights have parted ({', '.join(digests)}): resume from "
                "the last checkpoint, on GPUs of one kind"
            )

    @torch.no_grad()
    def restore(self, moments: Iterable[dict[str, Any]] = ()) -> None:
        """Load rank 0's weights and these moments, one after the other, on all ranks; others have none to give."""
        with self.ranks.together("restore"):
            fill(self.ranks, self.policy, self.whole)
            own, parts = iter(moments), []
            for parameter in self.parameters:
                state = self.ranks.broadcast(next(own, None))
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = sharded_like(parameter, value.to(self.ranks.device))
                parts.append(state)
            super().restore(parts)

    @on_all_ranks
    @torch.no_grad()
    def score(self, name: str, pairs: Pairs, token_budget: int, temperature: float) -> list[TokenScores]:
        """Score under the policy of this name as its scorer alone would, each rank its share of the rows."""
        policy, rank, world = self.policies[name], self.ranks.rank, self.ranks.world
        rows = policy.divide(pairs, token_budget, sharers=self.sharers)
        scores = scored_rows(policy, pairs, rows[rank::world], temperature)
        if self.in_step and 0 < len(rows) % world <= rank:
            scored_rows(policy, pairs, [rows[0][:1]], temperature)
        by_place = {place: score for part in self.ranks.all_gather(scores) for place, score in part.items()}
        return [by_place[i] for i in range(len(pairs))]


def sharded(policy: Policy, mesh: DeviceMesh) -> Policy:
    """Shard this policy's model over ranks, in place, which from then on run the same number of passes together.

    A model without weights gets memory for this rank's part, to be filled.
    """
    model, part = policy.model, copy.copy(policy)
    part.keeps_casts = False  # else a rank would keep all layers in half precision until a pass ends
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"parallel=shard: {type(model).__name__} does not mark its layers, by which weights are spread: set "
            "parallel=replicate"
        )
    for module in (*layers, model):
        materialize(module, policy.device)  # one layer at a time: all of them may not fit on the GPU
        use_fast_products(module)
        # Free gathered weights after each pass: the root's would otherwise be stale after the next step.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gradients are sums over ranks, not means, on every backend
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.log_probs = partial(Policy.log_probs, part)
    register_fsdp_forward_method(model, "log_probs")  # its hooks gather the weights that are in no layer
    part.log_probs = model.log_probs  # type: ignore[method-assign]
    return part


class ShardedLearner(RankedLearner):
    """One rank's learner, with its part of the model (`parallel=shard`)."""

    in_step = True

    def clip(self) -> Tensor:
        """Clip only: gradients are already summed over all ranks; the norm is one over all parts."""
        return whole_of(super(RankedLearner, self).clip())

    @torch.no_grad()
    def weights_moved(self) -> None:
        """Update rank 0's whole copy."""
        copies = (self.whole or self.policy).model.parameters()
        for part, copied in zip(self.policy.model.parameters(), copies, strict=True):
            if part.requires_grad:
                gathered = whole_of(part)
                if self.whole:
                    copied.copy_(gathered)

    @on_all_ranks
    def moments(self) -> list[dict[str, Any]]:
        """Gather the moments on rank 0 in main memory, one tensor at a time; other ranks keep none."""
        gathered = []
        for state in super().moments():
            whole = {name: whole_of(value) for name, value in state.items()}
            gathered.append({} if self.ranks.rank else {name: value.cpu() for name, value in whole.items()})
        return gathered

    def weights_are_finite(self) -> bool:
        """Return whether every trained weight is finite, by rank 0's copy."""
        assert self.whole
        return all(is_finite(p) for p in self.whole.model.parameters() if p.requires_grad)

    @on_all_ranks
    def broken_moments(self) -> set[int]:
        """Return the indices of the trained tensors with a moment that is not finite, on any rank."""
        return set().union(*self.ranks.all_gather(super().broken_moments()))


def whole_of(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks; return any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(ranks: Ranks, policy: Policy, whole: Policy | None) -> None:
    """Give every rank its part of rank 0's weights and buffers; `whole` is None on the others."""
    source = (whole or policy).model
    own = [*source.parameters(), *source.buffers()]
    for place, part in enumerate([*policy.model.parameters(), *policy.model.buffers()]):
        full = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
        if whole:
            full.copy_(own[place])
        dist.broadcast(full, src=0)
        local(part).copy_(local(sharded_like(part, full)))


def sharded_like(part: Tensor, full: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, or all of it if `part` is not sharded."""
    if not isinstance(part, DTensor):
        return full
    return distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)


def make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, world: int, folder: Path
) -> RankedLearner:
    """Build rank 0's learner: start the other ranks, send them the model, and let them wait for its orders.

    In the mode `shard`, `policy` becomes a whole copy in main memory, unless it was loaded there.
    """
    mode, why = mode_of(run, world)
    mode = "shard" if policy.in_main_memory else mode  # as decided before loading
    policy.remarks.append(f"{world} ranks train (parallel={mode}: {why})")
    whole = {"policy": policy} | ({"reference": reference.policy} if reference else {})
    place = machine.place_of()
    store = store_of(place) if place else TCPStore(machine.ADDRESS, 0, None, True, wait_for_workers=False)
    ranks = Ranks(store, 0, world, run.waits.run_s or LIMIT_S)
    try:
        ranks.lead(folder)
        checked = copy.copy(policy)  # what `auto` has become here holds everywhere
        checked.model, checked.in_main_memory, checked.remarks = None, False, []  # type: ignore[assignment]
        arguments = run, mode, checked, policy.model.config
        with ranks.together("start", *arguments):
            if mode == "shard":
                for copied in whole.values():
                    copied.in_main_memory = True
                    copied.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
                    torch.cuda.empty_cache()
            learner = ranked_learner(ranks, whole, *arguments)
            for name, scored in whole.items():
                scored.deal = partial(learner.score, name)
            return learner
    except BaseException:
        ranks.broken = True
        ranks.close()
        raise


def follow(place: machine.Place) -> int:
    """Do this rank's part of a run, on the orders of rank 0; return the exit code. An error is left for rank 0."""
    store = store_of(place)
    store.wait([BEGIN], FOREVER)
    if (limit_s := store.get(BEGIN)) == NOTHING:
        return 0
    try:
        ranks = Ranks(store, place.rank, place.world, float(limit_s))
        ranks.meet()
        orders = ranks.orders()
        _, arguments = next(orders)
        learner, rollout = ranked_learner(ranks, {}, *arguments), arguments[0].rollout
        engine_sleeps = rollout.engine == "vllm" and rollout.sleep and rollout.shares_gpu
        for name, values in orders:
            getattr(learner, name)(*values)
            if engine_sleeps:  # it wakes up on this GPU
                torch.cuda.empty_cache()
    except Exception as error:
        with suppress(RuntimeError):  # rank 0 has gone, and the store with it
            store.set(f"error{place.rank}", f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


def ranked_learner(
    ranks: Ranks, whole: Mapping[str, Policy], run: TrainingConfig, mode: str, policy: Policy, config: PretrainedConfig
) -> RankedLearner:
    """Build this rank's learner. `whole`: rank 0's complete policies by name; none elsewhere.

    Unless it trains these, `policy` gets a model of this rank, whose weights come later (`fill`), and with it goes a
    frozen copy as the reference model, if a KL term needs it.
    """
    policies = whole
    if mode == "shard" or not whole:
        if mode == "shard":
            policy.model = skeleton_of(config)
        else:
            policy.model = from_config(config)
            if policy.weights != torch.float32:
                round_weights(policy.model, policy.weights)
            policy.model.to(policy.device)  # type: ignore[arg-type]
            use_fast_products(policy.model)
        policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
        set_threads(run, policy)
        set_trained(run.model, policy, run.seed)
        policies = {"policy": policy}
        if getattr(run, "kl_placement", "none") != "none":
            policies["reference"] = frozen_copy(policy, whole=mode == "shard")
    if run.threads is None and ranks.device.type == "cpu":  # they divide the processor
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))
    if mode == "replicate":
        return RankedLearner(run, ranks, policies, whole)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    return ShardedLearner(run, ranks, {name: sharded(policy, mesh) for name, policy in policies.items()}, whole)
