"""The config group `rollout`: which engine samples, and where."""

from dataclasses import dataclass

from rlreason.config.choices import choice

INSTALL_VLLM = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


@dataclass
class RolloutConfig:
    """Which engine samples, and where."""

    engine: str = choice("hf", "vllm")  # chosen by rollout=NAME
    max_rows: int = 256  # sequences decoded side by side, at most
    async_level: int = 0  # 1: the next batch is sampled, with weights one update old, while this one is learned
    # Decoding steps by torch.compile: worth its minutes on long runs; with it a run that goes on may round otherwise.
    compile: bool = False
    # colocate: on the policy's GPU; second_gpu: on one of its own, in a process of its own; auto: colocate, else cpu.
    placement: str = choice("auto", "colocate", "second_gpu", "cpu", default="auto")
    sleep: bool = True  # give the engine's memory to training; false is faster where both fit
    # Gigabytes of the KV cache; null: enough for max_rows, at most 40% of what is free.
    kv_cache_gb: float | None = None
    # When engine and trainer disagree after a weight sync: stop, warn, or off to compare nothing.
    attest: str = choice("stop", "warn", "off", default="stop")
    timeout_s: float = 600.0  # seconds for the start, one decoding step or one weight sync

    @property
    def shares_gpu(self) -> bool:
        """Whether vLLM runs where the policy does, so that its memory may be given back."""
        return self.placement in ("auto", "colocate")

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = []
        if self.async_level and self.engine == "hf":
            bad.append(
                "rollout.async_level=1 with rollout=hf: the in-process engine samples from the very weights that are "
                "being trained; set it to 0, or choose rollout=vllm"
            )
        if self.async_level and self.engine == "vllm" and self.sleep and self.shares_gpu:
            bad.append(
                "rollout.async_level=1 with rollout.sleep=true: an engine that samples during training cannot give "
                "its memory away; set rollout.sleep=false"
            )
        return bad
